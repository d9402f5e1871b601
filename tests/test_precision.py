"""Dtypes, autocast, rounding, scales, and devices where a look is not free."""

import numpy as np
import pytest
import torch
from torch import nn

from bondgrad import BlackBox, Central, Forward, Simultaneous, sign_accuracy
from bondgrad.metrics import exact_vjp
from bondgrad.networks import ffnn
from bondgrad.policies import Bond, Fixed
from bondgrad.testing.boxes import TanhNetwork, Waves
from tests.helpers import close, gradient

ESTIMATORS = {"central": Central, "forward": Forward, "simultaneous": lambda: Simultaneous(512)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_input_of_every_precision(dtype):
    exact = Waves(3, 2)
    layer = BlackBox(exact, 3, policy=Fixed(1e-2))
    x, gy = torch.randn(5, 3).to(dtype), torch.randn(5, 2).to(dtype)
    y, g = layer(x), gradient(layer, x, gy)
    assert y.dtype == g.dtype == dtype
    assert close(g.double(), exact.vjp(x.double(), gy.double()), 1e-2)


@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.double, nn.Module.bfloat16])
def test_the_policys_state_keeps_its_precision(convert):
    layer = BlackBox(torch.sin, 3)
    gradient(layer, torch.randn(5, 3), torch.randn(5, 3))
    before = layer.policy_state.sums.clone()
    convert(layer)
    assert torch.equal(layer.policy_state.sums, before)
    gradient(layer, torch.randn(5, 3), torch.randn(5, 3))


@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.bfloat16, nn.Module.double])
def test_a_model_of_another_precision_around_a_module(convert):
    torch.manual_seed(0)
    net = ffnn([3, 20, 2])
    model = convert(nn.Sequential(nn.Linear(3, 3), BlackBox(net, 3, policy=Fixed(1e-2)), nn.Linear(2, 1)))
    dtype = model[0].weight.dtype
    assert net[0].weight.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    model(torch.randn(8, 3, dtype=dtype)).sum().backward()
    assert model[0].weight.grad.dtype == dtype


@pytest.mark.parametrize("backward_too", [False, True])
@pytest.mark.parametrize("estimator", ["central", "forward"])
def test_autocast_does_not_reach_into_the_box(estimator, backward_too):
    torch.manual_seed(0)
    net = ffnn([3, 64, 4])
    layer = BlackBox(net, 3, estimator=estimator, policy=Fixed(1e-2))
    x, gy = torch.randn(16, 3, requires_grad=True), torch.randn(16, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        if backward_too:
            (g,) = torch.autograd.grad(y, x, gy)
    if not backward_too:
        (g,) = torch.autograd.grad(y, x, gy)
    assert close(g, exact_vjp(net, x.detach(), gy), 1e-2)


def test_answers_of_less_precision_than_x_get_longer_steps():
    def fn(x: np.ndarray):
        return np.sin(x.astype(np.float32))

    layer = BlackBox(fn, 3, seed=0)
    x, gy = torch.randn(64, 3, dtype=torch.float64), torch.ones(64, 3, dtype=torch.float64)
    for _ in range(3):
        g = gradient(layer, x, gy)
    assert close(g, x.cos(), 1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_state_does_not_follow_torchs_default_type(dtype):
    try:
        torch.set_default_dtype(dtype)
        layer = BlackBox(torch.sin, 3)
        gradient(layer, torch.randn(8, 3, dtype=torch.float32), torch.ones(8, 3, dtype=torch.float32))
    finally:
        torch.set_default_dtype(torch.float32)
    assert layer.policy_state.sums.dtype == torch.float32
    assert torch.allclose(layer.policy_state.sums[1], torch.ones(2, 3))


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 1e3, 1e6])
@pytest.mark.parametrize("what", ["inputs", "outputs", "loss"])
def test_scales_do_not_matter(what, scale):
    s_in, s_out, s_loss = (scale if what == name else 1.0 for name in ("inputs", "outputs", "loss"))
    net = TanhNetwork(5, 50, 5)
    layer = BlackBox(lambda x: s_out * net(x / s_in), 5, seed=0)
    right = []
    for _ in range(30):
        x, gy = s_in * torch.randn(64, 5), s_loss * torch.randn(64, 5)
        right.append(sign_accuracy(gradient(layer, x, gy), net.vjp(x / s_in, gy)))
        assert layer.stats.step.max() < s_in
    assert torch.stack(right[1:]).mean() > 0.998


@pytest.mark.parametrize("bad", [None, 0.0, float("nan"), float("inf"), 1e25])
@pytest.mark.parametrize(
    "policy", [Bond(), Bond("sqrt6", reduce="sum"), Bond("error-terms"), Bond(max_step=0.1)], ids=repr
)
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.filterwarnings("ignore:.*non-finite")
def test_where_a_look_is_not_free_the_numbers_are_the_same(estimator, policy, bad, monkeypatch):
    def run():
        layer = BlackBox(torch.sin, 3, estimator=ESTIMATORS[estimator](), policy=policy, seed=0)
        torch.manual_seed(1)
        results = []
        for step in range(4):
            x, gy = torch.randn(8, 3), torch.randn(8, 3)
            if bad is not None and step == 2:
                x[1, 1] = bad
            results.append(gradient(layer, x, gy))
        return [*results, layer.policy_state.sums, torch.tensor(layer.stats.failures)]

    free = run()
    look_is_costly(monkeypatch)
    assert all(torch.equal(a, b) for a, b in zip(free, run(), strict=True))


def look_is_costly(monkeypatch):
    """As on an accelerator."""
    for module in ("_gradient", "_trace", "policies._bond"):
        monkeypatch.setattr(f"bondgrad.{module}.look_is_free", lambda device: False)


def test_where_a_look_is_not_free_the_warning_waits_for_stats(monkeypatch):
    look_is_costly(monkeypatch)
    layer = BlackBox(torch.sqrt, 1, policy=Fixed(0.01))
    gradient(layer, torch.tensor([[0.005]]), torch.ones(1, 1))
    with pytest.warns(UserWarning, match="1 perturbed rows came back non-finite"):
        assert layer.stats.failures == 1


def test_a_step_is_never_lost_in_rounding():
    layer = BlackBox(lambda x: 2 * x, 2, policy=Fixed(1e-12))
    x = torch.tensor([[1e6, 3.0]])
    assert torch.equal(gradient(layer, x, torch.ones(1, 2)), torch.tensor([[2.0, 2.0]]))
