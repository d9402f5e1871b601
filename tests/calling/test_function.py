"""Calling the user's function: torch, numpy, modules, and functions with bad manners."""

import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from bondgrad import BlackBox, BoxError
from bondgrad.evaluators import Local
from bondgrad.metrics import exact_vjp
from bondgrad.policies import Fixed
from tests.helpers import close, gradient


def numpy_by_annotation(x: np.ndarray):
    return x.std(axis=1, keepdims=True)  # which torch would answer differently


def numpy_by_use(x):
    return np.concatenate([np.sin(x), x**2], axis=1)


class NumpyDevice:
    def __init__(self):
        self.gain = np.array([1.0, 2.0, 3.0])

    def __call__(self, x):
        return np.asarray(x) * self.gain

    def read(self, x):
        return np.cos(x) * self.gain


class OpaqueDevice:
    """Nothing here names a library."""

    def __call__(self, x):
        return x.astype("float64").repeat(2, axis=1)


@pytest.mark.parametrize(
    ("fn", "jacobian_row"),
    [
        (numpy_by_use, lambda x: torch.cat([torch.diag(x.cos()), torch.diag(2 * x)])),
        (NumpyDevice(), lambda x: torch.diag(torch.tensor([1.0, 2.0, 3.0]))),
        (NumpyDevice().read, lambda x: torch.diag(-x.sin() * torch.tensor([1.0, 2.0, 3.0]))),
        (np.tanh, lambda x: torch.diag(1 - x.tanh() ** 2)),
        (OpaqueDevice(), lambda x: torch.eye(3).repeat_interleave(2, 0)),
        (torch.sin, lambda x: torch.diag(x.cos())),
        (lambda x: x * 3, lambda x: 3 * torch.eye(3)),
    ],
)
def test_boxes_of_either_library(fn, jacobian_row):
    layer = BlackBox(fn, 3, policy=Fixed(1e-2))
    x = torch.randn(4, 3)
    y = layer(x)
    assert isinstance(y, torch.Tensor)
    assert y.dtype == x.dtype
    gy = torch.randn_like(y)
    exact = torch.stack([gy[k] @ jacobian_row(x[k]) for k in range(4)])
    assert close(gradient(layer, x, gy), exact)


class DecoratedBy:
    def __init__(self, fn):
        functools.update_wrapper(self, fn)
        self.fn = fn

    def __call__(self, *args):
        return self.fn(*args)


def bound_first(weight: torch.Tensor, x: np.ndarray):
    return x.std(axis=1, keepdims=True)


@pytest.mark.parametrize("fn", [DecoratedBy(numpy_by_annotation), functools.partial(bound_first, torch.ones(1))])
def test_an_annotation_is_found_behind_wrappers(fn):
    x = torch.randn(4, 3)
    assert torch.allclose(BlackBox(fn, 3)(x), x.std(1, correction=0, keepdim=True))


def test_an_annotation_decides():
    x = torch.randn(4, 3)
    assert torch.allclose(BlackBox(numpy_by_annotation, 3)(x), x.std(1, correction=0, keepdim=True))


def decorated(fn):
    @functools.wraps(fn)
    def wrapper(*args):
        return fn(*args)

    return wrapper


@decorated
def torch_by_annotation(x: torch.Tensor):
    return (x * np.pi).sin()


def doubles_in_place(x):
    x *= 2
    return x.astype("float64")


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (torch_by_annotation, lambda x: (x * np.pi).sin()),
        (lambda x: (x * np.pi).sin(), lambda x: (x * np.pi).sin()),  # torch, though it names numpy
        (lambda x: x[:, ::-1] * 2.0, lambda x: x.flip(1) * 2),  # numpy, though it names nothing
        (functools.partial(lambda k, x: x.astype("float64") * k, 3.0), lambda x: 3 * x),
        (doubles_in_place, lambda x: 2 * x),
        (lambda x: np.sin(np.asarray(x)).astype(">f8"), torch.sin),
        (lambda x: np.sin(np.asarray(x), dtype=np.longdouble), torch.sin),
        (lambda x: np.broadcast_to(np.float32(1), x.shape), torch.ones_like),
        (lambda x: np.asarray(x) > 0, lambda x: (x > 0).float()),
    ],
)
def test_whatever_library_it_takes_to_call_it(fn, expected):
    x = torch.randn(4, 3)
    assert torch.allclose(BlackBox(fn, 3)(x), expected(x), atol=1e-6)


def test_arrays_are_contiguous():
    def fn(x: np.ndarray):
        assert x.flags["C_CONTIGUOUS"]
        return x * 2

    gradient(BlackBox(fn, 3), torch.randn(3, 8).T, torch.ones(8, 3))


def test_an_answer_with_a_graph_of_its_own_does_not_leak():
    weight = torch.ones(3, requires_grad=True)

    def fn(x):
        with torch.enable_grad():
            return x * weight

    layer = BlackBox(fn, 3)
    for _ in range(2):
        assert not layer(torch.randn(4, 3)).requires_grad


def test_a_module_is_registered_frozen_and_kept_in_eval():
    module = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.9), nn.BatchNorm1d(3))
    model = nn.Sequential(nn.Linear(3, 3), BlackBox(module, 3)).train()
    assert not module.training
    assert model[1].training
    assert not any(p.requires_grad for p in module.parameters())
    assert "1.fn.0.weight" in model.state_dict()
    x = torch.randn(4, 3)
    assert torch.equal(model(x), model(x))


def test_the_functions_own_graph_is_ignored():
    weight = torch.randn(3, 3, requires_grad=True)
    x = torch.randn(4, 3, requires_grad=True)
    BlackBox(lambda x: x @ weight, 3, policy=Fixed(1e-2))(x).sum().backward()
    assert weight.grad is None
    assert torch.allclose(x.grad, weight.sum(1).expand(4, 3), atol=1e-2)


# ---- functions with bad manners


def writes_into_its_input(x):
    return x.sin_()


class AnswersInOneBuffer:
    def __init__(self):
        self.buffer = torch.empty(1000, 3)

    def __call__(self, x: torch.Tensor):
        self.buffer[: len(x)] = x.sin()
        return self.buffer[: len(x)]


@pytest.mark.parametrize("max_rows", [None, 2, 5])
@pytest.mark.parametrize(
    "fn", [writes_into_its_input, AnswersInOneBuffer(), lambda x: x], ids=["writes", "buffer", "x"]
)
@pytest.mark.parametrize("estimator", ["central", "forward"])
def test_aliasing_does_no_harm(fn, estimator, max_rows):
    layer = BlackBox(fn, 3, estimator=estimator, policy=Fixed(1e-3), evaluator=Local(max_rows=max_rows))
    x = torch.randn(6, 3, requires_grad=True)
    before = x.detach().clone()
    y = layer(x)
    kept = y.detach().clone()
    (g,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(x, before)
    assert torch.equal(y, kept)
    identity = not isinstance(fn, AnswersInOneBuffer) and fn is not writes_into_its_input
    assert close(g, torch.ones_like(x) if identity else before.cos(), 1e-2)


@pytest.mark.filterwarnings("ignore:.*lazy.*")
@pytest.mark.parametrize(
    "change", [nn.utils.parametrizations.weight_norm, lambda m: prune.l1_unstructured(m, "weight", 1)]
)
def test_a_module_whose_parameters_are_rearranged(change):
    net = nn.Sequential(nn.Linear(3, 3))
    box = BlackBox(net, 3, policy=Fixed(1e-2))
    change(net[0])
    x, gy = torch.randn(4, 3), torch.randn(4, 3)
    assert close(gradient(box, x, gy), gy @ net[0].weight)


def test_another_function_takes_the_place_of_the_box():
    box = BlackBox(torch.sin, 3)
    x = torch.randn(4, 3)
    box(x)
    box.fn = torch.cos
    assert torch.equal(box(x), x.cos())
    net = nn.Linear(3, 3).train()
    box.fn = net
    assert torch.equal(box(x), net(x))
    assert not net.training
    assert not net.weight.requires_grad
    assert "fn.weight" in box.state_dict()


def test_from_a_module_to_a_function_and_back():
    box = BlackBox(nn.Linear(3, 3), 3)
    x = torch.randn(4, 3)
    box(x)
    box.fn = torch.sin
    assert torch.equal(box(x), x.sin())
    assert "fn.weight" not in box.state_dict()
    assert box.stats.calls == 2  # the counters go on
    for nothing in (None, 3):
        with pytest.raises(TypeError, match="fn must be callable"):
            box.fn = nothing
    assert torch.equal(box(x), x.sin())
    y = box(x.requires_grad_())
    box.fn = nn.Linear(3, 3)
    with pytest.raises(BoxError, match="not those of the forward pass"):
        y.sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("made", [torch.jit.script, lambda net: torch.jit.trace(net, torch.randn(2, 3))])
def test_torchscript(made):
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
    box = BlackBox(made(net), 3, policy=Fixed(1e-2))
    x, gy = torch.randn(4, 3), torch.randn(4, 3)
    assert close(gradient(box, x, gy), exact_vjp(net, x, gy))


def test_a_module_that_replaces_its_buffers():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.zeros(()))
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            self.n = self.n + 1
            return self.linear(x)

    net = Counts()
    box = BlackBox(net, 3, policy=Fixed(1e-2))
    x, gy = torch.randn(4, 3), torch.randn(4, 3)
    assert close(gradient(lambda x: box(box(x)), x, gy), gy @ net.linear.weight @ net.linear.weight)
