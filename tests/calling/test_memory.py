"""Boxes that remember: only the forward pass moves them on."""

import copy
import io

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from bondgrad import BlackBox, BoxError
from bondgrad.policies import Fixed
from tests.helpers import close, gradient, on_each_device


def leaky(x, state):
    """Every row has a leaky sum of its own."""
    new = 0.5 * state + torch.sin(x)
    return new * new, new


def expected(xs, gys):
    """What `leaky` answers to a stream, and its gradients, each with the state before it given."""
    state, answers = torch.zeros_like(xs[0]), []
    for x, gy in zip(xs, gys, strict=True):
        new = 0.5 * state + torch.sin(x)
        answers.append((new * new, gy * 2 * new * x.cos()))
        state = new
    return answers


class Device:
    """Keeps its state to itself."""

    def __init__(self):
        self.state = 0.0
        self.restored = 0

    def __call__(self, x: np.ndarray):
        self.state = 0.5 * self.state + np.sin(x)
        return self.state**2

    def snapshot(self):
        return copy.deepcopy(self.state)

    def restore(self, snapshot):
        self.restored += 1
        self.state = copy.deepcopy(snapshot)


def carried(**settings):
    return BlackBox(leaky, 3, state=torch.zeros(1, 3, dtype=torch.float64), policy=Fixed(1e-5), seed=0, **settings)


def own(**settings):
    return BlackBox(Device(), 3, policy=Fixed(1e-5), seed=0, **settings)


kinds = pytest.mark.parametrize("make", [carried, own])


def stream(steps=5, rows=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: [torch.randn(rows, 3, dtype=torch.float64, generator=generator) for _ in range(steps)]  # noqa: E731
    return draw(), draw()


@kinds
def test_answers_and_gradients_along_a_stream(make):
    layer = make()
    xs, gys = stream()
    for x, gy, (y, g) in zip(xs, gys, expected(xs, gys), strict=True):
        at = x.clone().requires_grad_()
        answer = layer(at)
        assert torch.allclose(answer, y)
        assert close(torch.autograd.grad(answer, at, gy)[0], g, 1e-8)


@kinds
@pytest.mark.parametrize("estimator", ["central", "forward", "simultaneous"])
@pytest.mark.parametrize("structure", ["dense", np.eye(3, dtype=bool)])
def test_the_backward_pass_moves_nothing_on(make, estimator, structure):
    """Also of several forward passes before, in whatever order."""
    layer = make(estimator=estimator, structure=structure)
    xs, gys = stream()
    inputs = [x.clone().requires_grad_() for x in xs]
    answers = [layer(x) for x in inputs]
    for i in (3, 0, 4, 1, 2):
        y, g = expected(xs, gys)[i]
        assert torch.allclose(answers[i], y)
        (estimate,) = torch.autograd.grad(answers[i], inputs[i], gys[i], retain_graph=True)
        if estimator == "central" or not isinstance(structure, str):
            assert close(estimate, g, 1e-8 if estimator != "forward" else 1e-4)
    assert torch.allclose(layer(xs[0]), expected([*xs, xs[0]], [*gys, gys[0]])[5][0])


@kinds
def test_evaluation_has_a_stream_of_its_own(make):
    layer = make()
    xs, gys = stream(4)
    wanted = [y for y, _ in expected(xs, gys)]
    assert torch.allclose(layer(xs[0]), wanted[0])
    assert torch.allclose(layer(xs[1]), wanted[1])
    for _ in range(2):  # begins anew each time
        layer.eval()
        assert torch.allclose(layer(xs[0]), wanted[0])
        assert torch.allclose(layer(xs[1]), wanted[1])
        layer.eval()  # again is not a change of mode
        assert torch.allclose(layer(xs[2]), wanted[2])
        layer.train()
    assert torch.allclose(layer(xs[2]), wanted[2])
    assert torch.allclose(layer(xs[3]), wanted[3])


@kinds
def test_gradients_in_eval_mode(make):
    layer = make().eval()
    xs, gys = stream(3)
    for x, gy, (_, g) in zip(xs, gys, expected(xs, gys), strict=True):
        assert close(gradient(layer, x, gy), g, 1e-8)


@kinds
def test_reset(make):
    layer = make()
    xs, gys = stream(2)
    first = expected(xs, gys)[0][0]
    layer(xs[0])
    layer.eval()
    layer(xs[0])
    layer.reset()
    assert torch.allclose(layer(xs[0]), first)
    layer.train()
    assert not torch.allclose(layer(xs[0]), first)  # only the stream of the mode it was in
    layer.reset()
    assert torch.allclose(layer(xs[0]), first)


def test_reset_of_a_box_without_memory():
    with pytest.raises(BoxError, match="no memory"):
        BlackBox(torch.sin, 3).reset()


@kinds
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_does_not_call_it_twice(make, reentrant):
    layer = make()
    xs, gys = stream()
    for x, gy, (y, g) in zip(xs, gys, expected(xs, gys), strict=True):
        at = x.clone().requires_grad_()
        before = layer.stats.evaluations
        answer = checkpoint(layer, at, use_reentrant=reentrant)
        assert torch.allclose(answer, y)
        assert close(torch.autograd.grad(answer, at, gy)[0] if not reentrant else backward(answer, at, gy), g, 1e-8)
        assert layer.stats.evaluations - before == 4 * 7


def backward(answer, x, gy):
    answer.backward(gy)
    return x.grad


def test_checkpoints_that_cannot_be_told_apart():
    layer = carried()
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    y = checkpoint(lambda x: layer(x) + layer(x), x, use_reentrant=False)
    with pytest.raises(BoxError, match="cannot be told apart"):
        y.sum().backward()


@kinds
def test_saving_and_loading(make):
    layer, other = make(), make()
    xs, gys = stream()
    answers = expected(xs, gys)
    for x, gy in list(zip(xs, gys, strict=True))[:3]:
        gradient(layer, x, gy)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=False))
    third = copy.deepcopy(layer)
    for one in (other, layer, third):
        assert torch.allclose(one(xs[3]), answers[3][0])
        assert torch.allclose(one(xs[4]), answers[4][0])


@on_each_device
def test_on_each_device(device):
    layer = carried().to(device)
    xs, gys = stream()
    for x, gy, (y, g) in zip(xs, gys, expected(xs, gys), strict=True):
        at = x.to(device).requires_grad_()
        answer = layer(at)
        assert torch.allclose(answer.cpu(), y)
        assert close(torch.autograd.grad(answer, at, gy.to(device))[0].cpu(), g, 1e-8)
