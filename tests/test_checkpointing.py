"""Activation checkpointing, which runs forward passes again in the backward pass."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from bondgrad import BlackBox
from bondgrad.networks import ffnn
from tests.helpers import on_each_device, same_state


def make_model(device):
    torch.manual_seed(0)
    box = BlackBox(ffnn([5, 20, 4]), 5, 4, seed=0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), box, nn.Linear(4, 2), nn.Tanh()).to(device)


def run(model, forward, steps=3):
    torch.manual_seed(1)
    device = next(model.parameters()).device
    for x in torch.randn(steps, 6, 3):
        model.zero_grad()
        forward(x.to(device)).square().sum().backward()
    return [p.grad for p in model.parameters() if p.requires_grad]


@on_each_device
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_same_gradients_state_and_cost(device, reentrant):
    plain, checkpointed = make_model(device), make_model(device)
    expected = run(plain, plain)

    def forward(x):
        return checkpoint(checkpointed, x.requires_grad_(), use_reentrant=reentrant)

    got = run(checkpointed, forward)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert same_state(checkpointed.state_dict(), plain.state_dict())
    assert checkpointed[2].stats.calls == plain[2].stats.calls == 3 * 2
    assert checkpointed[2].stats.evaluations == plain[2].stats.evaluations


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_box_that_counts_its_calls_is_called_once_a_forward_pass(reentrant):
    """A box with a state of its own, or a device that drifts, must not notice."""
    readings = []

    def device(x: torch.Tensor):
        readings.append(len(x))
        return torch.sin(x)

    model = nn.Sequential(nn.Linear(3, 5), BlackBox(device, 5, estimator="forward"), nn.Linear(5, 1))
    x = torch.randn(6, 3, requires_grad=True)
    checkpoint_sequential(model, 1, x, use_reentrant=reentrant).sum().backward()
    assert readings == [6, 6 * 5]


@pytest.mark.parametrize("reentrant", [False, True])
def test_several_passes_are_told_apart(reentrant):
    """Two forward passes through one box before either backward pass, and a context."""
    box = BlackBox(lambda x, c: x.sin() * c, 3, seed=0)
    linear = nn.Linear(2, 3)

    def part(x, c):
        return box(linear(x), c)

    a, b = torch.randn(2, 4, 2, requires_grad=True).unbind()
    one, two = torch.ones(4, 1), torch.full((4, 1), 2.0)
    losses = [checkpoint(part, x, c, use_reentrant=reentrant).sum() for x, c in ((a, one), (a, two), (b, one))]
    calls = box.stats.calls
    torch.stack(losses).sum().backward()
    assert box.stats.calls == calls + 3  # one gradient each, and no forward pass again
    exact = torch.autograd.grad(3 * linear(a).sin().sum() + linear(b).sin().sum(), linear.weight)[0]
    assert torch.allclose(linear.weight.grad, exact, rtol=1e-2)


def test_an_answer_that_is_not_known_any_more_is_asked_for_again():
    """With retain_graph the second backward pass runs the forward pass a third time."""
    model = make_model("cpu")
    x = torch.randn(6, 3, requires_grad=True)
    y = checkpoint(model, x, use_reentrant=False)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    second = torch.autograd.grad(y.sum(), x)[0]
    assert torch.allclose(first, second, rtol=0.05, atol=1e-3)


def test_nothing_piles_up_where_no_backward_pass_comes():
    model = make_model("cpu")
    for _ in range(1000):
        checkpoint(model, torch.randn(1, 3, requires_grad=True), use_reentrant=False)
    assert len(model[2]._answers._kept) <= 256
    copy.deepcopy(model)
