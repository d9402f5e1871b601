"""The comparison of gradients with slopes, by numbers, and the entries that are left out of it."""

import math

import pytest
import torch

from bondgrad.checking._evidence import compare
from bondgrad.checking._slopes import SlopeSamples


def compared(g, s, noise_s=0.0, noise_g=0.0, change=0.0, kink=0.0, rounding=0.0, loss_noise=0.0, tolerance=0.01):
    """Of gradients g [r, d] with slopes s, each in four copies that are off by plus and minus so much."""
    sign = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)[:, None, None]
    g, s = (torch.as_tensor(t, dtype=torch.float64) for t in (g, s))
    kink, change, rounding = (torch.as_tensor(t, dtype=torch.float64).expand_as(s) for t in (kink, change, rounding))
    four, step = torch.ones_like(sign), torch.ones_like(s)
    loss = torch.zeros_like(s) + loss_noise * sign
    samples = SlopeSamples(s + noise_s * sign, four * change, four * kink, loss, step, rounding)
    return compare(g + noise_g * sign, samples, torch.zeros_like(s).bool(), tolerance)


S = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)


def test_factors_and_errors_of_exact_slopes():
    """The second input is off by a tenth: by 0.1 · (4 + 16) of the 30 that the squares of all slopes are."""
    found = compared(S * torch.tensor([1, 1.1]), S)
    assert found.factor.tolist() == pytest.approx([1, 1.1, 1 + 2 / 30])
    assert found.standard_error.tolist() == [0, 0, 0]
    assert found.error.tolist() == pytest.approx([0, 0.1])
    assert found.unexplained.tolist() == pytest.approx([0, 0], abs=1e-7)
    assert found.visible.tolist() == pytest.approx([0.01, 0.01])
    assert found.wrong.tolist() == [False, True, True]
    assert found.uniform.tolist() == [False, True, True]
    assert found.enough.all()
    assert not found.missing.any()
    assert not found.bending.any()


@pytest.mark.parametrize("tolerance", [0.01, 0.1])
@pytest.mark.parametrize("sign", [-1, 1])
def test_what_is_tolerated(tolerance, sign):
    for part, wrong in ((0.99, False), (1.01, True)):
        found = compared((1 + sign * part * tolerance) * S, S, tolerance=tolerance)
        assert found.wrong.tolist() == [wrong] * 3
        # An error that no factor explains, of the same size.
        mixed = compared(S + sign * part * tolerance * torch.tensor([[3, 4], [-1, -2]]), S, tolerance=tolerance)
        assert mixed.factor.tolist() == pytest.approx([1, 1, 1])
        assert mixed.error.tolist() == pytest.approx([part * tolerance] * 2)
        assert mixed.unexplained.tolist() == pytest.approx([part * tolerance] * 2)
        assert mixed.wrong.tolist() == [wrong, wrong, False]
        assert mixed.uniform.tolist() == [False] * 3


def test_the_noise_of_slopes_is_taken_off():
    """Four copies that are off by 0.3 have a mean with a variance of 0.03, by which squares are too large."""
    found = compared([[10.0]], [[10.0]], noise_s=0.3)
    assert float(found.factor[0]) == pytest.approx(100 / 99.97)
    assert float(found.standard_error[0]) == pytest.approx(math.sqrt(100 * 0.03 + 0.03**2 * (2 + 2 / 3)) / 99.97)
    assert float(found.error[0]) == 0
    both = compared([[11.0]], [[10.0]], noise_s=0.3, noise_g=0.6)  # with variances of 0.03 and 0.12
    variance = 100 * 0.15 + 0.03 * (0.03 * (2 + 2 / 3) + 0.12)
    assert float(both.standard_error[0]) == pytest.approx(math.sqrt(variance) / 99.97)
    assert float(both.error[0]) == pytest.approx(math.sqrt((1 - 0.15) / 99.97))
    assert float(both.factor[0]) == pytest.approx(1 + 10.03 / 99.97)


@pytest.mark.parametrize(("s", "clear"), [(0.8825, False), (0.8835, True)])
def test_a_slope_is_seen_if_its_square_is_26_times_its_variance(s, clear):
    """25 times, after the variance of 0.03 is taken off: 0.883² = 26 · 0.03."""
    found = compared([[s]], [[s]], noise_s=0.3, loss_noise=0.3)
    assert bool(found.factor[0].isnan()) is not clear
    assert math.isfinite(found.standard_error[0]) is clear


def test_noise_hides_errors_and_rows_make_up_for_it():
    few, many = (compared([[1.0]] * r, [[1.0]] * r, noise_s=1e-3) for r in (4, 64))
    assert 0.01 < float(few.visible[0]) < 0.015
    assert 0.01 < float(many.visible[0]) < float(few.visible[0])
    noisy = compared([[1.0]] * 16, [[1.0]] * 16, noise_s=0.05)
    assert float(noisy.visible[0]) > 0.03
    assert not noisy.enough.any()
    assert not noisy.bending.any()  # for noise, shorter steps are no remedy


def test_a_weak_slope_that_is_not_seen_counts_by_a_hundredth_of_the_typical():
    """Slopes of 1 and of nothing, and a gradient that is off by a part of the root mean square, 0.01 · √½."""
    unit = 0.01 * math.sqrt(0.5)
    s = torch.tensor([[1.0, 0.0]] * 4)
    for part, wrong in ((0.99, False), (1.01, True)):
        found = compared(s + torch.tensor([0, 0.01 * part * unit]), s)
        assert found.factor[1].isnan()
        assert float(found.error[1]) == pytest.approx(0.01 * part)
        assert found.wrong.tolist() == [False, wrong, False]


# ---- entries that are left out


def test_kinks_are_left_out():
    """One row of four is wrong, but has a kink there; what is less than the tolerance is none."""
    s = torch.ones(4, 1)
    g, kink = s.clone(), torch.zeros(4, 1)
    g[1] = 5
    kink[1] = 0.011
    found = compared(g, s, kink=kink)
    assert found.entries.at_kink.flatten().tolist() == [False, True, False, False]
    assert found.entries.known.flatten().tolist() == [True, False, True, True]
    assert not found.wrong.any()
    assert compared(g, s, kink=kink * 0.9).wrong.any()


@pytest.mark.parametrize(("kink", "seen"), [(4.7, False), (4.9, True)])
def test_kinks_stand_out_of_the_noise_by_four_standard_deviations(kink, seen):
    """That of rounding, 4.5 times as much in a slope and four times that in a kink: 18 · 1/15 = 1.2 in each."""
    s = torch.full((2, 1), 100.0)
    found = compared(s, s, kink=torch.tensor([[kink], [0.0]]), rounding=1 / 15)
    assert found.entries.at_kink.flatten().tolist() == [seen, False]


def test_rows_with_more_rounding_than_most_are_left_out():
    """Where it matters: the square of the tolerance, over thirty, of the squares of all slopes."""
    s, rounding = torch.ones(5, 1), torch.tensor([[1.0], [1.0], [1.0], [1.0], [2.0]]) / 4.5
    least = math.sqrt(1e-4 * 5 / 30) / 2  # at the last row
    for part, known in ((0.99, True), (1.01, False)):
        found = compared(s, s, rounding=part * least * rounding)
        assert found.entries.known.flatten().tolist() == [True] * 4 + [known]


@pytest.mark.parametrize(("noise", "aliased"), [(0.172, False), (0.174, True)])
def test_slopes_that_scatter_more_than_the_loss_say_nothing(noise, aliased):
    """Four times the variance of the mean, noise² / 3, is a hundredth of the square of slopes from 0.0866 on."""
    found = compared([[2.0]] * 3, [[2.0]] * 3, noise_s=noise)
    assert bool(found.entries.known.all()) is not aliased
    assert bool(found.bending[0]) is aliased
    assert math.isinf(found.visible[0]) is aliased
    calm = compared([[2.0]] * 3, [[2.0]] * 3, noise_s=noise, loss_noise=noise)  # as the loss does at one point
    assert calm.entries.known.all()


def test_what_extrapolation_leaves_is_allowed_for():
    """A quarter of the change between two steps: an error of so much is no mistake, but calls for shorter steps."""
    s = torch.ones(4, 1)
    for error, wrong in ((0.059, False), (0.061, True)):
        found = compared((1 + error) * s, s, change=0.2)
        assert found.wrong[0] == wrong
        assert found.bending[0]
    assert float(found.visible[0]) == pytest.approx(0.06)
    assert not compared(s, s, change=0.0099).bending[0]  # less than a quarter of the tolerance
    assert compared(s, s, change=0.0101).bending[0]


def test_gradients_that_are_missing():
    g = torch.ones(4, 3)
    s = g.clone()
    g[2, 1] = math.inf
    g[0, 2], s[0, 2] = math.inf, math.nan  # where the box has no slope either
    found = compared(g, s)
    assert found.missing.tolist() == [False, True, False]
    assert found.wrong.tolist() == [False, True, False, False]
