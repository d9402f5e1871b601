"""Slopes of a loss, by symmetric differences whose step nobody has to choose; numbers worked out by hand."""

import math

import pytest
import torch

from bondgrad.calling._inputs import Limits
from bondgrad.checking._sampler import GradientSampler
from bondgrad.checking._slopes import LossSlopes

ANYWHERE = (-math.inf, math.inf)


def slopes_of(box, x, gy=None, scale=1.0, limits=ANYWHERE, context=(), resolution=None):
    """The loss at rows x, by default the sum of one output."""
    x = torch.as_tensor(x)
    gy = torch.ones(len(x), 1) if gy is None else torch.tensor(gy)
    scale = torch.as_tensor(scale, dtype=torch.float64).expand(x.shape[1])
    sampler = GradientSampler(box, 10**6, None)
    return LossSlopes(sampler, x, context, gy.double(), scale, Limits(limits, x.shape[1], resolution))


def random(seed=0):
    return torch.Generator().manual_seed(seed)


def test_points_that_are_sought_one_by_one_are_settings_within_the_limits():
    slopes = slopes_of(lambda x: x[:, 1:], torch.tensor([[0.0, 0.5]]), limits=(-1, 1.1), resolution=0.25)
    moves = torch.tensor([[0.1, 0.2, -0.4, 9.0, -9.0]], dtype=torch.float64)
    losses = slopes.losses_at(torch.tensor([0]), torch.tensor([1]), moves)
    assert losses.tolist() == [[0.5, 0.75, 0.0, 1.0, -1.0]]


# ---- the ladder


@pytest.mark.parametrize(("dtype", "rungs"), [(torch.float32, 7), (torch.float64, 14)])
def test_the_ladder_leads_by_factors_of_four_to_the_root_of_rounding(dtype, rungs):
    ladder = slopes_of(torch.sin, torch.zeros(1, 1, dtype=dtype)).ladder()
    assert ladder.flatten().tolist() == [4.0**-i for i in range(rungs)]
    assert ladder[0, 0, -1] == pytest.approx(math.sqrt(torch.finfo(dtype).eps), rel=1)


def test_no_step_is_shorter_than_64_units_of_rounding_nor_longer_than_the_room_between_limits():
    x = torch.tensor([[100.0, 100.0, 0.75]])
    ladder = slopes_of(torch.sin, x, scale=[1.0, 1e-4, 2.0], limits=([0, 0, 0.5], [300, 300, 9])).ladder()
    ulps = 64 * 2**-23 * 100
    assert ladder[0, 0].tolist() == pytest.approx([1, 1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 1024, ulps])
    assert ladder[0, 1].tolist() == [1] * 7  # of the spread, which is not much more than rounding
    assert ladder[0, 2, :2].tolist() == [0.125, 0.03125]  # 0.25 up to the limit, in units of 2


# ---- losses


def products(x):
    """y₀ = x₀², y₁ = x₀ x₁."""
    return torch.stack((x[:, 0] ** 2, x[:, 0] * x[:, 1]), 1)


def test_losses_with_one_input_moved_at_a_time():
    slopes = slopes_of(products, [[1.0, 2.0], [3.0, 0.0]], gy=[[1, 10], [2, 0]], scale=[1.0, 2.0])
    steps = torch.tensor([0.5, 1.0]).expand(2, 2, 2).double()
    moves, losses = slopes.losses(steps)
    assert moves.tolist() == [[[[0.5, -0.5], [1, -1]]] * 2] * 2
    assert losses[0, 0].tolist() == [[1.5**2 + 10 * 3, 0.5**2 + 10 * 1], [4 + 10 * 4, 0]]
    assert losses[0, 1].tolist() == [[1 + 10 * 3, 1 + 10 * 1], [1 + 10 * 4, 1]]  # by one and two in its own units
    assert losses[1, 0].tolist() == [[2 * 3.5**2, 2 * 2.5**2], [2 * 16, 2 * 4]]
    assert losses[1, 1].tolist() == [[18, 18], [18, 18]]
    assert slopes.base(slopes.outputs(3)).tolist() == [[21] * 3, [18] * 3]
    assert slopes.sampler.evaluations == 2 * 2 * 2 * 2 + 2 * 3


def test_moves_are_those_that_rounding_leaves():
    slopes = slopes_of(torch.sin, torch.tensor([[1e6]]), scale=1.0)
    moves, _ = slopes.losses(torch.tensor([[[0.1]]]).double())
    assert moves.flatten().tolist() == [0.125, -0.125]  # float32 has sixteenths there


@pytest.mark.parametrize("rows_at_once", [1, 9, 16, 10**6])
def test_calls_are_no_larger_than_the_box_can_take(rows_at_once):
    """Two rows with two steps to both sides are eight evaluations for each input; five inputs, and a context."""
    x, sizes, context = torch.randn(2, 5, generator=random()), [], torch.tensor([[1.0], [2.0]])

    def box(x, factor):
        sizes.append(len(x))
        return (factor * x).cumsum(1)[:, 2:]

    slopes = slopes_of(box, x, gy=[[1, 1, 1]] * 2, context=(context,))
    slopes.sampler.rows_at_once = rows_at_once
    _, losses = slopes.losses(torch.ones(2, 5, 2).double())
    change = (losses[..., 0] - losses[..., 1]) / 2
    assert torch.allclose(change[..., 0], context.double() * torch.tensor([3, 3, 3, 2, 1]), atol=1e-5)
    assert sizes == {1: [8] * 5, 9: [8] * 5, 16: [16, 16, 8], 10**6: [40]}[rows_at_once]


# ---- slopes


def test_extrapolation_leaves_a_sixty_fourth_of_the_fifth_power():
    """Of L = x⁵ at zero the quotient is t⁴: from t/2 and t/4 one gets -t⁴/64, from t and t/2 -t⁴/4."""
    slopes = slopes_of(lambda x: x**5, torch.zeros(3, 1).double())
    found = slopes.measure(torch.full((3, 1), 2.0).double(), 50, random())
    assert found.slope.shape == (50, 3, 1)
    assert torch.allclose(found.change, 15 * found.slope)
    t = (-64 * found.slope) ** 0.25  # every copy has a step of its own
    assert 0.7 * 2 <= t.min() < 0.72 * 2
    assert 0.98 * 2 < t.max() <= 2
    assert found.step.tolist() == [[2.0]] * 3
    assert slopes.cost(50) == slopes.sampler.evaluations == 50 * 3 * 7


@pytest.mark.parametrize(
    ("box", "at", "slope", "kink"),
    [
        (torch.square, 3.0, 6, 0),  # what grows with the step is no kink
        (lambda x: x**3, 1.0, 3, 0),
        (torch.abs, 0.0, 0, 2),
        (lambda x: x.clamp(min=0), 0.0, 0.5, 1),
    ],
)
def test_slopes_and_kinks(box, at, slope, kink):
    slopes = slopes_of(box, [[at]] * 2)
    found = slopes.measure(torch.full((2, 1), 0.1).double(), 4, random())
    assert found.slope.flatten().tolist() == pytest.approx([slope] * 8, abs=1e-4)
    assert found.kink.flatten().tolist() == pytest.approx([kink] * 8, abs=1e-3)
    assert found.loss.flatten().tolist() == pytest.approx([float(box(torch.tensor(at)))] * 8)


def test_more_samples_join_those_before():
    slopes = slopes_of(lambda x: x**5, torch.zeros(1, 2).double(), gy=[[1, 1]])
    step = torch.ones(1, 2).double()
    first, more = (slopes.measure(step, copies, random(copies)) for copies in (2, 3))
    both = first.joined(more)
    assert torch.equal(both.slope, torch.cat((first.slope, more.slope)))
    assert both.kink.shape == both.change.shape == both.loss.shape == (5, 1, 2)
    assert torch.equal(both.step, step)


def test_gradients_are_in_units_of_the_spread_and_every_copy_is_a_row():
    slopes = slopes_of(products, [[1.0, 2.0], [3.0, 0.0]], gy=[[1, 10], [2, 0]], scale=[1.0, 2.0])
    expected = [[2 * 1 + 10 * 2, 2 * 10], [2 * 2 * 3, 0]]  # times one and two
    assert slopes.gradients(3, random()).tolist() == [expected] * 3
    second = slopes_of(products, [[3.0, 0.0]], gy=[[2, 0]], scale=[1.0, 2.0])
    assert second.gradients(1, random()).tolist() == [[expected[1]]]
    assert (slopes.sampler.evaluations, second.sampler.evaluations) == (3 * 2, 1)


# ---- the step that is used


LADDER = [4.0**-i for i in range(7)]


def best_rung(quotients, x=0.0):
    """The rung from which steps are used, with the same quotients at three rows; or with some for each."""
    quotients = torch.tensor(quotients, dtype=torch.float64).view(-1, 1, 7).expand(3, 1, 7)
    slopes = slopes_of(lambda x: x * 0, torch.full((3, 1), x))
    steps = slopes.ladder()
    return [LADDER.index(step) for step in slopes.best_steps(steps, quotients).flatten().tolist()]


def test_the_step_is_where_extrapolated_slopes_agree_best():
    """Extrapolation takes the square away, and leaves the fourth power; towards the end there is noise in ever more."""
    noise = [0, 0, 0, 1e-6, -1e-4, 1e-2, -1]
    assert best_rung([1 + h**2 for h in LADDER]) == [0] * 3  # they agree everywhere: the longest
    assert best_rung([1 + h**2 + h**4 + e for h, e in zip(LADDER, noise, strict=True)]) == [2] * 3
    assert best_rung([1 + e for e in noise]) == [0] * 3
    assert best_rung([math.nan, math.nan] + [1.0] * 5) == [2] * 3  # no answer so far out


def test_two_rows_that_agree_by_chance_follow_the_others():
    noise = [0, 0, 0, 1e-6, -1e-4, 1e-2, -1]
    usual = [1 + h**2 + h**4 + e for h, e in zip(LADDER, noise, strict=True)]
    lucky = [*usual[:5], 1.0, 1.0]
    assert best_rung([usual, usual, lucky]) == [2] * 3
    kinked = [1.0, 3.0, 2.0, 4.0, 5.0, 5.0, 5.0]  # a row near a kink has a step of its own
    assert best_rung([[1 + h**2 for h in LADDER]] * 2 + [kinked]) == [0, 0, 4]


def test_steps_longer_than_a_wave_are_of_no_use():
    """Small slopes of which none is like the other; from the fourth rung on they are what they are."""
    assert best_rung([0.001, -0.002, 0.003, 90, 100, 100.1, 100.0])[0] >= 3
