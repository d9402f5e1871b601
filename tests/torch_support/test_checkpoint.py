"""Activation checkpointing, which runs forward passes again in the backward pass."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from bondgrad import BlackBox
from bondgrad.networks import ffnn
from bondgrad.policies import Fixed
from tests.helpers import on_each_device, same_state


def make_model(device):
    torch.manual_seed(0)
    box = BlackBox(ffnn([5, 20, 4]), 5, 4, policy="bond", seed=0)
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

    model = nn.Sequential(nn.Linear(3, 5), BlackBox(device, 5, estimator="forward", policy="bond"), nn.Linear(5, 1))
    x = torch.randn(6, 3, requires_grad=True)
    checkpoint_sequential(model, 1, x, use_reentrant=reentrant).sum().backward()
    assert readings == [6, 6 * 5]


@pytest.mark.parametrize("reentrant", [False, True])
def test_several_passes_are_told_apart(reentrant):
    """Two forward passes through one box before either backward pass, and a context."""
    box = BlackBox(lambda x, c: x.sin() * c, 3, seed=0, policy="bond")
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
    assert len(model[2].answers) <= 256
    copy.deepcopy(model)


@on_each_device
@pytest.mark.parametrize("reentrant", [False, True])
def test_random_numbers_drawn_by_the_box_and_after_it(device, reentrant):
    def noisy(x: torch.Tensor):
        return torch.sin(x) + 1e-3 * torch.randn_like(x)

    def gradients(forward):
        torch.manual_seed(0)
        box = BlackBox(noisy, 8, 8, policy=Fixed(0.1), seed=0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(), box, nn.Dropout(), nn.Linear(8, 8)).to(device)
        x = torch.randn(5, 3, device=device, requires_grad=True)
        forward(model, x).square().sum().backward()
        return [model[4].weight.grad, model[4].bias.grad], torch.rand(1, device=device)

    plain, after = gradients(lambda model, x: model(x))
    got, after_too = gradients(lambda model, x: checkpoint(model, x, use_reentrant=reentrant))
    assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))
    assert torch.equal(after, after_too)  # and whatever comes next draws what it would have drawn


def test_random_numbers_that_a_checkpoint_does_not_restore_are_left_alone():
    torch.manual_seed(0)
    model = make_model("cpu")
    y = checkpoint(model, torch.randn(5, 3, requires_grad=True), use_reentrant=False, preserve_rng_state=False)
    seen = torch.rand(5)
    y.sum().backward()
    assert not torch.equal(torch.rand(5), seen)


def test_selective_checkpointing():
    def save_products(_ctx, op, *_, **__):
        products = {torch.ops.aten.addmm.default, torch.ops.aten.mm.default}
        return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
    plain, checkpointed = make_model("cpu"), make_model("cpu")
    expected = run(plain, plain)
    got = run(
        checkpointed,
        lambda x: checkpoint(checkpointed, x.requires_grad_(), use_reentrant=False, context_fn=contexts),
    )
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert checkpointed[2].stats.calls == plain[2].stats.calls


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_nested_checkpoints(outer, inner):
    model = make_model("cpu")
    x = torch.randn(6, 3, requires_grad=True)

    def half(x):
        return checkpoint(model[1:4], model[0](x), use_reentrant=inner)

    checkpoint(half, x, use_reentrant=outer).sum().backward()
    assert model[2].stats.calls == 2
    assert len(model[2].answers) == 0


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("situation", [torch.no_grad, torch.inference_mode])
def test_passes_that_need_no_gradient_are_not_remembered(situation):
    net = nn.Linear(3, 3)
    box = BlackBox(lambda x, *c: net(x) * (c[0] if c else 1), 3, estimator="forward", policy=Fixed(1e-2))
    x = torch.randn(6, 3)
    with situation():
        checkpoint(box, x, use_reentrant=False)
        checkpoint(box, x, torch.ones(6, 1), use_reentrant=False)
    assert len(box.answers) == 0
    with torch.no_grad():
        net.weight.normal_()
        checkpoint(box, x, torch.ones(6, 1), use_reentrant=True)  # which cannot be told from a first run
    x.requires_grad_()
    checkpoint(lambda x: box(x).square(), x, use_reentrant=False).sum().backward()
    exact = torch.autograd.grad(net(x).square().sum(), x)[0]
    assert torch.allclose(x.grad, exact, rtol=1e-2, atol=1e-2)


def test_a_box_in_eval_mode_is_called_once():
    model = make_model("cpu").eval()
    checkpoint(model, torch.randn(6, 3, requires_grad=True), use_reentrant=False).sum().backward()
    assert model[2].stats.calls == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_random_box_used_twice_on_the_same_rows(reentrant):
    def noisy(x: torch.Tensor):
        return torch.sin(x) + torch.randn_like(x)

    masks = []

    def body(x):
        u = box(x) + 2 * box(x)
        masks.append((torch.rand_like(u) > 0.5).float())
        return u * masks[-1] * u

    box = BlackBox(noisy, 3, 3, policy=Fixed(0.1), seed=0)
    checkpoint(body, torch.randn(50, 3, requires_grad=True), use_reentrant=reentrant).sum().backward()
    first, again = masks
    assert torch.equal(first, again)
    assert box.stats.calls == 4
    assert len(box.answers) == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_rows_with_nan_are_the_same_rows(reentrant):
    model = make_model("cpu")
    x = torch.randn(6, 3)
    x[2, 1] = torch.nan
    with pytest.warns(UserWarning, match="1 row got no finite output"):
        checkpoint(model, x.requires_grad_(), use_reentrant=reentrant).sum().backward()
    assert model[2].stats.calls == 1 + 2 + 1  # the batch, its third row twice again, and the gradient of the others
    assert len(model[2].answers) == 0


def test_an_answer_to_rows_that_need_no_gradient_is_used_once():
    box, out = BlackBox(torch.sin, 3, 3), nn.Linear(3, 1)
    for _ in range(3):
        checkpoint(lambda x: out(box(x)).tanh(), torch.randn(6, 3), use_reentrant=False).sum().backward()
    assert box.stats.calls == 3
    assert len(box.answers) == 0
