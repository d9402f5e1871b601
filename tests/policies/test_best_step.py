"""From the errors of slopes to the factor on a step, by numbers."""

import math

import pytest
import torch

from bondgrad.policies._best_step import FACTORS, best_factor
from bondgrad.policies._trial_sums import SlopeErrors


def errors_of(noise, bending=0.0, stretch=0.0, square=1.0, saturates=False):
    numbers = (torch.tensor([float(value)]) for value in (noise, bending, stretch, square))
    none = torch.zeros(1, dtype=torch.bool)
    return SlopeErrors(*numbers, torch.tensor([saturates]), *torch.zeros(3, 1), none, torch.full((1,), 100.0))


def factor_of(*errors, order=2, **more):
    factor, error = best_factor(errors_of(*errors, **more), order)
    assert factor.shape == error.shape == (1,)
    return float(factor)


def by_search(noise, bending=0.0, stretch=0.0, square=1.0, saturates=False, order=2):
    """The same by plain arithmetic, of the errors relative to a slope that is stretched, too."""
    errors = {}
    for factor in FACTORS.flatten().tolist():
        stretched = stretch * factor**order
        if -(0.1 if saturates else 0.3) <= stretched <= 0.25:
            error = (noise + 1e-10 * square) / factor**2 + bending * factor ** (2 * order)
            errors[factor] = (error + (0.1 * stretched) ** 2 * square) / (1 + stretched) ** 2
    factor = min(errors, key=errors.get)
    return factor, errors[factor]


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("saturates", [False, True])
@pytest.mark.parametrize("stretch", [0.0, 0.05, 0.2, -0.05, -0.09, -0.15])
@pytest.mark.parametrize(("noise", "bending"), [(1e-2, 1e-2), (1e-2, 1e-4), (1e-4, 1e-2), (0.3, 0.1), (3.0, 0.0)])
def test_the_factor_with_the_least_relative_error(noise, bending, stretch, saturates, order):
    errors = {"noise": noise, "bending": bending, "stretch": stretch, "square": 2.0, "saturates": saturates}
    factor, error = by_search(**errors, order=order)
    assert factor_of(**errors, order=order) == pytest.approx(factor)
    assert float(best_factor(errors_of(**errors), order)[1]) == pytest.approx(error, rel=1e-5)


def test_at_the_best_step_noise_is_order_times_the_bending():
    assert factor_of(2e-2, 1e-2, order=2) == pytest.approx(1)
    assert factor_of(1e-2, 1e-2, order=1) == pytest.approx(1)


def test_where_there_is_next_to_no_noise_steps_get_no_longer():
    assert factor_of(0.0, 0.0) == factor_of(0.9e-10, 0.0) == 1
    assert factor_of(1.1e-10, 0.0) == 2
    assert factor_of(0.0, 1.0) == pytest.approx(0.25)


@pytest.mark.parametrize(("stretch", "saturates"), [(0.25, False), (-0.3, False), (0.25, True), (-0.1, True)])
@pytest.mark.parametrize("order", [1, 2])
def test_the_longest_step_may_stretch_slopes_by_a_quarter_or_shrink_them_by_three_tenths(stretch, saturates, order):
    """By a tenth only where the box saturates. Noise is all that counts otherwise."""
    for factor in (2**0.5, 2**0.75):
        just, beyond = (1 - 1e-5) * stretch / factor**order, (1 + 1e-5) * stretch / factor**order
        assert factor_of(1e4, stretch=just, order=order, saturates=saturates) == pytest.approx(factor)
        assert factor_of(1e4, stretch=beyond, order=order, saturates=saturates) == pytest.approx(factor / 2**0.125)


def test_a_step_at_which_all_slopes_are_stretched_too_far_is_shortened():
    assert factor_of(1.0, stretch=1.9) == pytest.approx(0.25 * math.sqrt(2))  # 1.9 / 8 is less than a quarter
    assert factor_of(1.0, stretch=100.0) == pytest.approx(0.25)  # no factor is enough
