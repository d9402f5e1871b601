"""The transforms of torch.func over models that contain a box."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap

from bondgrad import BlackBox, BoxError
from bondgrad.networks import ffnn
from bondgrad.policies import Fixed
from tests.helpers import close, on_each_device


@pytest.fixture
def net():
    torch.manual_seed(0)
    return ffnn([4, 16, 2])


def boxed(net, device="cpu"):
    return BlackBox(net, 4, policy=Fixed(1e-2), seed=0).to(device)


def loss(f):
    return lambda x: f(x).square().sum()


@on_each_device
def test_grad_and_vjp(net, device):
    box = boxed(net, device)
    x, gy = torch.randn(6, 4, device=device), torch.randn(6, 2, device=device)
    assert close(grad(loss(box))(x), grad(loss(net))(x))
    assert close(vjp(box, x)[1](gy)[0], vjp(net, x)[1](gy)[0])
    assert box.stats.calls == 4


@on_each_device
def test_vmap_is_more_rows(net, device):
    box = boxed(net, device)
    x = torch.randn(3, 6, 4, device=device)
    assert torch.equal(vmap(box)(x), box(x))
    assert torch.equal(vmap(box, in_dims=1)(x), box(x.transpose(0, 1)))
    assert box.stats.calls == 4
    assert close(vmap(grad(loss(box)))(x), vmap(grad(loss(net)))(x))
    assert close(vmap(jacrev(box))(x[0]), vmap(jacrev(net))(x[0]))


def test_a_context_is_mapped_or_shared():
    box = BlackBox(lambda x, c: x.sin() * c, 3, policy=Fixed(1e-2))
    x, c = torch.randn(5, 3), torch.randn(5, 1)
    assert torch.allclose(vmap(box)(x, c), x.sin() * c)
    assert torch.allclose(vmap(box, in_dims=(0, None))(x, c[0]), x.sin() * c[0])
    g = vmap(grad(lambda x, c: box(x, c).sum()), in_dims=(0, None))(x, c[0])
    assert close(g, x.cos() * c[0])


@on_each_device
def test_gradients_of_each_sample(net, device):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), boxed(net)).to(device)
    exact = nn.Sequential(model[0], net)
    weights = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    x = torch.randn(6, 3, device=device)

    def of_each(model):
        def one(weights, x):
            return functional_call(model, weights, (x,)).square().sum()

        return vmap(grad(one), in_dims=(None, 0))(weights, x)

    got, expected = of_each(model), of_each(exact)
    assert all(close(got[name], expected[name]) for name in weights)


def test_an_ensemble_of_read_ins_around_one_box(net):
    box = boxed(net)
    read_ins = [nn.Linear(3, 4) for _ in range(5)]
    weights, _ = stack_module_state(read_ins)
    x = torch.randn(6, 3)

    def one(weights):
        return box(functional_call(read_ins[0], weights, (x,)))

    expected = torch.stack([net(read_in(x)) for read_in in read_ins])
    assert torch.allclose(vmap(one)(weights), expected, atol=1e-6)


@on_each_device
@pytest.mark.parametrize("forward_mode", [lambda f, x: jvp(f, (x,), (x,)), lambda f, x: jacfwd(f)(x)])
def test_forward_mode_is_refused(net, forward_mode, device):
    with pytest.raises(BoxError, match=r"forward-mode derivatives .* do not pass through a BlackBox"):
        forward_mode(boxed(net, device), torch.randn(6, 4, device=device))


def test_dual_numbers_are_refused(net):
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(torch.randn(6, 4), torch.randn(6, 4))
        for dual in (x, x.clone().requires_grad_()):
            with pytest.raises(BoxError, match="forward-mode"):
                boxed(net)(dual)


def test_second_derivatives_are_refused(net):
    f, x = loss(boxed(net)), torch.randn(6, 4)
    with pytest.raises(BoxError, match="second derivatives through a BlackBox are not estimated"):
        grad(lambda x: grad(f)(x).sum())(x)
    with pytest.raises(BoxError, match="derivatives"):
        hessian(f)(x)


@pytest.mark.parametrize("estimator", ["central", "forward"])
def test_other_parameters_of_the_box_are_refused(estimator):
    """They are there in the forward pass only."""
    net = nn.Linear(3, 2)
    box = BlackBox(net, 3, 2, estimator=estimator, policy=Fixed(1e-2))
    x = torch.randn(4, 3)
    others = {"fn.weight": torch.randn(2, 3)}
    with pytest.raises(BoxError, match="leave them out of what functional_call replaces"):
        functional_call(box, others, (x.requires_grad_(),)).sum().backward()
    with pytest.raises(BoxError, match="leave them out of what functional_call replaces"):
        grad(lambda x: functional_call(box, others, (x,)).sum())(x.detach())
    same = {name: p.detach() for name, p in box.named_parameters()}
    g = grad(lambda x: functional_call(box, same, (x,)).sum())(x.detach())
    assert torch.allclose(g, net.weight.sum(0).expand(4, 3), atol=1e-3)
    weights, buffers = stack_module_state([box, BlackBox(nn.Linear(3, 2), 3, 2)])
    with pytest.raises(BoxError, match="cannot be mapped over"):
        vmap(lambda w, b: functional_call(box, (w, b), (x,)))(weights, buffers)


def test_batched_gradients(net):
    box = boxed(net)
    x, gy = torch.randn(6, 4, requires_grad=True), torch.randn(5, 6, 2)

    def through(f):
        y = f(x)
        return vmap(lambda gy: torch.autograd.grad(y, x, gy, retain_graph=True)[0])(gy)

    assert close(through(box), through(net))
    with pytest.raises(BoxError, match=r"use torch\.func\.vmap"):
        torch.autograd.grad(box(x), x, gy, is_grads_batched=True)


def test_a_layer_that_nobody_else_keeps(net):
    x, gy = torch.randn(6, 4), torch.randn(6, 2)
    _, pull_back = vjp(BlackBox(net, 4, policy=Fixed(1e-2)), x)
    assert close(pull_back(gy)[0], vjp(net, x)[1](gy)[0])


def test_double_precision():
    """The answer at x itself keeps all its digits, which forward differences need."""
    box = BlackBox(torch.sin, 3, 3, estimator="forward", policy=Fixed(1e-7))
    x = torch.randn(6, 3, dtype=torch.float64)
    assert close(grad(lambda x: box(x).sum())(x), x.cos(), 1e-5)
