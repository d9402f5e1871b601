"""Boxes without slopes: what is piecewise constant is called so, and rows near jumps are not judged."""

import pytest
import torch

from bondgrad import BlackBox, check
from bondgrad.policies import Fixed
from bondgrad.testing.boxes import Waves
from tests.checking.test_check import DTYPES, by_hand, only, rows
from tests.helpers import noisy


def staircase(x, seed=0):
    """The sum of many small steps at random places along each input."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.randn(x.shape[1], 40, generator=generator).to(x)
    sizes = torch.randn(x.shape[1], 40, 3, generator=generator).to(x)
    return torch.einsum("nds,dso->no", (x[..., None] > places).to(x), sizes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_piecewise_constant_box_has_no_slope(dtype):
    for seed in range(5):
        box = BlackBox(lambda x, seed=seed: staircase(x, seed), 4, policy=Fixed(0.5), seed=0)
        found = check(box, 0.3 * rows(4, dtype=dtype, seed=seed), seed=seed)
        assert found.verdict == "undecided"
        assert "no slope" in str(found)
        assert "piecewise constant" in found.notes[0]
        assert "Fixed(0.3)" in found.notes[0]
        assert "budget" not in str(found)
        assert found.evaluations < 20_000  # more of them would show nothing else


@pytest.mark.parametrize("name", ["tree", "forest", "boosted"])
def test_trees_of_scikit_learn(name):
    pytest.importorskip("sklearn")
    import foreign_boxes

    box = getattr(foreign_boxes, name)()
    for seed in range(3):
        found = check(BlackBox(box.answers, box.d, box.d_out, seed=0), 0.3 * rows(box.d, seed=seed), seed=seed)
        assert found.verdict == "undecided"
        assert "piecewise constant" in found.notes[0]


def test_a_gradient_that_is_not_finite_is_wrong_there_too():
    class Infinite(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return staircase(x)

        @staticmethod
        def backward(ctx, gy):
            return torch.full((len(gy), 4), torch.inf)

    assert check(Infinite.apply, rows(4)).verdict == "wrong"


def jumping(x):
    """Smooth, with a jump where an input is 1; there are few rows nearby."""
    return torch.sin(x) + 3 * (x > 1.0)


@pytest.mark.parametrize("sigma", [0.0, 1e-6])
def test_rows_near_jumps_are_not_judged(sigma):
    told = 0
    for seed in range(5):
        box = BlackBox(noisy(jumping, sigma, seed), 3, policy=Fixed(0.1), seed=0)
        found = check(box, rows(3, seed=seed), seed=seed, tolerance=0.02)
        assert found.verdict != "wrong"
        assert ("jumps" in str(found)) == bool(found.notes)
        told += bool(found.notes)
    assert told >= 3  # else no row was near


def test_a_mistake_of_a_box_with_jumps_is_wrong():
    for seed in range(5):
        box = BlackBox(jumping, 3, policy=Fixed(0.1), seed=0)
        flip = torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64)
        model = torch.nn.Sequential(Turned(flip), box)
        found = check(model, rows(3, seed=seed), seed=seed, tolerance=0.02)
        assert found.verdict == "wrong"
        assert [problem.split(":")[0] for problem in found.problems] == ["input 1"]


def rounded_beside_smooth(x):
    return torch.stack((torch.round(2 * x[:, 0]) + x[:, 1] ** 2, torch.sin(x[:, 2]) + x[:, 1]), 1)


@pytest.mark.parametrize(
    ("box", "what"),
    [
        (rounded_beside_smooth, "the box is piecewise constant along input"),
        (lambda x: torch.sin(x) + torch.sign(x), "the box has jumps near"),
    ],
)
def test_inputs_that_a_layer_moves_far_since_the_box_jumps_are_named_and_not_judged(box, what):
    found = 0
    for seed in range(3):
        layer = BlackBox(box, 3, seed=seed)
        for step in range(10):
            y = layer(rows(3, seed=step).requires_grad_())
            y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(step), dtype=y.dtype))
        jumps = ", ".join(map(str, layer.stats.health.jumps))
        first, note, *_ = str(check(layer, rows(3, seed=seed), seed=seed)).splitlines()
        assert jumps.startswith("0")
        found += first.startswith("undecided: the box jumps along input") and f" {jumps}, so that" in first
        assert note.strip().startswith(what)
        assert f"{jumps})" in note or f" {jumps}, with flat parts" in note
    assert found == 3


@pytest.mark.parametrize("policy", ["calibrated", Fixed(0.1)])
def test_advice_on_such_inputs_goes_by_their_error(policy):
    """The gradient of input 2 is several times the slope: a more exact solver would not help."""
    layer = BlackBox(noisy(jumping, 1e-3), 3, policy=policy, seed=1)
    layer(rows(3).requires_grad_()).sum().backward()
    found = check(layer, rows(3, seed=1), seed=1, budget=3000)
    assert str(found).startswith("undecided: the box jumps along input")
    assert found.obstacle.jump_error > 1
    assert found.notes[0].endswith("policy=bondgrad.policies.Fixed(1)")


def test_a_gradient_by_hand_is_wrong_along_such_inputs():
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return jumping(x)

        @staticmethod
        def backward(ctx, gy):
            (x,) = ctx.saved_tensors
            return gy * (jumping(x + 1) - jumping(x - 1)) / 2

    assert check(Half.apply, rows(3)).verdict == "wrong"


class Turned(torch.nn.Module):
    """The identity, with a gradient times a factor for each input."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return self.factor * x + (1 - self.factor) * x.detach()


def test_no_jumps_where_there_are_none():
    for mistake in (only(1, 1.1), only(0, -1), lambda g: g.roll(1, 1)):
        found = check(by_hand(Waves(4), mistake), rows(4))
        assert found.verdict == "wrong"
        assert found.notes == ()


def test_limits_hold_while_jumps_are_sought():
    asked = []

    def box(x):
        asked.append(x.detach())
        return jumping(x)

    check(BlackBox(box, 3, policy=Fixed(0.1), limits=(-1.5, 1.2), seed=0), rows(3), tolerance=0.02)
    points = torch.cat(asked)
    assert points.min() >= -1.5
    assert points.max() <= 1.2


def test_context_goes_with_its_rows_while_jumps_are_sought():
    def box(x, c):
        return torch.sin(x) + 3 * (x > c)

    x, c = rows(3), torch.linspace(-1, 1, 64, dtype=torch.float64)[:, None]
    found = check(BlackBox(box, 3, policy=Fixed(0.1), seed=0), x, c, tolerance=0.02)
    assert found.verdict != "wrong"
    assert found.notes


def test_noise_is_the_reason_for_long_steps():
    layer = BlackBox(noisy(lambda x: torch.sin(2 * x), 0.03), 3, seed=0)
    for _ in range(20):
        layer(rows(3).requires_grad_()).sum().backward()
    found = check(layer, rows(3), budget=400_000)
    assert found.verdict == "wrong"
    assert "the layer takes long steps" in found.notes[0]
