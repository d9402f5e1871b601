"""The layer as a user meets it."""

import numpy as np
import pytest
import torch
from torch import nn

import bondgrad
from bondgrad import BlackBox, Central, Forward, Simultaneous, sign_accuracy
from bondgrad.evaluators import Local
from bondgrad.metrics import exact_vjp
from bondgrad.networks import ffnn
from bondgrad.policies import Fixed
from bondgrad.testing.boxes import TanhNetwork, Waves
from tests.helpers import close, gradient, on_each_device

ESTIMATORS = {"central": Central, "forward": Forward, "simultaneous": lambda: Simultaneous(512)}


def test_what_a_user_writes():
    read_in, read_out = nn.Linear(8, 4), nn.Linear(6, 1)
    box = BlackBox(TanhNetwork(4, 16, 6), in_features=4)
    model = nn.Sequential(read_in, box, read_out)
    nn.functional.mse_loss(model(torch.randn(32, 8)), torch.randn(32, 1)).backward()
    assert read_in.weight.grad.abs().min() > 0
    assert box.stats.evaluations < 32 + 32 * 8 + 2500  # with what it takes to find a first step


def test_gradients_of_the_read_in_are_those_of_automatic_differentiation():
    torch.manual_seed(0)
    exact = ffnn([4, 30, 6]).requires_grad_(False)
    read_in, read_out = nn.Linear(8, 4), nn.Linear(6, 1)
    x = torch.randn(32, 8)
    grads = []
    for box in (exact, BlackBox(exact, 4, policy=Fixed(1e-2), seed=0)):
        read_in.zero_grad()
        read_out(box(read_in(x))).square().mean().backward()
        grads.append(read_in.weight.grad.clone())
    assert close(grads[1], grads[0])


@on_each_device
@pytest.mark.parametrize("lead", [(), (1,), (7,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("estimator", ["central", "forward"])
def test_any_leading_shape(lead, estimator, device):
    exact = TanhNetwork(4, 16, 6)
    layer = BlackBox(exact, 4, estimator=estimator, policy=Fixed(1e-3)).to(device)
    x, gy = torch.randn(*lead, 4, device=device), torch.randn(*lead, 6, device=device)
    assert layer(x).shape == (*lead, 6)
    g = gradient(layer, x, gy)
    assert g.shape == x.shape
    assert close(g.view(-1, 4), exact.vjp(x.view(-1, 4), gy.view(-1, 6)), 1e-2)


@on_each_device
@pytest.mark.parametrize("make", [lambda x: x.T.contiguous().T, lambda x: x[:, ::2], lambda x: x[:1].expand(5, -1)])
def test_strided_input(make, device):
    x = make(torch.randn(5, 8, device=device))
    exact = Waves(x.shape[1], 3)
    gy = torch.randn(5, 3, device=device)
    assert close(gradient(BlackBox(exact, x.shape[1], policy=Fixed(1e-2)).to(device), x, gy), exact.vjp(x, gy))


# ---- context


def test_context_reaches_the_function_untouched():
    def fn(x, gain, label):
        assert label.dtype == torch.int64
        return x * gain.unsqueeze(1) + label.sum(1, keepdim=True)

    layer = BlackBox(fn, 3, policy=Fixed(1e-2), evaluator=Local(max_rows=7))
    x, gain, label = torch.randn(2, 5, 3), torch.randn(2, 5), torch.randint(9, (2, 5, 4))
    y = layer(x, gain, label)
    assert torch.allclose(y, x * gain.unsqueeze(2) + label.sum(2, keepdim=True))
    gy = torch.randn_like(y)
    assert close(gradient(layer, x, gy, gain, label), gy * gain.unsqueeze(2), 1e-2)


def test_context_for_numpy():
    def fn(x: np.ndarray, gain):
        assert isinstance(gain, np.ndarray)
        return x * gain[:, None]

    x, gain = torch.randn(5, 3), torch.randn(5)
    assert torch.allclose(BlackBox(fn, 3)(x, gain), x * gain.unsqueeze(1))


def test_a_function_may_write_into_its_context():
    def fn(x, c):
        return x * c.add_(1)

    layer = BlackBox(fn, 3, policy=Fixed(1e-2))
    x, c = torch.randn(5, 3), torch.ones(5, 1)
    assert close(gradient(layer, x, torch.ones(5, 3), c), torch.full((5, 3), 2.0))
    assert torch.equal(c, torch.ones(5, 1))


def test_a_context_overwritten_before_the_backward_pass_is_noticed():
    x, c = torch.randn(5, 3, requires_grad=True), torch.ones(5, 1)
    y = BlackBox(lambda x, c: x * c, 3)(x, c)
    c.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- limits


@pytest.mark.parametrize(
    "limits", [(-0.5, 0.5), ([-0.5, -1.0, -2.0], 0.5), (torch.tensor(-0.5), np.array([0.1, 0.2, 9]))]
)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_no_point_outside_the_limits_is_evaluated(estimator, limits):
    low, high = (torch.as_tensor(limit, dtype=torch.float64).expand(3) for limit in limits)
    asked = []

    def fn(x):
        asked.append(x.clone())
        return torch.sin(x)

    layer = BlackBox(fn, 3, estimator=ESTIMATORS[estimator](), policy=Fixed(0.05), limits=limits, seed=0)
    x = torch.linspace(-3, 3, 60).view(20, 3)
    gy = torch.ones(20, 3)
    g = gradient(layer, x, gy)
    points = torch.cat(asked).double()  # to the last bit: float32 has no 0.1, and rounds inwards here
    assert (points >= low).all()
    assert (points <= high).all()
    inside = x.clamp(low.float(), high.float())
    assert torch.allclose(layer(x), torch.sin(inside))
    # Estimated at the clamped point, and passed on to inputs outside as well.
    assert close(g, inside.cos(), 0.4 if estimator == "simultaneous" else 0.05)


@pytest.mark.parametrize("estimator", ["central", "forward"])
def test_at_a_limit_the_difference_is_taken_inwards(estimator):
    layer = BlackBox(lambda x: x**2, 2, estimator=estimator, policy=Fixed(0.01), limits=(1.0, 2.0))
    x = torch.tensor([[1.0, 2.0]])
    assert torch.allclose(gradient(layer, x, torch.ones(1, 2)), torch.tensor([[2.01, 3.99]]), atol=1e-3)


def test_a_forward_difference_wider_than_the_limits():
    layer = BlackBox(torch.sin, 1, estimator="forward", policy=Fixed(10.0), limits=(0, 1))
    g = gradient(layer, torch.tensor([[0.5]]), torch.ones(1, 1))
    assert torch.allclose(g, torch.tensor([[2 * (np.sin(1.0) - np.sin(0.5))]], dtype=torch.float32))


def test_limits_that_float32_cannot_tell_apart():
    layer = BlackBox(torch.sin, 1, limits=(1.0, 1.0 + 1e-9))
    assert layer(torch.zeros(1, 1, dtype=torch.float64)).shape == (1, 1)
    with pytest.raises(ValueError, match=r"within what torch\.float32 can tell apart"):
        layer(torch.zeros(1, 1))


# ---- several boxes, several uses


def test_several_boxes_in_one_model_do_not_interfere():
    torch.manual_seed(0)
    nets = [ffnn([4, 20, 4]) for _ in range(2)]
    x, gy = torch.randn(9, 4), torch.randn(9, 4)
    boxes = [BlackBox(net, 4, policy=Fixed(1e-2), seed=i) for i, net in enumerate(nets)]
    g = gradient(nn.Sequential(*boxes), x, gy)
    assert close(g, exact_vjp(nn.Sequential(*nets), x, gy))
    assert [box.stats.calls for box in boxes] == [2, 2]


@on_each_device
def test_a_box_used_twice_in_one_graph(device):
    net = ffnn([4, 20, 4])
    layer = BlackBox(net, 4, policy=Fixed(1e-2)).to(device)
    x, gy = torch.randn(2, 9, 4, device=device)
    assert close(gradient(lambda x: layer(layer(x)), x, gy), exact_vjp(lambda x: net(net(x)), x, gy))


@on_each_device
def test_retained_graphs_give_a_gradient_each_time(device):
    exact = Waves(3, 3)
    layer = BlackBox(exact, 3, policy=Fixed(1e-2)).to(device)
    x = torch.randn(5, 3, device=device, requires_grad=True)
    y = layer(x)
    for gy in torch.randn(2, 5, 3, device=device):
        (g,) = torch.autograd.grad(y, x, gy, retain_graph=True)
        assert close(g, exact.vjp(x.detach(), gy))


@on_each_device
@pytest.mark.parametrize("loss", [lambda y: y.sum(), lambda y: y.square().sum()], ids=["linear", "square"])
def test_second_derivatives_are_refused(loss, device):
    x = torch.randn(5, 3, device=device, requires_grad=True)
    (g,) = torch.autograd.grad(loss(BlackBox(torch.sin, 3).to(device)(x)), x, create_graph=True)
    assert close(g.detach(), exact_vjp(torch.sin, x.detach(), torch.autograd.grad(loss(s := x.sin()), s)[0]), 0.1)
    with pytest.raises(bondgrad.BoxError, match="second derivatives through a BlackBox are not estimated"):
        (g.sum() + x.sum()).backward()


# ---- row normalisation


@pytest.mark.parametrize("estimator", [Central, Forward, Simultaneous])
def test_rows_are_scaled_to_norm_one_and_the_policy_sees_them_before(estimator):
    data = torch.randn(7, 3)
    gy = torch.randn(7, 2)
    gy[3] = 0
    layers = [BlackBox(Waves(3, 2), 3, estimator=estimator(normalize_rows=n), seed=0) for n in (False, True)]
    plain, scaled = (gradient(layer, data, gy) for layer in layers)
    norms = torch.ones(7)
    norms[3] = 0
    assert torch.allclose(scaled.norm(dim=1), norms)
    assert torch.allclose(scaled * plain.norm(dim=1, keepdim=True), plain, atol=1e-5)
    assert torch.equal(layers[0].policy_state.sums, layers[1].policy_state.sums)


@pytest.mark.parametrize("scale", [1e-30, 1e-14, 1e25])
def test_rows_of_any_size_are_scaled(scale):
    layer = BlackBox(torch.sin, 3, estimator=Central(normalize_rows=True), policy=Fixed(1e-2))
    g = gradient(layer, torch.randn(5, 3), torch.full((5, 3), scale))
    assert torch.allclose(g.norm(dim=1), torch.ones(5))


# ---- seeing what it does


def test_stats_count_calls_evaluations_and_steps():
    layer = BlackBox(Waves(3, 2), 3, evaluator=Local(max_rows=10), policy=Fixed(0.25))
    assert layer.stats == bondgrad.Stats(0, 0, 0, 0.0, None, None, None)
    gradient(layer, torch.zeros(5, 3), torch.ones(5, 2))
    stats = layer.stats
    assert stats.evaluations == 5 + 5 * 6
    assert stats.calls == 1 + 3  # thirty points, ten at a time
    assert layer.progress.requests == 1 + 1
    assert (stats.retried, stats.wasted, stats.recorded, stats.errors, stats.tracebacks) == (0, 0, 0, {}, {})
    assert [(worker.worker, worker.rows, worker.failures) for worker in stats.workers] == [(0, 35, 0)]
    assert stats.seconds > 0
    assert stats.step.tolist() == stats.lower.tolist() == stats.upper.tolist() == [0.25] * 3


@pytest.mark.parametrize("estimator", [Central(), Forward(), Simultaneous(3)])
def test_evaluations_are_what_the_estimator_says(estimator):
    layer = BlackBox(Waves(4, 2), 4, estimator=estimator, policy="bond")
    gradient(layer, torch.randn(5, 4), torch.randn(5, 2))
    assert layer.stats.evaluations == 5 + 5 * estimator.evaluations(4)


def test_step_hooks_see_the_gradient_and_can_be_removed():
    exact = Waves(3, 2)
    layer = BlackBox(exact, 3)
    seen = []
    handle = layer.register_step_hook(lambda box, step: seen.append((box, step)))
    x, gy = torch.randn(5, 3), torch.randn(5, 2)
    g = gradient(layer, x, gy)
    handle.remove()
    gradient(layer, x, gy)
    ((box, step),) = seen
    assert box is layer
    assert torch.equal(step.g, g)
    assert torch.equal(step.gy, gy)
    assert sign_accuracy(step.g, exact.vjp(step.x, step.gy)) > 0.8


def test_repr_names_the_parts():
    text = repr(BlackBox(torch.sin, 3, policy=Fixed(0.1)))
    assert "sin" in text
    assert "Fixed(step=0.1)" in text
    assert "Central" in text


def test_training_mode_is_the_default_of_train():
    box = BlackBox(nn.Dropout(), 3)
    assert not box.eval().training
    assert box.train().training
    assert not box.fn.training
