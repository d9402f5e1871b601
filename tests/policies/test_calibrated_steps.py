"""From the sums of trials to a step: the pieces of `Calibrated`, by numbers."""

import math

import pytest
import torch

from bondgrad.policies import Batch, Calibrated, Differences
from bondgrad.policies._calibrated import (
    FACTORS,
    SETTINGS,
    TrialSums,
    _bending,
    _best_factor,
    _next_round,
    _noise,
    _products,
    _ratio,
)


def one(*values):
    return [torch.tensor([value]) for value in values]


def factor_of(variance, bending, stretch=0.0, size=1.0, order=2):
    return float(_best_factor(*one(variance, bending, stretch, size), order))


def by_search(variance, bending, stretch, size, order):
    """The same by plain arithmetic, of the errors relative to a slope that is stretched, too."""
    errors = {}
    for factor in FACTORS.flatten().tolist():
        stretched = stretch * factor**order
        if -SETTINGS.most_shrunk <= stretched <= SETTINGS.most_stretched:
            error = (variance + SETTINGS.finest * size) / factor**2 + bending * factor ** (2 * order)
            errors[factor] = (error + (SETTINGS.stretch_harm * stretched) ** 2 * size) / (1 + stretched) ** 2
    return min(errors, key=errors.get)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("stretch", [0.0, 0.05, 0.2, -0.05, -0.09])
@pytest.mark.parametrize(("variance", "bending"), [(1e-2, 1e-2), (1e-2, 1e-4), (1e-4, 1e-2), (0.3, 0.1)])
def test_the_factor_with_the_least_relative_error(variance, bending, stretch, order):
    expected = by_search(variance, bending, stretch, 1.0, order)
    assert factor_of(variance, bending, stretch, 1.0, order) == pytest.approx(expected)


def test_at_the_best_step_noise_is_order_times_the_bending():
    assert factor_of(2e-2, 1e-2, order=2) == pytest.approx(1)
    assert factor_of(1e-2, 1e-2, order=1) == pytest.approx(1)


def test_where_there_is_next_to_no_noise_steps_get_no_longer():
    assert factor_of(0.0, 0.0) == 1
    assert factor_of(0.0, 1.0) == pytest.approx(0.25)


def test_the_longest_step_that_is_accepted_may_stretch_slopes_by_a_quarter_or_shrink_them_by_a_tenth():
    assert factor_of(1.0, 0.0, stretch=0.25 / 4) == factor_of(1.0, 0.0, stretch=-0.1 / 4) == 2


def test_a_step_at_which_all_slopes_are_stretched_too_far_is_shortened():
    assert factor_of(1.0, 0.0, stretch=1.9) == pytest.approx(0.25 * math.sqrt(2))  # 1.9 / 8 is less than a quarter
    assert factor_of(1.0, 0.0, stretch=100.0) == pytest.approx(0.25)  # no factor is enough


def sums(rows=16.0, product=1.0, square=1.0, residual=0.0, sound=None, noise=0.0):
    """For mean products and squares of the slopes."""
    values = (rows, product * rows, square * rows, residual * rows, rows if sound is None else sound)
    return TrialSums(*one(*values, noise * (rows if sound is None else sound)))


@pytest.mark.parametrize(
    ("product", "square", "variance", "expected"),
    [
        (1.2, 1.0, 0.0, 1.2),
        (9.0, 1.0, 0.0, 4),
        (0.0, 1.0, 0.0, 0.25),
        (0.0, 0.0, 0.0, 1),
        (1.2, 1.0, 0.1, (1.2 + 0.2) / (1.0 + 0.2)),  # noise draws it to one
    ],
)
def test_the_ratio_of_slopes(product, square, variance, expected):
    assert float(_ratio(*one(product, square, variance))) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("differences", "common"),
    [(Differences(), 0), (Differences(1, True), 0.25)],  # independent ends, or one that D(h) and D(2h) have in common
)
def test_noise_is_taken_off_the_products_of_slopes(differences, common):
    found = _products(sums(product=1.2 + 0.1 * common, square=1.0 + 0.1 / 4), torch.tensor([0.1]), differences)
    assert [float(value) for value in found] == pytest.approx([1.2, 1.0])
    assert float(_products(sums(square=0.01), torch.tensor([0.1]), differences)[1]) == 0  # less than its noise


def test_bending_is_what_is_left_beyond_twice_the_noise():
    # Of D(h) - D(2h) the noise is (1 + 1/4) of the variance, and bending nine times as much as in D(h).
    nothing, ratio = torch.zeros(1), torch.ones(1)
    scale = 9 - 2 * (1 + 0.25)
    assert float(_bending(sums(residual=0.9), nothing, ratio, Differences())) == pytest.approx(0.9 / scale)
    noisy = _bending(sums(residual=0.9), torch.tensor([0.2]), ratio, Differences())
    assert float(noisy) == pytest.approx((0.9 - 2 * 0.2 * 1.25) / scale)
    assert float(_bending(sums(residual=0.4), torch.tensor([0.2]), ratio, Differences())) == 0
    # Where one of two ends failed there is four times the noise: at half of the rows, two and a half times in the mean.
    one_sided = _bending(sums(residual=2.0, sound=8.0), torch.tensor([0.2]), ratio, Differences())
    assert float(one_sided) == pytest.approx((2.0 - 2 * 0.2 * 1.25 * 2.5) / scale)
    single = _bending(sums(rows=1.0, residual=0.9), torch.tensor([0.2]), ratio, Differences())
    assert float(single) == float(noisy)


def test_noise_that_slopes_have_in_common_is_not_in_what_is_left():
    # Of D(h) - D(2h) the noise is (1 - 2/4 + 1/4) of the variance, and bending as much as in D(h).
    found = _bending(sums(residual=0.9), torch.tensor([0.2]), torch.ones(1), Differences(1, True))
    assert float(found) == pytest.approx((0.9 - 2 * 0.2 * 0.75) / (1 - 0.75))


def state_of(d, step=0.1, noise=0.01, spread=1.0):
    state = Calibrated().init(d)
    return state | {"step": torch.full((d,), step), "noise": torch.tensor(noise), "spread": torch.full((d,), spread)}


def test_noise_is_the_median_over_inputs_with_answers_and_is_averaged_with_the_past():
    state = state_of(4)
    found = TrialSums(*torch.zeros(6, 4))._replace(sound=torch.tensor([8.0, 8.0, 8.0, 0.0]))
    found = found._replace(noise=8 * torch.tensor([2.0, 3.0, 50.0, 0.0]))
    assert float(_noise(state, found)) == pytest.approx((0.03 + 0.01) / 2)  # 3 · h², and 0.01 before
    for before, after in ((0.03 / 4.5, 0.03), (0.03 / 3.9, 0.03 * 4.9 / 7.8), (0.117, 0.147 / 2), (0.135, 0.03)):
        assert float(_noise(state | {"noise": torch.tensor(before)}, found)) == pytest.approx(after)
    assert float(_noise(state, TrialSums(*torch.zeros(6, 4)))) == pytest.approx(0.01)  # no row had all its answers


def test_steps_end_at_one_and_a_half_spreads_unless_most_inputs_are_calm():
    # Slopes that are all noise but for a clear signal: steps want to double, from 1.5 spreads on.
    state = state_of(4, step=1.5, noise=2.25)
    calm = torch.tensor([16.0, 16 * 1.0, 16 * 1.25, 0.0, 16.0, 16 * 1.0])[:, None].repeat(1, 4)
    longer = _next_round(state | {"sums": calm}, Differences())["step"]
    assert torch.allclose(longer, torch.full((4,), 1.5 * 1.5))
    half = calm.clone()
    half[4, :2] = 8.0  # rows at which nothing failed, of two inputs out of four
    half[5, :2] = 8.0
    assert torch.allclose(_next_round(state | {"sums": half}, Differences())["step"], torch.full((4,), 1.5))
    four_of_five = calm / 16 * 5
    four_of_five[4:] *= 0.8  # more than that must have answered
    assert torch.allclose(_next_round(state | {"sums": four_of_five}, Differences())["step"], torch.full((4,), 1.5))


def round_of(product, square, variance=1.0, order=2, rows=16.0, residual=0.0, step=0.1, spread=1.0):
    """The steps after a round with these mean products and squares of slopes, beside the noise."""
    differences = Differences(order, shared_base=order == 1)
    product, square = torch.tensor(product), torch.tensor(square) + variance / 4
    if order == 1:
        product = product + variance / 4
    noise, rest = torch.full_like(square, variance), torch.full_like(square, residual)
    means = torch.stack((torch.ones_like(square), product, square, rest, torch.ones_like(square), noise))
    state = state_of(len(square), step, variance * step**2, spread)
    return _next_round(state | {"sums": rows * means}, differences)["step"].tolist()


@pytest.mark.parametrize(
    ("order", "ratio", "factor"),
    [
        # Slopes grow by 1/12 over a step, and may grow by a quarter: the longest step of the grid below sqrt(3).
        (2, 0.8, 2**0.75),
        # By 3/17 over a step, and in proportion: below 17/12.
        (1, 0.85, 2**0.5),
        # By 1/60 over a step, with its fourth power: below the fourth root of 15.
        (4, 0.8, 2**0.875),
        # They shrink by 1/18, and may shrink by a tenth: below sqrt(1.8).
        (2, 1.2, 2**0.375),
    ],
)
def test_steps_grow_until_slopes_are_stretched_too_far(order, ratio, factor):
    """Where noise is all that counts otherwise. Twice its variance is added to products and squares."""
    assert round_of([ratio * 102 - 2], [100.0], order=order) == pytest.approx([0.1 * factor])


def test_steps_change_eightfold_a_round_at_most_from_a_quarter_to_twice():
    assert round_of([100.0], [100.0]) == pytest.approx([0.2])
    assert round_of([100.0], [100.0], residual=1e6) == pytest.approx([0.025])


@pytest.mark.parametrize(("rows", "threshold"), [(16.0, 3 / 8), (4.0, 3 / 4)])
def test_a_signal_is_three_standard_deviations_of_a_product_in_the_mean_over_rows(rows, threshold):
    """With a signal an input goes its own way: twice as far. Without it, from there half the way to its spread."""
    assert round_of([1.01 * threshold], [1.01 * threshold], rows=rows) == pytest.approx([0.2])
    assert round_of([0.99 * threshold], [0.99 * threshold], rows=rows) == pytest.approx([math.sqrt(0.2)])


def test_without_noise_an_input_without_slopes_has_no_signal():
    """It would go a quarter of its step; the other stays where it is. Without a signal it goes half way to that."""
    assert round_of([100.0, 0.0], [100.0, 0.0], variance=0.0) == pytest.approx([0.1, math.sqrt(0.025 * 0.1)])


def test_without_any_signal_steps_go_half_way_to_the_spread():
    assert round_of([0.0], [0.0], step=0.125) == pytest.approx([math.sqrt(2 * 0.125)])
    assert round_of([0.0], [0.0], step=0.125, spread=4.0) == pytest.approx([4 * math.sqrt(2 * 0.125 / 4)])


@pytest.mark.parametrize(
    ("step", "stretch", "longest"),
    [
        (1.2, 0.0, 1.5 * 1.2),
        (3.5, 0.0, 4.0),
        (0.9, 0.0, 1.5),
        (1.2, 0.028, 1.5 * 1.2),
        (1.2, 0.032, 1.5),  # slopes are stretched
        (1.2, -0.032, 1.5),
    ],
)
def test_calm_inputs_go_half_as_far_again_as_they_are_up_to_four_spreads(step, stretch, longest):
    ratio = 1 / (1 + 3 * stretch)
    assert round_of([ratio * 102 - 2] * 3, [100.0] * 3, step=step) == pytest.approx([longest] * 3)
    assert round_of([ratio * 102 - 2], [100.0], step=7 * step, spread=7.0) == pytest.approx([7 * longest])


def test_an_input_without_a_signal_goes_half_way_to_the_others():
    state = state_of(3, step=0.1, noise=1e-4)
    found = torch.tensor([16.0, 16.0, 16.0, 0.0, 16.0, 16 * 1e-2])[:, None].repeat(1, 3)
    found[3, :2] = 16 * 500.0  # they bend
    found[1, 2] = found[2, 2] = 0.0  # no slope at all
    steps = _next_round(state | {"sums": found}, Differences())["step"]
    assert steps.tolist() == pytest.approx([0.025, 0.025, math.sqrt(0.025 * 0.2)])  # by itself, it would double


@pytest.mark.parametrize(("rows", "factor"), [(7, 1.0), (8, 0.8), (64, 0.8)])
def test_steps_shrink_with_inputs_that_vary_ten_times_less_if_there_are_rows_to_tell(rows, factor):
    x = 0.1 * torch.tensor([-1.0, 1.0]).repeat(32)[:rows, None]
    x = x - x.mean()  # of mean zero, whatever the number of rows
    x = 0.1 * x / x.square().mean().sqrt()
    batch = Batch(x, torch.Generator().manual_seed(0), rows)
    steps = Calibrated().steps(state_of(1), batch, 1, 0.0)
    assert torch.allclose(steps.size, torch.full_like(steps.size, 0.1 * factor))  # eight times less is let pass
