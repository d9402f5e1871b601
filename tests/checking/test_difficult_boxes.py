"""Boxes that are difficult to check: gradients that are not finite, weak inputs, kinks, poles, decades, few digits."""

import math

import pytest
import torch
from torch import nn

from bondgrad import check
from bondgrad.testing.boxes import TanhNetwork, Waves
from tests.checking.test_check import DTYPES, by_hand, only, rows
from tests.helpers import noisy, root


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


def test_an_error_that_shorter_steps_do_not_show_is_forgotten():
    """Otherwise, noise and the kinks that are left accuse the input later on: three of these networks."""
    for seed in range(25, 40):
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Linear(24, 3)).requires_grad_(False).double()
        x = rows(5, seed=seed)
        box = noisy(network, 1e-3 * float(network(x).std()), seed)
        assert check(box, x, seed=seed, budget=30_000).verdict != "wrong"
