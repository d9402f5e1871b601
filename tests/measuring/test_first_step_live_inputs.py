"""The first step of boxes some inputs of which have no slopes, and of slopes that are hardly more than zero."""

import pytest
import torch

from bondgrad.measuring._first_step import climb
from bondgrad.measuring._spread import Spread
from tests.measuring.test_first_step import start, step_of


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(("inputs", "live"), [(3, 1), (4, 1), (16, 4)])
def test_the_typical_slope_is_that_of_inputs_that_have_one(inputs, live, rows):
    """Slopes agree best over 4⁻⁴, whatever the others do, which go with them."""

    def slopes(h):
        part = torch.arange(inputs) < live
        return (3.0 * part * (1 + 1e-4 * h / 4.0**-4 + 1e-4 * 4.0**-4 / h)).expand(rows, inputs)

    found = climb(start(slopes, (1.0,) * inputs))
    assert float(found.slope) == pytest.approx(3, rel=0.01)
    assert found.step.tolist() in ([2 * 4.0**-5] * inputs, [2 * 4.0**-4] * inputs)
    assert not found.jumps.any()


@pytest.mark.parametrize(("inputs", "live"), [(4, 1), (16, 4)])
@pytest.mark.parametrize("sigma", [0.0, 1e-6, 1e-3])
def test_first_steps_go_by_the_inputs_that_have_slopes(inputs, live, sigma):
    """The error of sin(x) is h²/6 and sigma / h: they start where they would if there were no others."""
    part = (torch.arange(inputs) < live).double()
    for seed in range(5):
        steps = step_of(lambda x: part * torch.sin(x), sigma=sigma, scale=(1.0,) * inputs, seed=seed)[:live]
        alone = step_of(torch.sin, sigma=sigma, scale=(1.0,) * live, seed=seed)
        best = (3 * sigma) ** (1 / 3)
        for step in (*steps, *alone):
            assert best / 16 < step < max(16 * best, 0.01)


@pytest.mark.parametrize("rows", [1, 3])
def test_inputs_without_slopes_do_not_keep_a_few_rows_from_their_steps(rows):
    def slopes(live):
        return lambda h: live * (1 + h.mean() ** 2).expand(rows, 4)

    all_live, some = (climb(start(slopes(torch.tensor(live)), (1.0,) * 4)) for live in ([2.0] * 4, [2.0, 0, 2.0, 0]))
    assert torch.equal(some.step, all_live.step)
    assert float(some.slope) == float(all_live.slope)
    none = climb(start(slopes(torch.zeros(4)), (1.0,) * 4))
    assert none.step.tolist() == [1] * 4


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("size", [1e-25, 1e-20, 1e20])
def test_slopes_of_any_size_in_single_precision(size, rows):
    """The square of such a slope times a step is less than the smallest number there is."""

    def found(by):
        point = start(lambda h: by * (1 + h**2).expand(rows, 1))
        reach = point.reach.float()
        return climb(point._replace(spread=Spread(reach, reach), reach=reach, noise=point.noise.float()))

    usual, other = found(1.0), found(size)
    assert usual.step.dtype == torch.float32
    assert torch.equal(other.step, usual.step)
    assert float(usual.step) < 0.01
    assert float(other.slope) == pytest.approx(size * float(usual.slope), rel=1e-4)
