"""Sums over the rows of trials, and how slopes over twice the step are fitted from them."""

import math
import statistics

import pytest
import torch

from bondgrad.policies import Differences, StepTrial
from bondgrad.policies._trial_sums import COUNT, Fit, Growth, TrialSums

CENTRAL, FORWARD = Differences(), Differences(1, True)
NO_JUMPS = torch.zeros(1, dtype=torch.bool)
each_kind = pytest.mark.parametrize("differences", [CENTRAL, FORWARD], ids=["central", "forward"])

# The combination of D(h/2), D(h), D(2h) without slope and bending, and its variance for a variance of 1 in D(h). With
# an end in common, half of every variance comes from the noise of that end.
ODD = {
    CENTRAL: ((1, -1.25, 0.25), 4 + 1.25**2 + 0.25**2 / 4),
    FORWARD: ((1, -1.5, 0.5), (4 + 1.5**2 + 0.5**2 / 4 + (2 - 1.5 + 0.5 / 2) ** 2) / 2),
}
# Of the noise: the covariance of D(h/2) and D(h), that of D(2h) and D(h), and the variance of D(2h).
COVARIANCE = {CENTRAL: (0, 0, 0.25), FORWARD: (1, 0.25, 0.25)}


def trial_of(slopes, differences=CENTRAL, sound=True, step=None, repeated=0.0):
    slopes = torch.as_tensor(slopes, dtype=torch.float64)
    _, r, d = slopes.shape
    nothing, sound = torch.zeros(r, d, dtype=torch.float64), torch.as_tensor(sound).expand(r, d)
    steps = nothing + (0.5 if step is None else torch.as_tensor(step, dtype=torch.float64))
    random = torch.tensor(repeated, dtype=torch.float64)
    return StepTrial(differences, nothing[0], nothing[0], steps, slopes, sound, nothing, random)


def sums_of(slopes, differences=CENTRAL, sound=True, unit=1.0, step=None, repeated=0.0):
    trial = trial_of(slopes, differences, sound, step, repeated)
    step = trial.step[0]
    found = TrialSums.of(trial, torch.tensor(unit), step)
    assert found.shape == (COUNT, len(step))
    return TrialSums(*found)


def variances(slopes, sound, differences):
    """The variance that each sound row seems to have, of every input."""
    combination, total = ODD[differences]
    found = []
    for i in range(slopes.shape[2]):
        rows = [(r, slopes[:, r, i].tolist()) for r in range(slopes.shape[1]) if sound[r, i]]
        found.append({r: sum(c * s for c, s in zip(combination, three, strict=True)) ** 2 / total for r, three in rows})
    return found


def by_rows(slopes, sound, differences, unit, step, repeated):
    """The sums, row by row; `repeated` is h² times the variance of slopes by repeated answers."""
    random = (5 if differences == CENTRAL else 3) * repeated / unit**2  # of D(h/2) - D(h)
    slopes = torch.as_tensor(slopes, dtype=torch.float64) / unit
    known = [[all(abs(float(s)) < 1e15 for s in slopes[:, r, i]) for i in range(len(step))] for r in range(len(sound))]
    sound = torch.tensor(known) & sound
    noise = variances(slopes, sound, differences)
    levels = [statistics.fmean(of.values()) * h**2 for of, h in zip(noise, step, strict=True) if of]
    columns = []
    for i, h in enumerate(step):
        squares = [sum(float(s) ** 2 for s in slopes[:, r, i]) / 3 if known[r][i] else 0.0 for r in range(len(sound))]
        middle = statistics.median_low([square for square, row in zip(squares, known, strict=True) if row[i]] or [0])
        least = 30 * statistics.median_low(levels) / h**2 + 1e-3 * middle
        column, trusted = [0.0] * COUNT, []
        for r in range(len(sound)):
            if known[r][i]:
                half, one, two = slopes[:, r, i].tolist()
                weight = least / (squares[r] + least)
                terms = (1, one**2, (two - one) * one, (two - one) ** 2, (half - one) * one)
                move = max(abs(half) / 4, abs(one) / 2, abs(two)) ** 2 + least  # of h/2, h and 2h
                rough = ((half - one) ** 2 / move, (two - one) ** 2 / move, random / h**2 / move)
                parts = [*(weight * term for term in terms), *rough, 1, float(sound[r, i])]
                column = [total + part for total, part in zip(column, [*parts, 0], strict=True)]
                trusted += [(weight, noise[i][r])] if sound[r, i] else []
        if trusted:
            column[-1] = sum(w * v for w, v in trusted) / sum(w for w, _ in trusted) * len(trusted)
        columns.append(column)
    return torch.tensor(columns).T


@each_kind
@pytest.mark.parametrize("rows", [1, 7, 16])
def test_sums_are_those_row_by_row(rows, differences):
    random = torch.Generator().manual_seed(rows)
    slopes = 3 * torch.randn(1, rows, 3, generator=random) + 0.2 * torch.randn(3, rows, 3, generator=random)
    slopes[:, rows // 2 + 1 :, 1] *= 100
    slopes[0, :2, 2] = torch.tensor([math.nan, math.inf])[: min(rows, 2)]
    sound = torch.rand(rows, 3, generator=random) < 0.8
    sound[0, 0] = True
    expected = by_rows(slopes, sound, differences, 2.0, [0.5, 0.25, 2.0], 0.03)
    found = sums_of(slopes, differences, sound, 2.0, [0.5, 0.25, 2.0], 0.03)
    assert torch.allclose(torch.stack(found), expected, rtol=1e-4, atol=1e-6)


def growing(size, growth, rows):
    """Slopes without noise and without bending that grow from h to 2h by that part, [3, rows, 1]."""
    return torch.tensor([1 - growth / 12, 1, 1 + growth])[:, None, None].expand(3, rows, 1) * size


def test_rows_count_alike_whatever_the_size_of_their_slopes():
    slopes = torch.cat((growing(1.0, 0.3, 8), growing(100.0, 0.0, 8)), 1)
    found = Fit.of(sums_of(slopes), torch.zeros(1), CENTRAL, NO_JUMPS)
    assert float(found.growth) == pytest.approx(0.15, abs=0.02)
    noisy = slopes + torch.tensor([1e-9, 0, 0])[:, None, None]  # a little noise makes no difference
    assert float(Fit.of(sums_of(noisy), torch.zeros(1), CENTRAL, NO_JUMPS).growth) == pytest.approx(0.15, abs=0.02)


def test_a_row_with_a_slope_of_next_to_nothing_does_not_count_more_than_others():
    slopes = torch.cat((growing(1.0, 0.0, 15), growing(1e-6, 3.0, 1)), 1)
    sums = sums_of(slopes)
    assert float(sums.weight) == pytest.approx(1 + 15 / 1001, rel=1e-3)  # its weight is 1, that of others 1/1001
    assert float(Fit.of(sums, torch.zeros(1), CENTRAL, NO_JUMPS).growth) == pytest.approx(0, abs=1e-6)


def test_rows_that_are_lost_in_noise_have_the_same_weight_whatever_their_slopes():
    random = torch.Generator().manual_seed(0)
    amplitude = torch.tensor([2.0, 1.0, 0.5])[:, None, None]
    slopes = amplitude * torch.randn(3, 1000, 1, generator=random)
    slopes[:, ::2] += 0.1
    sums = sums_of(slopes)
    # 30 / (30 + x) with x the mean square of three slopes, (4 + 1 + 1/4) / 3 in the mean
    assert float(sums.weight / sums.rows) == pytest.approx(30 / (30 + 1.75), abs=0.01)
    assert float(sums.noise / sums.sound) == pytest.approx(1, abs=0.1)


def test_the_noise_of_all_inputs_is_the_one_of_their_outputs():
    """An input by which outputs seem much noisier, since it bends in no power of h, does not have other weights."""
    slopes = torch.ones(3, 4, 3) + torch.tensor([1e-3, 0, 0])[:, None, None]
    odd = slopes.clone()
    odd[0, :, 2] += 0.5
    assert torch.equal(sums_of(odd).weight[:2], sums_of(slopes).weight[:2])
    assert float(sums_of(odd).weight[2]) < 5e-3
    noisy = ODD[CENTRAL][1]
    assert sums_of(odd).noise.tolist() == pytest.approx([4e-6 / noisy] * 2 + [4 * 0.501**2 / noisy], rel=1e-3)


@pytest.mark.parametrize("unknown", [math.nan, math.inf, -math.inf, 1.1e15, -1.1e15])
@pytest.mark.parametrize("which", range(3))
def test_rows_that_lack_a_slope_or_have_one_that_is_too_large_say_nothing(unknown, which):
    slopes = torch.tensor([1.3, 1.0, 0.7])[:, None, None].expand(3, 5, 1)
    more = torch.cat((slopes, slopes[:, :1]), 1)
    more[which, -1] = unknown
    found = torch.stack(sums_of(more))
    assert torch.allclose(found, torch.stack(sums_of(slopes)))
    assert float(TrialSums(*found).rows) == 5


def test_slopes_are_large_or_small_in_their_unit():
    slopes = torch.randn(3, 8, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    usual = torch.stack(sums_of(slopes))
    for unit in (1e-30, 1e30):
        assert torch.allclose(torch.stack(sums_of(slopes * unit, unit=unit)), usual, rtol=1e-5)


def test_rows_with_failures_say_nothing_of_the_noise():
    slopes = torch.ones(3, 4, 1)
    slopes[0] += torch.tensor([[0.4], [0.2], [0.2], [0.2]])
    sums = sums_of(slopes, sound=torch.tensor([[False], [True], [True], [True]]))
    assert (float(sums.rows), float(sums.sound)) == (4, 3)
    assert float(sums.noise) == pytest.approx(3 * 0.04 / ODD[CENTRAL][1])
    nothing = sums_of(slopes, sound=False)
    assert (float(nothing.rows), float(nothing.sound), float(nothing.noise)) == (4, 0, 0)


def test_without_any_slope_all_is_zero():
    assert not torch.stack(sums_of(torch.full((3, 4, 2), math.nan))).any()


# ---- fits


def moments(
    half=0.0, twice=0.0, square=1.0, variance=0.0, bent=0.0, differences=CENTRAL, rows=16.0, sound=None, weight=1.0
):
    """The sums where D(h/2) is (1 + half)·D(h) and D(2h) is (1 + twice)·D(h), and errors beside that."""
    common_half, common, own = COVARIANCE[differences]
    means = (
        1.0,
        square + variance,
        twice * square - variance * (1 - common),
        twice**2 * square + variance * (own - 2 * common + 1) + bent,
        half * square - variance * (1 - common_half),
    )
    counts = (0.0, 0.0, 0.0, rows, rows if sound is None else sound, variance * (rows if sound is None else sound))
    return TrialSums(*(torch.tensor([v], dtype=torch.float64) for v in (*(weight * rows * m for m in means), *counts)))


def fit_of(variance=0.0, differences=CENTRAL, **values):
    sums = moments(variance=variance, differences=differences, **values)
    return [float(part) for part in Fit.of(sums, torch.tensor([variance], dtype=torch.float64), differences, NO_JUMPS)]


def growth(k, variance=0.0, differences=CENTRAL, **values):
    sums = moments(variance=variance, differences=differences, **values)
    return float(Growth.of(sums, torch.tensor([variance], dtype=torch.float64), differences, NO_JUMPS, k).each)


@each_kind
@pytest.mark.parametrize("weight", [1.0, 0.01])
def test_growth_is_that_of_slopes_without_their_noise_drawn_to_zero_by_it(differences, weight):
    assert growth(2, twice=0.2, differences=differences, weight=weight) == pytest.approx(0.2)
    assert growth(0, half=-0.1, differences=differences, weight=weight) == pytest.approx(-0.1)
    # Twice the variance is added to the squares.
    noisy = {"variance": 0.1, "differences": differences, "weight": weight}
    assert growth(2, twice=0.2, **noisy) == pytest.approx(0.2 / 1.2)
    assert growth(0, half=-0.1, **noisy) == pytest.approx(-0.1 / 1.2)


@each_kind
def test_what_a_fit_leaves_is_noise_and_bending(differences):
    _, common, own = COVARIANCE[differences]
    left, by_noise = fit_of(variance=0.1, bent=0.7, differences=differences)[1:]
    assert left == pytest.approx(0.7 + by_noise)
    assert by_noise == pytest.approx(0.1 * (own - 2 * common + 1))
    assert fit_of(twice=0.2, bent=0.7, differences=differences)[1:] == pytest.approx([0.7, 0])
    grown, left, by_noise = fit_of(twice=0.3, variance=0.1, differences=differences)
    assert grown == growth(2, twice=0.3, variance=0.1, differences=differences)
    assert by_noise == pytest.approx(0.1 * (own - 2 * (1 + grown) * common + (1 + grown) ** 2))
    assert left == pytest.approx((0.3 - grown) ** 2 + by_noise)


def test_where_one_of_two_ends_failed_there_is_four_times_the_noise():
    by_noise = [fit_of(variance=0.1, sound=sound)[2] for sound in (16.0, 8.0, 0.0)]
    assert by_noise == pytest.approx([0.125, 2.5 * 0.125, 4 * 0.125])  # in the mean over rows


@pytest.mark.parametrize(("twice", "expected"), [(9.0, 3), (-3.0, -1), (0.2, 0.2)])
def test_growth_has_bounds(twice, expected):
    assert growth(2, twice=twice) == pytest.approx(expected)


def test_nothing_grows_where_there_are_no_slopes():
    assert fit_of(square=0.0, twice=0.0) == [0, 0, 0]
    assert growth(2, square=0.0, variance=0.1) == pytest.approx(0)
    assert growth(2, rows=0.0, variance=0.1) == pytest.approx(0.1 / 0.2 * 1)  # no row at all, and so no cross


def growths(*inputs, jumps=(), k=2, differences=CENTRAL):
    """Of inputs whose moments are given, those with such numbers jumping."""
    sums = TrialSums(*map(torch.cat, zip(*(moments(differences=differences, **of) for of in inputs), strict=True)))
    variance = torch.tensor([of.get("variance", 0.0) for of in inputs], dtype=torch.float64)
    return Growth.of(sums, variance, differences, torch.tensor([i in jumps for i in range(len(inputs))]), k)


CLEAR, HIDDEN = {"twice": -0.6}, {"twice": 0.0, "square": 0.0, "variance": 0.1}
HALF_HIDDEN = {"twice": 0.2, "square": 1.0, "variance": 0.5}  # doubt is a half: 1 + 2 · 0.5 is the denominator


@each_kind
def test_where_noise_hides_the_growth_of_an_input_it_is_that_of_the_others(differences):
    assert growths(CLEAR, HIDDEN, differences=differences).each.tolist() == pytest.approx([-0.6, -0.6])
    assert growths(CLEAR, HALF_HIDDEN, differences=differences).each.tolist() == pytest.approx([-0.6, 0.1 - 0.3])
    # The growth of the others is drawn to zero, too, but by their number less: 0.1 / (1/2 + 1/2 · 1/2) of two.
    three = growths(HALF_HIDDEN, HALF_HIDDEN, HIDDEN, differences=differences).each
    assert float(three[2]) == pytest.approx(0.2 / (1 + 1 / 2))
    assert growths(HIDDEN, HIDDEN).each.tolist() == [0, 0]


def test_inputs_with_jumps_say_nothing_of_others():
    assert growths(CLEAR, HIDDEN, jumps=(0,)).each.tolist() == pytest.approx([-0.6, 0])
    found = growths(CLEAR, HIDDEN, HIDDEN, {"twice": 0.4}, jumps=(2, 3))
    assert found.each.tolist() == pytest.approx([-0.6, -0.6, 0.4, 0.4])
    assert found.common.tolist() == pytest.approx([-0.6 / 1.5] * 2 + [0.4 / 1.5] * 2)


@each_kind
@pytest.mark.parametrize("k", [0, 2])
def test_the_error_of_the_common_growth_is_that_of_noise(k, differences):
    """By noise of variance v, D(h) times another slope has a deviation of v times that of the other's noise."""
    own = {0: 4.0, 2: 0.25}[k]
    for n, rows in ((1, 16.0), (4, 16.0), (4, 64.0)):
        found = growths(*[HIDDEN | {"rows": rows}] * n, k=k, differences=differences)
        # The product is off by sqrt(own / (n · rows)) · v, and is divided by twice v, the doubt, over the number.
        assert found.error.tolist() == pytest.approx([math.sqrt(own / (n * rows)) / (2 / n)] * n)
    assert growths(CLEAR, CLEAR, k=k).error.tolist() == [0, 0]


def test_an_input_of_which_no_row_is_known_does_not_count():
    nothing = {"rows": 0.0, "variance": 0.0}
    found = growths(CLEAR, HALF_HIDDEN, nothing)
    assert found.each.tolist() == pytest.approx([-0.6, 0.1 - 0.3, 0])
    assert torch.isfinite(torch.stack(found)).all()
