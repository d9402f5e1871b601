"""torch.compile: the box is an opaque operator, and what is around it compiles."""

import copy
import gc

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from bondgrad import BlackBox, BoxError, Central, Forward, Simultaneous
from bondgrad.networks import ffnn
from bondgrad.policies import Fixed
from bondgrad.structure import Sequence
from tests.helpers import needs_cuda, on_each_device, same_state

# The compiler itself uses what it calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def in_float64(x: np.ndarray):
    return np.sin(2 * x.astype(np.float64))


def train(model, step, device):
    torch.manual_seed(1)
    for x in torch.randn(3, 8, 3):
        model.zero_grad()
        step(x.to(device)).square().mean().backward()
    return [p.grad for p in model.parameters() if p.requires_grad]


@on_each_device
@pytest.mark.parametrize("estimator", [Central(), Forward(), Simultaneous(2)], ids=repr)
@pytest.mark.parametrize("fn", [ffnn([4, 16, 4]), in_float64], ids=["module", "numpy"])
def test_the_same_gradients_and_state_in_one_graph(device, fn, estimator):
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(3, 4), BlackBox(fn, 4, 4, estimator=estimator, seed=0), nn.Linear(4, 1)).to(device)
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")  # which leaves arithmetic as it is
    expected, got = train(eager, eager, device), train(model, compiled, device)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert same_state(model.state_dict(), eager.state_dict())
    assert model[1].stats[:2] == eager[1].stats[:2]


@on_each_device
def test_with_the_default_compiler(device):
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), BlackBox(ffnn([4, 16, 4]), 4, 4, seed=0), nn.Linear(4, 1))
    eager = eager.to(device)
    model = copy.deepcopy(eager)
    expected, got = train(eager, eager, device), train(model, torch.compile(model, fullgraph=True), device)
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-6) for a, b in zip(got, expected, strict=True))


@needs_cuda
@pytest.mark.parametrize("fn", [ffnn([4, 16, 4]), in_float64], ids=["module", "numpy"])
def test_the_compilers_own_cuda_graphs_leave_the_box_alone(fn):
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(3, 4), BlackBox(fn, 4, 4, seed=0), nn.Linear(4, 1)).cuda()
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    expected, got = train(eager, eager, "cuda"), train(model, compiled, "cuda")
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-6) for a, b in zip(got, expected, strict=True))
    assert model[1].stats[:2] == eager[1].stats[:2]


def test_limits_leading_shape_and_context():
    torch.manual_seed(0)
    eager = BlackBox(lambda x, c: x.sin() * c, 3, 3, limits=(-1, 1), seed=0)
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x, c = torch.randn(2, 5, 3, requires_grad=True), torch.randn(2, 5, 1)
    expected, got = (torch.autograd.grad(layer(x, c).sum(), x)[0] for layer in (eager, compiled))
    assert torch.equal(got, expected)


def test_without_a_gradient_it_is_one_call():
    model = nn.Sequential(nn.Linear(3, 4), BlackBox(torch.sin, 4, 4))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        compiled(torch.randn(8, 3))
    assert model[1].stats[:2] == (1, 8)
    assert same_state(model.state_dict(), before, but=["progress"])


def test_eval_mode_leaves_no_trace():
    model = nn.Sequential(nn.Linear(3, 4), BlackBox(torch.sin, 4, 4, seed=0)).eval()
    before = copy.deepcopy(model.state_dict())
    torch.compile(model, fullgraph=True, backend="aot_eager")(torch.randn(8, 3)).sum().backward()
    assert model[0].weight.grad.abs().min() > 0
    assert same_state(model.state_dict(), before, but=["requests"])


def test_a_width_not_told_costs_a_break_until_it_is_known():
    model = nn.Sequential(nn.Linear(3, 4), BlackBox(torch.sin, 4, policy="bond"), nn.Linear(4, 1))
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(3):
        compiled(torch.randn(8, 3)).sum().backward()
    assert model[1].stats.calls == 3 * 2

    unknown = BlackBox(torch.sin, 3, policy="bond")
    with pytest.raises(Exception, match="give out_features, or call it once"):
        torch.compile(unknown, fullgraph=True, backend="aot_eager")(torch.randn(8, 3, requires_grad=True))


def test_two_boxes_and_a_copy_are_told_apart():
    torch.manual_seed(0)
    model = nn.Sequential(BlackBox(torch.sin, 3, 3, seed=0), BlackBox(torch.exp, 3, 3, seed=1))
    both = [model, copy.deepcopy(model)]
    x = torch.randn(4, 3)
    for one in both:
        assert torch.allclose(torch.compile(one, fullgraph=True, backend="aot_eager")(x), x.sin().exp())
    assert [box.stats.calls for one in both for box in one] == [1, 1, 1, 1]


def test_the_operators_hold_to_torchs_rules():
    box = BlackBox(torch.sin, 3, 3)
    x, gy = torch.randn(4, 3), torch.randn(4, 3)
    checks = ("test_schema", "test_faketensor")  # gradients are attached around the operators
    torch.library.opcheck(torch.ops.bondgrad.evaluate, ([x], box._number, None, torch.empty(0)), test_utils=checks)
    arguments = ([x, box(x).double(), gy], box._number, None, torch.empty(0), False)
    torch.library.opcheck(torch.ops.bondgrad.differentiate, arguments, test_utils=checks)


def test_two_calls_on_the_same_input_stay_two():
    """The box may answer differently each time."""

    def noisy(x: torch.Tensor):
        return x + torch.randn_like(x)

    box = BlackBox(noisy, 3, 3, noise=1.0, policy="bond")
    x = torch.randn(4, 3, requires_grad=True)
    for backend in ("aot_eager", "inductor"):
        calls = box.stats.calls
        difference = torch.compile(lambda x: box(x) - box(x), backend=backend, fullgraph=True)(x)
        difference.square().sum().backward()
        assert difference.abs().max() > 0
        assert box.stats.calls == calls + 4


def test_transforms_inside_and_outside():
    box = BlackBox(torch.sin, 3, 3, policy=Fixed(1e-2))
    x = torch.randn(4, 3)

    def loss(x):
        return box(x).sum()

    assert torch.allclose(torch.compile(grad(loss), backend="aot_eager")(x), x.cos(), atol=1e-3)  # not in one graph
    torch.compiler.reset()
    with pytest.raises(Exception, match="transform the compiled model"):
        torch.compile(grad(loss), backend="aot_eager", fullgraph=True)(x)
    assert torch.allclose(vmap(grad(torch.compile(loss, backend="aot_eager")))(x), x.cos(), atol=1e-3)


def test_a_layer_that_is_gone():
    def made():
        layer = nn.Sequential(nn.Linear(3, 3), BlackBox(torch.sin, 3, 3))
        return torch.compile(layer, backend="aot_eager")(torch.randn(4, 3)).sum()

    loss = made()
    gc.collect()
    with pytest.raises(BoxError, match="is gone: keep the model"):
        loss.backward()


def test_export_is_refused():
    with pytest.raises(Exception, match="cannot be exported"):
        torch.export.export(BlackBox(torch.sin, 3, 3), (torch.randn(4, 3),))


def test_sequences():
    layer = BlackBox(lambda x: torch.sin(x).cumsum(1), 3, 3, structure=Sequence(), policy=Fixed(1e-5), seed=0)
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(2, 6, 3, dtype=torch.float64, requires_grad=True)
    gy = torch.randn(2, 6, 3, dtype=torch.float64)
    (g,) = torch.autograd.grad(compiled(x), x, gy)
    assert torch.allclose(g, gy.flip(1).cumsum(1).flip(1) * x.cos())


@pytest.mark.parametrize("width", [None, 3])
def test_memory_outside_of_the_graph(width):
    """The compiler works around the box, which goes on from call to call."""

    def fn(x, state):
        return (state + x).sin(), state + x

    layer = BlackBox(fn, 3, width, state=torch.zeros(1, 3).double(), policy=Fixed(1e-5), seed=0)
    compiled = torch.compile(nn.Sequential(nn.Identity(), layer))
    total = torch.zeros(4, 3).double()
    for _ in range(4):
        x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
        y = compiled(x)
        total += x.detach()
        assert torch.allclose(y, total.sin())
        assert torch.allclose(torch.autograd.grad(y.sum(), x)[0], total.cos())
