"""On a GPU, and between devices. Skipped where there is none."""

import math
import warnings

import numpy as np
import pytest
import torch

from bondgrad import BlackBox, Central, Forward, Simultaneous
from bondgrad.metrics import exact_vjp
from bondgrad.networks import ffnn
from bondgrad.policies import Bond, Fixed, Gaussian, Optimal
from bondgrad.testing.boxes import TanhNetwork, Waves
from tests.helpers import close, gradient, needs_cuda

pytestmark = needs_cuda

POLICIES = [Bond(), Bond("error-terms"), Bond(reduce="sum"), Fixed(1e-2), Gaussian(1e-2), Optimal(1e-6, 1.0)]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("estimator", [Central(), Forward(), Simultaneous(2048)], ids=repr)
def test_gradients(estimator, policy):
    exact = TanhNetwork(4, 16, 6)
    layer = BlackBox(exact, 4, estimator=estimator, policy=policy, seed=0).cuda()
    for _ in range(3):
        x, gy = torch.randn(32, 4, device="cuda"), torch.randn(32, 6, device="cuda")
        g = gradient(layer, x, gy)
    assert g.device.type == "cuda"
    assert close(g, exact.vjp(x, gy), 0.15 if isinstance(estimator, Simultaneous) else 0.05)


def test_numpy_boxes_are_fed_from_the_gpu():
    def fn(x: np.ndarray):
        return np.sin(x)

    x, gy = torch.randn(8, 3, device="cuda"), torch.randn(8, 3, device="cuda")
    assert close(gradient(BlackBox(fn, 3, policy=Fixed(1e-2)), x, gy), gy * x.cos())


@pytest.mark.parametrize("policy", ["bond", "calibrated"])
@pytest.mark.parametrize("limits", [None, (-1.0, 1.0)])
def test_a_step_does_not_wait_for_the_device(limits, policy):
    """Except where the box is tried out."""
    layer = BlackBox(ffnn([4, 16, 6]), 4, limits=limits, policy=policy, seed=0).cuda()
    x, gy = torch.randn(32, 4, device="cuda"), torch.randn(32, 6, device="cuda")
    while layer.due():
        gradient(layer, x, gy)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the mode itself is a prototype
            torch.cuda.set_sync_debug_mode("error")
        gradient(layer, x, gy)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_failures_cost_their_entries_and_are_counted():
    layer = BlackBox(torch.sqrt, 2, policy=Fixed(0.01)).cuda()
    x = torch.tensor([[1.0, 2.0], [0.005, 3.0], [math.nan, 1.0]], device="cuda")
    g = gradient(layer, x, torch.ones(3, 2, device="cuda"))
    assert torch.isfinite(g).all()
    assert torch.allclose(g[0], 0.5 / x[0].sqrt(), rtol=1e-2)
    assert torch.isclose(g[1, 1], 0.5 / x[1, 1].sqrt(), rtol=1e-2)
    with pytest.warns(UserWarning, match="5 rows got no finite output"):
        assert layer.stats.failures == 1 + 4


def test_a_state_moves_between_devices():
    layer = BlackBox(Waves(3, 2), 3, seed=5).cuda()
    x, gy = torch.randn(4, 3, device="cuda"), torch.randn(4, 2, device="cuda")
    gradient(layer, x, gy)
    other = BlackBox(Waves(3, 2), 3)
    other.load_state_dict(layer.state_dict())
    gradient(other, x.cpu(), gy.cpu())
    again = BlackBox(Waves(3, 2), 3).cuda()
    again.load_state_dict(layer.state_dict())
    assert torch.equal(gradient(again, x, gy), gradient(layer, x, gy))


@pytest.mark.parametrize("where", ["box on the GPU", "box on the CPU"])
@pytest.mark.parametrize("estimator", ["central", "forward"])
def test_a_box_on_another_device_than_x(where, estimator):
    torch.manual_seed(0)
    net = ffnn([4, 16, 6])
    there, here = ("cuda", "cpu") if where == "box on the GPU" else ("cpu", "cuda")
    read_in = torch.nn.Linear(3, 4).to(here)
    layer = BlackBox(net, 4, estimator=estimator, policy=Bond(), limits=(-1.5, 1.5), seed=0).to(there)
    for _ in range(3):
        x, gy = torch.randn(32, 3, device=here), torch.randn(32, 6, device=here)
        h = read_in(x)
        y = layer(h)
        (g,) = torch.autograd.grad(y, h, gy)
    assert y.device == g.device == h.device
    assert layer.policy_state.sums.device.type == there
    inside = h.detach().clamp(-1.5, 1.5)
    assert close(g, exact_vjp(net, inside.to(there), gy.to(there)).to(here), 0.05)
    assert layer.policy_state.sums.any()


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # by torch, if it is the first to do so in its thread
def test_a_function_that_moves_its_rows_itself():
    net = ffnn([4, 16, 6]).cuda()
    layer = BlackBox(lambda x: net(x.cuda()), 4, policy=Fixed(1e-2))
    x, gy = torch.randn(32, 4), torch.randn(32, 6)
    assert close(gradient(layer, x, gy), exact_vjp(net, x.cuda(), gy.cuda()).cpu(), 1e-2)


def test_numpy_rows_are_made_on_the_cpu():
    """To send x and bring g back is cheaper than to send every perturbed row."""

    def fn(x: np.ndarray):
        return np.sin(x)

    layer = BlackBox(fn, 3, seed=0).cuda()
    gradient(layer, torch.randn(8, 3, device="cuda"), torch.randn(8, 3, device="cuda"))
    assert layer.policy_state.random.generators("cpu")
    assert not layer.policy_state.random.generators("cuda")
