"""Right gradients pass, wrong ones are caught and named, and noise is no excuse for either."""

import copy
import math

import pytest
import torch
from torch import nn

from bondgrad import BlackBox, Check, check
from bondgrad.testing.boxes import Cubes, Linear, Quadratic, TanhNetwork, Waves
from tests.helpers import noisy, root, same_state

DTYPES = (torch.float32, torch.float64)
BOXES = (TanhNetwork(), Waves(7, 3), Quadratic(3, 1), Linear(), Cubes())


def rows(d, n=64, dtype=torch.float64, seed=0):
    return torch.randn(n, d, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def by_hand(box, mistake=lambda g: g, fn=None):
    """The box with a backward pass of its own: the exact one, and then a mistake."""

    class ByHand(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return (fn or box)(x)

        @staticmethod
        def backward(ctx, gy):
            return mistake(box.vjp(ctx.saved_tensors[0], gy))

    return ByHand.apply


def only(i, factor):
    return lambda g: torch.cat((g[:, :i], factor * g[:, i : i + 1], g[:, i + 1 :]), 1)


def swap(i, j):
    def swapped(g):
        g = g.clone()
        g[:, [i, j]] = g[:, [j, i]]
        return g

    return swapped


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("box", BOXES, ids=lambda box: type(box).__name__)
def test_right_gradients_pass(box, dtype):
    found = check(by_hand(box), rows(box.in_features, dtype=dtype))
    assert found
    assert found.verdict == "right"
    assert found.problems == ()
    assert (found.factor - 1).abs().max() < 1e-3
    assert found.visible.max() < 0.02
    rates = found.rate[~found.rate.isnan()]
    assert ((rates - 2).abs() < 0.1).all()  # there is no remainder of a linear box


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda g: 1.03 * g, "all inputs: 3.0 % too large"),
        (lambda g: 0.9 * g, "all inputs: 10.0 % too small"),
        (lambda g: -g, "all inputs: wrong sign"),
        (only(3, 1.03), "input 3: 3.0 % too large"),
        (only(2, -1), "input 2: wrong sign"),
        (only(2, -3), "input 2: wrong sign, and 3.00 times as large"),
        (only(1, 2.5), "input 1: 2.50 times as large as it should be"),
        (only(1, 0), "input 1: zero, but the box depends on it"),
        (only(0, math.nan), "input 0: not finite where the box is"),
        (swap(1, 4), "inputs 1 and 4 look swapped"),
    ],
)
def test_mistakes_are_caught_and_named(mistake, words, dtype):
    found = check(by_hand(Waves(6), mistake), rows(6, dtype=dtype))
    assert found.verdict == "wrong"
    assert not found
    assert found.problems == (words,)
    assert str(found).startswith(f"wrong\n  {words}\n")


def test_a_mistake_in_some_rows_is_caught():
    box = TanhNetwork()
    found = check(lambda x: by_hand(box)(torch.where(x > 1.5, 2 * x - x.detach(), x)), rows(4))
    assert found.verdict == "wrong"
    assert "differently from row to row" in found.problems[0]
    assert check(by_hand(box, lambda g: g.roll(1, 0)), rows(4)).verdict == "wrong"


def test_the_rate_tells_right_from_wrong():
    found = check(by_hand(Waves(4), only(1, 1.1)), rows(4))
    assert (found.rate - torch.tensor([2, 1, 2, 2])).abs().max() < 0.05
    assert abs(found.factor[1] - 1.1) < 1e-6
    assert abs(found.error[1] - 0.1) < 1e-6
    assert found.standard_error.max() < 1e-6


@pytest.mark.parametrize("sigma", [1e-6, 1e-4, 1e-2])
def test_noise_is_no_false_alarm(sigma):
    for seed in range(5):
        box = TanhNetwork(3, seed=seed)
        found = check(by_hand(box, fn=noisy(box, sigma, seed)), rows(3, seed=seed), budget=20_000)
        assert found.verdict == "undecided" if sigma == 1e-2 else found.verdict == "right"


def test_what_noise_hides_is_not_called_right():
    box = Waves(5)
    found = check(by_hand(box, only(2, 1.03), noisy(box, 0.1)), rows(5))
    assert found.verdict == "undecided"
    assert not found
    assert found.visible[2] > 0.03
    assert found.evaluations <= 100_000
    assert str(found).startswith("undecided: errors below ")
    assert "hidden by noise" in str(found)
    assert check(by_hand(box, only(2, -1), noisy(box, 0.1)), rows(5)).verdict == "wrong"  # this it cannot hide


def test_more_budget_decides():
    box = Linear(2, 3)
    make = lambda mistake: by_hand(box, mistake, noisy(box, 0.01))  # noqa: E731
    assert check(make(lambda g: g), rows(2), budget=3000).verdict == "undecided"
    assert check(make(lambda g: g), rows(2), budget=1_000_000).verdict == "right"
    assert check(make(only(1, 1.03)), rows(2), budget=1_000_000).verdict == "wrong"


@pytest.mark.parametrize(("decimals", "verdict"), [(1, "undecided"), (3, "right")])
def test_rounded_outputs(decimals, verdict):
    """Asking again does not show how rough they are, and at short steps they do not change at all."""
    box = Waves(3)
    fn = lambda x: box(x).round(decimals=decimals)  # noqa: E731
    assert check(by_hand(box, fn=fn), rows(3)).verdict == verdict
    assert check(by_hand(box, only(0, -1), fn), rows(3)).verdict == "wrong"


@pytest.mark.parametrize("estimator", ["central", "forward"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_black_box_is_right(estimator, dtype):
    assert check(BlackBox(TanhNetwork(), 4, estimator=estimator, seed=0), rows(4, dtype=dtype))


@pytest.mark.parametrize("sigma", [0, 1e-3])
def test_an_estimate_at_random_is_no_false_alarm(sigma):
    box = BlackBox(noisy(Waves(3), sigma), 3, estimator="simultaneous", noise=sigma or None, seed=0)
    assert check(box, rows(3)).verdict == "undecided"


def test_a_black_box_is_left_as_it_was():
    layer = BlackBox(Waves(3), 3, seed=0)
    model = nn.Sequential(nn.Linear(3, 3), layer).double()
    model(rows(3)).sum().backward()
    before, numbers = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    model[0].eval()
    assert check(layer, rows(3))
    assert check(model, rows(3))
    assert same_state(before, model.state_dict(), but=["requests"])
    assert torch.equal(numbers, torch.get_rng_state())
    assert [module.training for module in (model, model[0], layer)] == [True, False, True]


def test_evaluations_are_counted_and_kept_to_the_budget():
    asked = 0
    box = noisy(Waves(3), 0.01)

    def fn(x):
        nonlocal asked
        asked += len(x)
        return box(x)

    for budget in (1000, 4000, 10_000):
        asked = 0
        found = check(BlackBox(fn, 3, seed=0, policy="bond"), rows(3), budget=budget)
        assert found.evaluations == asked <= budget


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limits", [None, (-0.5, [0.4, 3.0])])
@pytest.mark.parametrize("resolution", [0.02, (0.1, 0.01)])
def test_a_gradient_by_hand_of_a_box_whose_inputs_are_set_in_steps(resolution, limits, dtype):
    box, x = Waves(2), rows(2, dtype=dtype)
    first, step = (0.0 if limits is None else limits[0]), torch.tensor(resolution, dtype=torch.float64)
    points = []

    def fn(x):
        points.append(x.double())
        return box((((x.double() - first) / step).round() * step + first).to(x))

    assert check(by_hand(box, fn=fn), x, limits=limits).verdict == "undecided"  # flat between the steps
    points.clear()
    found = check(by_hand(box, fn=fn), x, limits=limits, resolution=resolution)
    assert found.verdict == "right"
    assert found.visible.max() < 0.02
    found = check(by_hand(box, only(1, 1.1), fn), x, limits=limits, resolution=resolution)
    assert found.verdict == "wrong"
    assert float(found.factor[1]) == pytest.approx(1.1, abs=0.01)
    seen = torch.cat(points)
    steps = (seen - first) / step
    assert (steps - steps.round()).abs().max() < 1e-4
    assert limits is None or bool((seen >= -0.5).all() and (seen[:, 0] <= 0.4).all())


def test_no_point_outside_the_limits_is_evaluated():
    asked = []

    def fn(x):
        asked.append(x.detach())
        return root(x) * root(1 - x)

    x = torch.rand(64, 3, dtype=torch.float32, generator=torch.Generator().manual_seed(0)) * 1.2 - 0.1
    for box, limits in ((fn, (0, [1, 1, 0.5])), (BlackBox(fn, 3, limits=(0, [1, 1, 0.5]), seed=0), None)):
        asked.clear()
        assert check(box, x, limits=limits)
        points = torch.cat(asked)
        assert points.min() >= 0
        assert (points <= torch.tensor([1, 1, 0.5])).all()


def test_regions_without_an_answer():
    x = rows(3).abs() + 0.01  # steps as long as the spread would lead below zero
    assert check(root, x)
    assert check(root, x - 0.5)  # and here some rows have no answer
    assert check(lambda x: 1.03 * root(x.detach()) - 0.03 * root(x), x).verdict == "wrong"


def test_context():
    x, c = rows(3), rows(3, seed=1)
    assert check(lambda x, c: torch.sin(x * c), x, c)
    assert not check(lambda x, c: torch.sin(x * c).detach() + 0 * x, x, c)


@pytest.mark.parametrize("x", [rows(3, 1), torch.zeros(1, 3), torch.ones(8, 3), 1e6 + rows(3), 1e-9 * rows(3)])
def test_any_rows_will_do(x):
    assert check(lambda x: torch.sin((x - 1e6 if x.max() > 9e5 else x) + 1), x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_networks_with_kinks(dtype):
    """Symmetric differences do not notice a kink that is very close: in float32 one of five such networks has one."""
    for seed in range(20):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 2)).to(dtype)
        assert check(net, rows(6, dtype=dtype))


def test_forward_differences_are_no_false_alarm():
    """Their error has a random sign: a few copies of a gradient may all have the same."""
    for seed in range(20):
        box = BlackBox(TanhNetwork(2, seed=seed), 2, estimator="forward", noise=1e-3, seed=seed)
        assert check(box, rows(2, seed=seed), budget=20_000).verdict != "wrong"


def test_a_box_that_bends_faster_than_rows_differ():
    box = Waves(2)
    fn = noisy(lambda x: box(100 * x), 0.01)

    class Fast(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return fn(x)

        @staticmethod
        def backward(ctx, gy):
            return 100 * box.vjp(100 * ctx.saved_tensors[0], gy)

    for seed in range(5):
        assert check(Fast.apply, rows(2, seed=seed), seed=seed).verdict != "wrong"


def test_inputs_that_do_nothing():
    assert check(lambda x: torch.sin(x[:, :1]), rows(3))
    assert check(lambda x: torch.sin(x[:, :1]) + 1e-3 * (x - x.detach()), rows(3)).verdict == "wrong"
    assert check(lambda x: 0 * x, rows(3)).verdict == "right"


@pytest.mark.parametrize(
    ("arguments", "settings", "words"),
    [
        ((torch.sin, torch.zeros(3)), {}, "x must be rows"),
        ((torch.sin, torch.zeros(2, 3).half()), {}, "float32 or float64"),
        ((torch.sin, torch.full((2, 3), math.nan)), {}, "x must be finite"),
        ((torch.sin, torch.zeros(0, 3)), {}, "empty batch"),
        ((torch.sin, torch.zeros(2, 3)), {"tolerance": 0}, "tolerance must be a positive"),
        ((torch.sin, torch.zeros(2, 3)), {"budget": 10}, "budget must be at least"),
        ((torch.sin, torch.zeros(2, 3)), {"seed": -1}, "seed must be"),
        ((torch.sin, torch.zeros(2, 3)), {"limits": (1, 0)}, "low < high"),
        ((torch.sin, torch.zeros(2, 3)), {"resolution": 0}, "resolution must be a number > 0"),
        ((torch.sin, torch.zeros(2, 3)), {"resolution": [0.1, 0.1]}, "resolution must be a number > 0, or 3 of them"),
        ((lambda x: x.sum(1), torch.zeros(2, 3)), {}, "must return a floating-point tensor"),
        ((lambda x: x.detach(), rows(3)), {}, "must give a gradient"),
        ((lambda x: x * math.nan, rows(3)), {}, "must have finite answers"),
        ((lambda x, c: x, rows(3), torch.zeros(2)), {}, "context 0 must have one entry per row"),
    ],
)
def test_bad_arguments(arguments, settings, words):
    with pytest.raises(ValueError, match=words):
        check(*arguments, **settings)


def test_what_is_no_box():
    with pytest.raises(TypeError, match="box must be callable"):
        check(3, rows(3))
    with pytest.raises(ValueError, match="without memory"):
        check(BlackBox(lambda x, s: (x + s, s), 3, state=torch.zeros(1, 3)), rows(3))


def test_the_same_seed_says_the_same():
    first, second = (check(by_hand(Waves(3)), rows(3), seed=1) for _ in range(2))
    assert isinstance(first, Check)
    assert torch.equal(first.factor, second.factor)
