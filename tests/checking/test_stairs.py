"""Boxes that are piecewise constant along some inputs, or in some outputs: there is no slope to compare with."""

import pytest
import torch

from bondgrad import BlackBox, check
from bondgrad.checking._levels import Levels
from bondgrad.checking._stairs import OutputChanges
from bondgrad.policies import Fixed
from bondgrad.testing.boxes import Waves
from tests.checking.test_check import DTYPES, by_hand, only, rows


def days(x):
    """The price of a put whose last input is rounded to whole days."""
    x = x.double()
    s, v, t = 100 + 10 * x[:, 0], 0.25 + 0.04 * x[:, 1].clamp(-3, 3), (180 + x[:, 2]).round() / 365
    d = ((s / 100).log() + v * v / 2 * t) / (v * t.sqrt())
    return (100 * torch.special.ndtr(v * t.sqrt() - d) - s * torch.special.ndtr(-d))[:, None]


def days_at(x, spread=30.0):
    return x * torch.tensor([1.0, 1.0, spread]).to(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("policy", ["calibrated", Fixed(1.0), Fixed(1e-2)])
def test_an_integer_among_the_inputs_is_named_with_its_steps(dtype, policy):
    """Whether the gradient is a slope over many days, over few, or zero."""
    for seed in range(4):
        x = days_at(rows(3, dtype=dtype, seed=seed))
        resolved = BlackBox(days, 3, policy=policy, seed=seed)
        found = check(resolved, x, seed=seed, tolerance=0.1)
        assert str(found).startswith("undecided: the box jumps along input 2, so that a gradient there depends on the")
        assert found.problems == ()
        assert "the box is piecewise constant along input 2, with flat parts about " in found.notes[0]
        assert 0.4 < float(found.obstacle.staircase.flat[2] * x[:, 2].std()) < 2.5
        assert "about as long as the input varies, 3" in found.notes[0] or "varies, 2" in found.notes[0]
        assert found.evaluations < 20_000  # more of them would show nothing else


def test_a_mistake_along_another_input_is_found():
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            with torch.enable_grad():
                ctx.x = x.detach().requires_grad_()
                ctx.y = days(ctx.x)
            return ctx.y.detach()

        @staticmethod
        def backward(ctx, gy):
            (g,) = torch.autograd.grad(ctx.y, ctx.x, gy)
            return g * torch.tensor([1.0, 0.5, 1.0]).to(g)  # zero along the last input: the rounding has no slope

    for seed in range(4):
        found = check(Half.apply, days_at(rows(3, seed=seed)), seed=seed)
        assert found.verdict == "wrong"
        assert found.problems == ("input 1: 50.0 % too small",)
        assert "piecewise constant along input 2" in found.notes[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_rounded_output_among_smooth_ones_is_named(dtype):
    def box(x):
        return torch.stack((x[:, 0].sin() * x[:, 1], ((x[:, 0] + x[:, 1]) * 20).round() / 20), 1)

    for seed in range(4):
        found = check(BlackBox(box, 2, seed=seed), rows(2, dtype=dtype, seed=seed), seed=seed)
        assert found.verdict == "undecided"
        assert "budget" not in str(found)
        assert found.notes[0].startswith("the outputs are rounded, with flat parts about 0.0")
        assert "spread long in output 1 only: a gradient depends on the step" in found.notes[0]
        assert "policies.Fixed(" in found.notes[0]


def test_one_output_with_classes_is_not_judged():
    places = torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sizes = torch.randn(12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def box(x):
        stairs = ((x[:, :1] > places) * sizes).sum(1)
        return torch.stack((x[:, 0] * x[:, 1], stairs, x[:, 2].cos()), 1)

    for seed in range(4):
        found = check(BlackBox(box, 3, seed=seed), rows(3, seed=seed), seed=seed)
        assert str(found).startswith("undecided: the box jumps along input 0, so that")
        assert "piecewise constant along input 0, with flat parts" in found.notes[0]
        assert "long in output 1 only" in found.notes[0]


def changes(box, spread=(1.0, 1.0), d=2, steps=8):
    """The staircase of a box that is seen at 16 rows, over steps from 1 on, each a quarter of the one before."""
    x = rows(d, 16) * torch.tensor(spread, dtype=torch.float64)
    y = box(x)
    observed, levels = OutputChanges(y, torch.finfo(y.dtype).eps), Levels()
    moves = (4.0 ** -torch.arange(steps, dtype=torch.float64)).expand(16, d, steps)
    points = x[:, None, None, None].repeat(1, d, steps, 2, 1)
    for i in range(d):
        points[:, i, :, 0, i] += moves[:, i]
        points[:, i, :, 1, i] -= moves[:, i]
    y = box(points.flatten(0, 3)).view(16, d, steps, 2, -1)
    for i in range(d):  # in parts
        observed.observe(moves[:, i : i + 1], y[:, i : i + 1])
    levels.observe(y)
    return observed.staircase(torch.full((y.shape[-1],), 1e-16, dtype=torch.float64), levels)


def test_stairs_by_input_and_output():
    width = 0.1
    found = changes(lambda x: torch.stack((x[:, 0].sin(), (x[:, 0] / width).floor() + x[:, 1] ** 2, x[:, 1]), 1))
    assert found.coarse.tolist() == [[False, True, False], [False, False, False]]
    assert found.smooth.tolist() == [[True, False, False], [False, True, True]]
    assert found.without_slope.tolist() == [True, False]
    assert not found.everywhere
    assert width / 2.5 < float(found.flat[0]) < 2.5 * width
    assert found.flat[1].isnan()


@pytest.mark.parametrize(
    "box",
    [
        torch.sin,
        lambda x: torch.relu(x - 1),
        lambda x: x**2 + 1e-5 * (1e4 * x).floor(),  # roughness, over which steps average
        lambda x: torch.cat((x, 0 * x), 1),
        lambda x: 1e9 + 1e-4 * x,  # rounding hides short moves
        lambda x: torch.stack((x[:, 0], torch.relu(x[:, 1] - 1.2)), 1),
    ],
)
def test_no_stairs(box):
    assert changes(box) is None


def test_a_slope_that_begins_near_all_rows_is_no_jump():
    assert changes(lambda x: torch.stack((x[:, 0], torch.relu(x[:, 1] - 0.2)), 1), spread=(1.0, 0.03)) is None
    found = changes(lambda x: torch.stack((x[:, 0], (x[:, 1] > 0.2).double()), 1), spread=(1.0, 0.03))
    assert found.coarse.tolist() == [[False, False], [False, True]]


def test_jumps_at_short_distances_make_an_output_rough():
    """That of half precision, say: along an input of little weight the same jumps are farther apart."""

    def box(x):
        rough = torch.tanh((300 * (x[:, 0] + 0.03 * x[:, 1])).floor() / 300)
        return torch.stack((rough, x[:, 0] * x[:, 1]), 1)

    assert changes(box) is None


def test_values_that_cannot_be_set_do_not_count():
    def box(x):
        return torch.sin(3 * x) @ torch.ones(2, 2, dtype=x.dtype)

    found = check(BlackBox(box, 2, limits=(-0.5, 0.5), resolution=0.04, seed=0), 0.2 * rows(2))
    assert found.obstacle.staircase is None


def test_no_stairs_in_a_wrong_gradient():
    assert check(by_hand(Waves(3), only(1, 1.1)), rows(3)).obstacle.staircase is None
