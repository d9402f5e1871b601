"""How `check` evaluates a box: on copies, without a trace, within a budget, through an evaluator."""

import copy
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from bondgrad import BlackBox, check
from bondgrad.evaluators import Answer, Local
from bondgrad.policies import Fixed
from tests.checking.test_check import DTYPES, rows
from tests.checking.test_difficult_boxes import scaled
from tests.helpers import noisy, root, same_state

# ---- boxes that change what they are given


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "change", [lambda x: x.mul_(2), lambda x: x.clamp_(-1, 1), lambda x: x.add_(1).sin(), lambda x: x.neg_().exp()]
)
def test_a_box_may_change_its_input(change, dtype):
    x = rows(3, 12, dtype=dtype)
    before = x.clone()
    assert check(change, x)
    assert check(scaled(change, 1.1), x).verdict == "wrong"
    assert torch.equal(x, before)


def test_a_backward_pass_of_an_input_that_is_gone():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx, gy):
            return 2 * gy

    assert check(Doubled.apply, rows(3))
    assert check(lambda x, c: c.mul_(2) * x, rows(3), rows(1, seed=1))
    with pytest.raises(ValueError, match="must not change tensors that its gradient needs"):
        check(lambda x: x.exp().add_(1) * x.sin_(), rows(3))


# ---- no trace


class Moody(nn.Module):
    """Draws from all random numbers there are, and has a buffer that moves even in eval mode."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3).double()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        random.random(), np.random.rand(), torch.rand(1)
        return torch.sin(self.norm(x))


def everything(module):
    """All that might have changed."""
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    return copy.deepcopy(module.state_dict()), states, [m.training for m in module.modules()]


def same(a, b):
    return (
        same_state(a[0], b[0], ["requests"])
        and a[1][0].equal(b[1][0])
        and (a[1][1] == b[1][1]).all()
        and a[1:][0][2] == b[1][2]
    )


def test_no_trace_in_modules_or_random_numbers():
    module = Moody()
    before = everything(module)
    assert check(module, rows(3))
    after = everything(module)
    assert same(before, after)
    assert before[2] == after[2]


@pytest.mark.parametrize("policy", ["calibrated", "bond"])
def test_no_trace_in_a_black_box(policy):
    layer = BlackBox(lambda x: root(x + 1), 3, policy=policy, seed=0)
    x = rows(3).clamp(min=-0.99)

    def state():
        stats = layer.stats
        tensors = [None if t is None else t.tolist() for t in (stats.lower, stats.upper, stats.step)]
        return stats[:4], tensors, stats.health, layer.out_features, layer.eval_start

    def steps_of_training(count):
        for _ in range(count):
            layer(x.clone().requires_grad_()).sum().backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        untouched = state()
        check(layer, x, budget=20_000)
        assert state() == untouched
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        steps_of_training(3)
    before, parameters = state(), copy.deepcopy(layer.state_dict())
    check(layer, x, budget=20_000)
    assert state() == before
    assert same_state(parameters, layer.state_dict(), but=["requests"])


def test_an_interruption_leaves_no_trace():
    module = Moody()
    layer = BlackBox(module, 3, seed=0)
    calls = 0

    def interrupt(*_):
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt

    module.register_forward_hook(interrupt)
    before, stats = everything(layer), layer.stats[:4]
    with pytest.raises(KeyboardInterrupt):
        check(layer, rows(3))
    assert same(before, everything(layer))
    assert layer.training
    assert layer.stats[:4] == stats


def test_a_memory_inside_is_found():
    inside = BlackBox(lambda x, s: (x + s, s), 3, state=torch.zeros(1, 3))
    with pytest.raises(ValueError, match="without memory"):
        check(nn.Sequential(nn.Linear(3, 3), inside), rows(3))


# ---- the budget


class Counted:
    """A function that counts its rows."""

    def __init__(self, fn):
        self.fn, self.rows = fn, 0

    def __call__(self, x):
        self.rows += len(x)
        return self.fn(x)


@pytest.mark.parametrize("policy", ["calibrated", "bond"])
@pytest.mark.parametrize("estimator", ["central", "forward", "simultaneous"])
@pytest.mark.parametrize("d", [1, 5, 60])
def test_the_budget_is_kept_by_a_black_box(d, estimator, policy):
    for budget in (30_000, 70_000):
        fn = Counted(noisy(lambda x: torch.sin(x).sum(1, keepdim=True), 0.01))
        found = check(BlackBox(fn, d, estimator=estimator, policy=policy, seed=0), rows(d), budget=budget)
        assert found.evaluations == fn.rows <= budget


def test_the_budget_is_kept_by_many_inputs():
    fn = Counted(lambda x: np.sin(x.numpy() if isinstance(x, torch.Tensor) else x))
    found = check(BlackBox(fn, 200, seed=0), rows(200))
    assert found.evaluations == fn.rows <= 100_000
    fn = Counted(noisy(torch.sin, 0.01))
    found = check(fn, rows(200))
    assert found.evaluations == fn.rows <= 100_000


def test_the_least_budget_is_kept_too():
    for box in (torch.sin, BlackBox(torch.sin, 3, seed=0), BlackBox(torch.sin, 3, policy="bond", seed=0)):
        with pytest.raises(ValueError, match="budget must be at least") as refused:
            check(box, rows(3), budget=1)
        least = int(str(refused.value).split(" for ")[0].split()[-1])
        assert check(box, rows(3), budget=least).evaluations <= least


def test_a_black_box_inside_a_model_is_counted():
    fn = Counted(noisy(torch.sin, 0.01))
    model = nn.Sequential(nn.Linear(4, 3).double(), BlackBox(fn, 3, seed=0))
    assert check(model, rows(4), budget=20_000).evaluations == fn.rows <= 20_000


# ---- limits and resolution


class Recorder:
    """A function that keeps the points at which it was evaluated."""

    def __init__(self, fn):
        self.fn, self.points = fn, []

    def __call__(self, x):
        self.points.append(x.detach().clone())
        return self.fn(x)


@pytest.mark.parametrize("around", [lambda layer: layer, nn.Sequential], ids=["layer", "module"])
def test_limits_of_a_black_box_are_given_to_it(around):
    """The layer would move its inputs beyond limits that only the check knows, and set other values than these."""
    fn = Recorder(lambda x: torch.sin(3 * x))
    layer = BlackBox(fn, 2, policy=Fixed(0.3), seed=0)
    with pytest.raises(ValueError, match=r"BlackBox\(limits=...\), or assign box.limits"):
        check(around(layer), rows(2), limits=(-0.3, 0.3))
    with pytest.raises(ValueError, match=r"BlackBox\(resolution=...\), or assign box.resolution"):
        check(around(layer), rows(2), resolution=0.1)
    assert not fn.points
    layer.limits = (-0.3, 0.3)
    check(around(layer), rows(2), budget=5000)
    assert torch.cat(fn.points).abs().max() <= 0.3


@pytest.mark.parametrize("bound", [0.48, 0.5, 0.52, 0.54])
def test_values_that_can_be_set_begin_at_the_limits_of_the_layer(bound):
    x = 0.8 * torch.rand(200, 2, generator=torch.Generator().manual_seed(0)) - 0.4
    fn = Recorder(lambda x: torch.sin(3 * x) @ torch.ones(2, 2))
    assert check(BlackBox(fn, 2, limits=(-bound, bound), resolution=0.04, seed=0), x)
    steps = (torch.cat(fn.points).double() + bound) / 0.04
    assert (steps - steps.round()).abs().max() < 1e-4


class Scan(nn.Module):
    """A module whose attributes have names that mean something else to a BlackBox."""

    def __init__(self, layer, limits, resolution):
        super().__init__()
        self.layer, self.limits, self.resolution = layer, limits, resolution

    def forward(self, x):
        return self.layer(2 * x)


@pytest.mark.parametrize(("limits", "resolution"), [(None, "high"), (None, (224, 224)), ("speed", None), ((0, 1), 0.5)])
@pytest.mark.parametrize("layer", [torch.sin, nn.Tanh(), BlackBox(torch.sin, 2, seed=0)])
def test_attributes_that_are_not_those_of_a_black_box_are_left_aside(layer, limits, resolution):
    assert check(Scan(layer, limits, resolution), rows(2), budget=10_000)


@pytest.mark.parametrize("limits", [(-2, 2), (-2, [2.0, 2.0]), (torch.tensor([-2.0, -2.0]), np.array([2.0, 2.0]))])
def test_a_module_with_the_limits_and_resolution_of_its_black_box_is_checked_within_them(limits):
    class Around(Scan):
        def forward(self, x):
            points.append(x.detach())
            return self.layer(x)

    points, layer = [], BlackBox(torch.sin, 2, limits=limits, resolution=0.02, policy=Fixed(0.02))
    module = Around(layer, layer.limits, layer.resolution)
    for box in (module, copy.deepcopy(module)):
        points.clear()
        assert check(box, 0.5 * rows(2))
        steps = (torch.cat(points) + 2) / 0.02
        assert (steps - steps.round()).abs().max() < 1e-6
        assert torch.cat(points).abs().max() <= 2


# ---- the evaluator


class Recorded(Local):
    """Keeps the purpose and the size of every request, and whether a gradient was possible meanwhile; and all calls."""

    def __init__(self, max_rows=None):
        super().__init__(max_rows)
        self.seen, self.calls = [], []

    def evaluate(self, request):
        self.seen.append((request.purpose, len(request.points), torch.is_grad_enabled()))
        answer = super().evaluate(request)
        self.calls += answer.calls
        return answer


@pytest.mark.parametrize("max_rows", [None, 7])
def test_values_come_from_the_evaluator(max_rows):
    sizes = []

    def box(x, c):
        sizes.append(len(x))
        return torch.sin(x) * c

    evaluator = Recorded(max_rows)
    found = check(box, rows(3), rows(1, seed=1), evaluator=evaluator)
    assert found
    assert found.evaluations == sum(sizes)
    assert {(purpose, graded) for purpose, _, graded in evaluator.seen} == {("probe", False)}
    assert len(evaluator.seen) < len(sizes)  # gradients are taken here
    assert sum(n for _, n, _ in evaluator.seen) > 0.7 * sum(sizes)
    assert max_rows is None or max(sizes) <= max_rows


def test_the_evaluator_does_not_change_what_is_found():
    box = noisy(torch.sin, 0)
    assert torch.equal(check(box, rows(3)).factor, check(box, rows(3), evaluator=Recorded(50)).factor)


def test_a_black_box_uses_its_own_evaluator():
    own, given = Recorded(max_rows=64), Recorded()
    fn = Counted(torch.sin)
    found = check(BlackBox(fn, 3, evaluator=own, seed=0), rows(3), evaluator=given)
    assert found
    assert found.evaluations == fn.rows == sum(n for _, n, _ in own.seen)
    assert {"base", "gradient"} <= {purpose for purpose, _, _ in own.seen}
    assert max(call.rows for call in own.calls) == 64
    assert sum(call.rows for call in own.calls) == fn.rows
    assert {purpose for purpose, _, _ in given.seen} == {"probe"}


def test_rows_without_an_answer_of_the_evaluator_are_left_out():
    class Failing(Local):
        def evaluate(self, request):
            y = super().evaluate(request).y
            return Answer(torch.where(request.points[:, :1] > 1, 1e6, y), ok=request.points[:, 0] <= 1)

    x = rows(3)
    assert bool((x[:, 0] > 1).any())
    assert check(torch.sin, x, evaluator=Failing())


def test_what_is_no_evaluator():
    with pytest.raises(ValueError, match="evaluator must be"):
        check(torch.sin, rows(3), evaluator="local")
