"""The values that inputs can have, where a converter sets them in steps."""

import math

import numpy as np
import pytest
import torch

from bondgrad.calling._grid import Grid
from bondgrad.calling._inputs import Limits


def numbers(x, low, step):
    """How many steps above the lower limit, in double precision."""
    return (x.double() - low) / step


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("low", "high", "step"), [(-1, 1, 0.1), (0.1, 0.7, 0.2), (-3.3, 1e3, 1 / 3), (0, 1e-3, 1e-6)])
def test_points_are_whole_steps_inside_the_limits(dtype, low, high, step):
    limits = Limits((low, high), 2, step)
    x = (torch.rand(1000, 2, dtype=dtype) * 1.2 - 0.1) * (high - low) + low
    points = limits.clamped(x)
    k = numbers(points, low, step)
    assert float((k - k.round()).abs().max()) < 1e-3
    assert float(points.double().min()) >= low
    assert float(points.double().max()) <= high
    inside = (x > low) & (x < high - step)
    assert float((points - x)[inside].abs().max()) <= step * 0.501
    assert torch.equal(limits.clamped(points), points)


def test_equal_numbers_have_equal_bits():
    """However a point is reached: by moving up, by moving down, or with an error of rounding."""
    limits, step = Limits((-1.7, 2.3), 1, 0.1), 0.1
    k = torch.arange(41.0)[:, None]
    exact = limits.clamped((-1.7 + step * k.double()).float())
    assert len(exact.unique()) == 41
    for other in (exact.nextafter(torch.tensor(9.0)), exact.nextafter(torch.tensor(-9.0)), exact + 0.04, exact - 0.04):
        assert torch.equal(limits.clamped(other), exact)
    assert torch.equal(limits.clamped(exact[:-3] + 3 * step), exact[3:])


def test_the_last_value_is_the_last_whole_step_below_the_limit():
    limits = Limits((0, [1.0, 0.95, 0.3]), 3, [0.1, 0.1, 0.1])
    assert torch.allclose(limits.clamped(torch.full((1, 3), 5.0)), torch.tensor([[1.0, 0.9, 0.3]]))
    assert torch.allclose(limits.like(torch.zeros(1, 3))[1], torch.tensor([1.0, 0.9, 0.3]))


def test_without_a_lower_limit_steps_count_from_zero():
    for limits in (None, (-math.inf, 5.05)):
        made = Limits(limits, 1, 0.25)
        assert made.clamped(torch.tensor([[-7.6], [0.3], [1.1]])).flatten().tolist() == [-7.5, 0.25, 1.0]
    assert made.clamped(torch.tensor([[9.0]])) == 5.0


def test_a_resolution_for_each_input_and_for_sequences():
    limits = Limits(None, 2, np.array([0.5, 2.0]))
    x = torch.tensor([[0.6, 0.6, 1.4, 1.4]])
    assert limits.clamped(x).tolist() == [[0.5, 0.0, 1.5, 2.0]]


def test_what_is_not_finite():
    x = torch.tensor([[math.nan, math.inf, -math.inf]])
    assert Limits(None, 3, 0.1).clamped(x).isnan().all()
    assert Limits((-1, 1), 3, 0.5).clamped(x).isnan().all()
    assert Limits((-1, 1), 3, 0.5).admissible(x).tolist() == [[0, 0, 0]]


def test_moves_are_whole_multiples_and_one_at_least():
    grid = Grid(0.1, *(torch.full((1,), end, dtype=torch.float64) for end in (-math.inf, math.inf)))
    size = torch.tensor([0.0, 1e-9, 0.14, 0.16, 0.5])[:, None]
    assert torch.allclose(grid.moves(size), torch.tensor([0.1, 0.1, 0.1, 0.2, 0.5])[:, None])
    assert torch.allclose(grid.moves(size, 2), torch.tensor([0.2, 0.2, 0.2, 0.2, 0.4])[:, None])


@pytest.mark.parametrize("wrong", [0, -1, math.nan, math.inf, [1, 2, 3], "fine", [[1]], [0.1, 0]])
def test_what_is_refused(wrong):
    with pytest.raises(ValueError, match="resolution must be"):
        Limits((-9, 9), 2, wrong)


def test_two_values_must_be_left():
    with pytest.raises(ValueError, match="two values within limits"):
        Limits((0, [1, 0.9]), 2, 1.0)
