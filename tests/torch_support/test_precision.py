"""Dtypes, autocast, rounding, scales, and devices where a look is not free."""

import math
import threading

import numpy as np
import pytest
import torch
from torch import nn

from bondgrad import BlackBox, BoxError, Central, Forward, Simultaneous, sign_accuracy
from bondgrad.metrics import exact_vjp
from bondgrad.networks import ffnn
from bondgrad.policies import Bond, Fixed
from bondgrad.testing.boxes import TanhNetwork, Waves
from tests.helpers import close, gradient, needs_cuda, on_each_device

ESTIMATORS = {"central": Central, "forward": Forward, "simultaneous": lambda: Simultaneous(512)}


@on_each_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_input_of_every_precision(dtype, device):
    exact = Waves(3, 2)
    layer = BlackBox(exact, 3, policy=Fixed(1e-2)).to(device)
    x, gy = torch.randn(5, 3).to(device, dtype), torch.randn(5, 2).to(device, dtype)
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


@on_each_device
@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.bfloat16, nn.Module.double])
def test_a_model_of_another_precision_around_a_module(convert, device):
    torch.manual_seed(0)
    net = ffnn([3, 20, 2])
    model = convert(nn.Sequential(nn.Linear(3, 3), BlackBox(net, 3, policy=Fixed(1e-2)), nn.Linear(2, 1))).to(device)
    dtype = model[0].weight.dtype
    assert net[0].weight.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    model(torch.randn(8, 3, dtype=dtype, device=device)).sum().backward()
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
        layer = BlackBox(torch.sin, 3, policy="bond")
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
@pytest.mark.filterwarnings("ignore:.*no finite output")
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
        return [*results, layer.policy_state.sums], layer.stats.failures

    free, failures = run()
    look_is_costly(monkeypatch)
    costly, seen = run()
    assert all(torch.equal(a, b) for a, b in zip(free, costly, strict=True))
    lost = bad is not None and not math.isfinite(bad)  # the row itself, which is not looked for in the forward pass
    assert failures == seen + lost


def look_is_costly(monkeypatch):
    """As on an accelerator."""
    monkeypatch.setattr("bondgrad.torch_support._device.reading_is_free", lambda device: False)


def test_where_a_look_is_not_free_the_warning_waits_for_stats(monkeypatch):
    look_is_costly(monkeypatch)
    layer = BlackBox(torch.sqrt, 1, policy=Fixed(0.01))
    gradient(layer, torch.tensor([[0.005]]), torch.ones(1, 1))
    with pytest.warns(UserWarning, match="1 row got no finite output"):
        assert layer.stats.failures == 1


def test_a_step_is_never_lost_in_rounding():
    layer = BlackBox(lambda x: 2 * x, 2, policy=Fixed(1e-12))
    x = torch.tensor([[1e6, 3.0]])
    assert torch.equal(gradient(layer, x, torch.ones(1, 2)), torch.tensor([[2.0, 2.0]]))


# ---- TF32 and the like, and autocast if it is wanted


def settings():
    own = [torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv, torch.backends.cuda.matmul]
    own += [torch.backends.cudnn.conv, torch.backends.cudnn.rnn]
    return [setting.fp32_precision for setting in own], torch.get_float32_matmul_precision()


@pytest.fixture
def matmul_precision():
    """Torch's setting, put back in the end."""
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
@pytest.mark.parametrize("full", [True, False])
def test_shortcuts_of_float32_are_off_inside_and_back_afterwards(matmul_precision, full, precision):
    matmul_precision(precision)
    around = settings()
    inside = []

    def fn(x: torch.Tensor):
        inside.append(torch.get_float32_matmul_precision())
        assert not full or torch.backends.mkldnn.matmul.fp32_precision in ("ieee", "none")
        return torch.sin(x)

    layer = BlackBox(fn, 3, full_precision=full, policy="bond")
    gradient(layer, torch.randn(4, 3), torch.ones(4, 3))
    assert inside == ["highest" if full else precision] * 2
    assert settings() == around

    def fails(x: torch.Tensor):
        raise ValueError("broken")

    with pytest.raises(BoxError, match="broken"):
        BlackBox(fails, 3, full_precision=full, policy="bond")(torch.randn(4, 3))
    assert settings() == around


def test_the_newer_settings_are_put_back_too(matmul_precision):
    try:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        torch.backends.mkldnn.conv.fp32_precision = "tf32"
        around = [torch.backends.mkldnn.matmul.fp32_precision, torch.backends.mkldnn.conv.fp32_precision]
        inside = []

        def fn(x: torch.Tensor):
            inside.extend([torch.backends.mkldnn.matmul.fp32_precision, torch.backends.mkldnn.conv.fp32_precision])
            return torch.sin(x)

        BlackBox(fn, 3)(torch.randn(4, 3))
        assert inside == ["ieee", "ieee"]
        assert [torch.backends.mkldnn.matmul.fp32_precision, torch.backends.mkldnn.conv.fp32_precision] == around
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"
        torch.backends.mkldnn.conv.fp32_precision = "none"


def test_threads_do_not_disturb_one_another(matmul_precision):
    """One enters its box while another is inside, and stays after the other has left."""
    matmul_precision("high")
    inside = []
    entered, left = threading.Event(), threading.Event()

    def first(x: torch.Tensor):
        thread.start()
        assert entered.wait(30)
        return torch.sin(x)

    def second(x: torch.Tensor):
        entered.set()
        assert left.wait(30)
        inside.append(torch.get_float32_matmul_precision())
        return torch.sin(x)

    thread = threading.Thread(target=lambda: BlackBox(second, 3)(torch.randn(4, 3)))
    BlackBox(first, 3)(torch.randn(4, 3))
    left.set()
    thread.join()
    assert inside == ["highest"]
    assert torch.get_float32_matmul_precision() == "high"


@on_each_device
@pytest.mark.parametrize("full", [True, False])
def test_autocast_reaches_the_box_only_if_asked(device, full):
    inside = []

    def fn(x: torch.Tensor):
        inside.append(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None)
        return torch.sin(x)

    layer = BlackBox(fn, 3, full_precision=full, policy="bond")
    x = torch.randn(4, 3, device=device, requires_grad=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = layer(x)
    y.sum().backward()  # outside, as is usual; the box is to be what it was
    assert inside == [None if full else torch.bfloat16] * 2
    assert not torch.is_autocast_enabled(device)


@needs_cuda
def test_tf32_outside_does_not_harm_the_gradient_inside(matmul_precision):
    """And would, without the precaution."""
    torch.manual_seed(0)
    net = ffnn([50, 500, 50]).cuda()
    x, gy = torch.randn(64, 50, device="cuda"), torch.randn(64, 50, device="cuda")
    exact = exact_vjp(net, x, gy)

    def accuracy(full):
        layer = BlackBox(net, 50, policy="bond", seed=0, full_precision=full).cuda()
        return float(torch.stack([sign_accuracy(gradient(layer, x, gy), exact) for _ in range(5)]).mean())

    before = accuracy(True)
    matmul_precision("high")
    assert accuracy(True) == before > 0.995
    assert accuracy(False) < before - 0.02
