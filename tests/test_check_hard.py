"""Boxes that make it hard to tell whether their gradient is right, and what must not happen to them meanwhile."""

import copy
import math
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from bondgrad import BlackBox, check
from bondgrad.testing.boxes import TanhNetwork, Waves
from tests.helpers import noisy, root, same_state
from tests.test_check import DTYPES, by_hand, only, rows


def scaled(box, factor, which=slice(None)):
    """A function with autograd's gradient, times a factor for some inputs."""

    def fn(x):
        factors = torch.ones_like(x[0])
        factors[which] = factor
        return box(factors * x + (1 - factors) * x.detach())

    return fn


# ---- gradients that are not finite


def spoilt(box, where, value=math.nan):
    """The gradient with a value at some entries: where(x, g) -> bool [N, d]."""

    class Spoilt(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return box(x)

        @staticmethod
        def backward(ctx, gy):
            (x,) = ctx.saved_tensors
            g = box.vjp(x, gy)
            return torch.where(where(x, g), value, g)

    return Spoilt.apply


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "where",
    [
        lambda x, g: x[:, :1] > 1,  # some rows
        lambda x, g: torch.rand(g.shape) < 0.1,  # some copies
        lambda x, g: torch.arange(3) == 1,  # some inputs
        lambda x, g: torch.ones_like(g, dtype=torch.bool),
    ],
    ids=["rows", "copies", "inputs", "all"],
)
def test_a_gradient_that_is_not_finite_is_wrong(where, value):
    found = check(spoilt(Waves(3), where, value), rows(3))
    assert found.verdict == "wrong"
    assert all("not finite where the box is" in problem for problem in found.problems)


@pytest.mark.parametrize("n", [32, 200])
def test_one_row_among_many_without_a_finite_gradient(n):
    x = rows(3, n)
    for row in (0, n // 2, n - 1):
        found = check(spoilt(Waves(3), lambda x, g, bad=x[row, 0]: (x == bad).any(1, keepdim=True)), x)
        assert found.verdict == "wrong"


def test_the_gradient_of_a_norm_at_zero():
    """A mistake that many make: the root has no slope there, and zero times infinity is NaN."""
    x = torch.cat((rows(3, 20), torch.zeros(1, 3)))
    assert check(lambda x: x.square().sum(1, keepdim=True).sqrt(), x).verdict == "wrong"
    assert check(lambda x: x.norm(dim=1, keepdim=True), x)  # torch knows better


def test_the_end_of_a_domain_is_no_mistake():
    x = rows(3).abs()
    x[0] = 0  # where the slope of the root is infinite, and so is its gradient
    assert check(root, x)


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
    return same_state(a[0], b[0]) and a[1][0].equal(b[1][0]) and (a[1][1] == b[1][1]).all() and a[1:][0][2] == b[1][2]


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
        return stats[:4], tensors, stats.vitals, layer.out_features, layer._trace.begun

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
    assert same_state(parameters, layer.state_dict())


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


# ---- weak inputs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weak", [1e-2, 1e-3])
@pytest.mark.parametrize("factor", [0, -1, 2])
def test_a_weak_input_is_judged_by_its_own_slope(weak, factor, dtype):
    size = torch.tensor([1, 1, weak, 1], dtype=dtype)

    def box(x):
        return torch.sin(size * x).sum(1, keepdim=True)

    x = rows(4, dtype=dtype)
    found = check(scaled(box, factor, 2), x)
    assert found.verdict == "wrong"
    assert len(found.problems) == 1
    assert found.problems[0].startswith("input 2: ")
    assert check(box, x)


def test_a_very_weak_input():
    size = torch.tensor([1, 1e-6, 1], dtype=torch.float64)
    box = lambda x: torch.sin(size * x).sum(1, keepdim=True)  # noqa: E731
    assert check(scaled(box, 0, 1), rows(3)).verdict == "wrong"
    assert check(box, rows(3))


def test_what_cannot_be_seen_of_a_weak_input_is_said():
    size = torch.tensor([1, 1e-4, 1], dtype=torch.float64)
    box = noisy(lambda x: (x * size).sum(1, keepdim=True), 1e-4)
    found = check(scaled(box, 0, 1), rows(3))
    assert found.verdict != "wrong"  # its effect is hardly that of the noise
    assert found.factor[1].isnan() or found.visible[1] > 0.5
    assert "too weak" in str(found) or found.verdict == "undecided"


# ---- no false alarms, and yet no mistake gets through


def relu_network(seed, dtype):
    torch.manual_seed(seed)
    layers = nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 2)
    return nn.Sequential(*layers).to(dtype)


def mixed(fn):
    """Of inputs mixed at random."""

    def make(seed, dtype):
        mix = torch.randn(6, 5, generator=torch.Generator().manual_seed(seed)).to(dtype)
        return lambda x: fn(x @ mix)

    return make


def plain(fn):
    return lambda seed, dtype: fn


HARD = {
    "relu": relu_network,
    "sort": mixed(lambda z: z.sort(1).values),
    "abs": mixed(torch.abs),
    "max": mixed(lambda z: z.amax(1, keepdim=True)),
    "folded": mixed(lambda z: torch.sin(z).abs()),
    "exp": plain(lambda x: torch.exp(3 * x)),
    "ten": plain(lambda x: 10**x),
    "inverse": plain(lambda x: 1 / x),
    "pole": plain(lambda x: x**-3),
    "tan": plain(torch.tan),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", HARD)
def test_kinks_poles_and_decades(name, dtype):
    verdicts = []
    for seed in range(6):
        box, x = HARD[name](seed, dtype), (3 if name == "pole" else 1) * rows(6, dtype=dtype, seed=seed)
        verdicts.append(check(box, x, seed=seed).verdict)
        assert check(scaled(box, -1, 2), x, seed=seed).verdict == "wrong"
        assert check(scaled(box, 1.1), x, seed=seed).verdict == "wrong"
    assert "wrong" not in verdicts
    assert verdicts.count("right") >= (3 if name == "pole" else 5)


@pytest.mark.parametrize("noise", [1e-6, 1e-4, 1e-2])
@pytest.mark.parametrize("name", ["exp", "ten", "inverse", "pole"])
def test_noise_on_outputs_that_span_decades(name, noise):
    for seed in range(5):
        for dtype in DTYPES:
            box = HARD[name](seed, dtype)
            x = rows(3, dtype=dtype, seed=seed)
            assert check(noisy(box, noise, seed), x, seed=seed).verdict != "wrong"


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_half_precision_inside(low):
    """The answers come in float32, but there are few of them."""
    for seed in range(5):
        mix = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        box = lambda x, mix=mix: torch.tanh((x.to(low) @ mix.to(low)).float())  # noqa: E731
        x = rows(5, dtype=torch.float32, seed=seed)
        assert check(box, x, seed=seed).verdict != "wrong"
        assert check(scaled(box, -1), x, seed=seed).verdict == "wrong"


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


def test_a_confirmed_mistake_has_a_name():
    found = check(by_hand(TanhNetwork(), only(1, 1.1)), rows(4))
    assert found.problems == ("input 1: 10.0 % too large",)


@pytest.mark.parametrize("seed", range(4))
def test_kinks_and_noise_together_are_no_reason_to_accuse(seed):
    """Steps long enough for the noise lead over kinks, and what they see there is not the gradient."""
    torch.manual_seed(7000 + seed)
    network = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 4)).requires_grad_(False)
    x, random = torch.randn(64, 6), torch.Generator().manual_seed(seed)
    half_width = 0.01 * float(network(x).std())

    def answer(sign):
        def box(x):
            turned = torch.cat((sign * x[:, :1] + (1 - sign) * x[:, :1].detach(), x[:, 1:]), 1)
            y = network(turned)
            return y + half_width * torch.rand(y.shape, generator=random)

        return check(box, x, seed=seed, budget=50_000)

    assert answer(1).verdict != "wrong"
    assert answer(-1).problems == ("input 0: wrong sign",)
