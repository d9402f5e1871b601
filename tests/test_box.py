"""The layer as a user meets it."""

import copy
import functools
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import bondgrad
from bondgrad import BlackBox, Central, Forward, Simultaneous, sign_accuracy
from bondgrad.evaluators import Local
from bondgrad.metrics import exact_vjp
from bondgrad.networks import ffnn
from bondgrad.policies import Bond, Fixed
from bondgrad.testing.boxes import TanhNetwork, Waves

ESTIMATORS = {"central": Central, "forward": Forward, "simultaneous": lambda: Simultaneous(512)}


def gradient(layer, x, gy, *context):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(layer(x, *context), x, gy)[0]


def close(g, exact, tolerance=1e-3):
    return float((g - exact).norm() / exact.norm()) < tolerance


def test_what_a_user_writes():
    read_in, read_out = nn.Linear(8, 4), nn.Linear(6, 1)
    box = BlackBox(TanhNetwork(4, 16, 6), in_features=4)
    model = nn.Sequential(read_in, box, read_out)
    nn.functional.mse_loss(model(torch.randn(32, 8)), torch.randn(32, 1)).backward()
    assert read_in.weight.grad.abs().min() > 0
    assert box.stats.evaluations == 32 + 32 * 8


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


@pytest.mark.parametrize("lead", [(), (1,), (7,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("estimator", ["central", "forward"])
def test_any_leading_shape(lead, estimator):
    exact = TanhNetwork(4, 16, 6)
    layer = BlackBox(exact, 4, estimator=estimator, policy=Fixed(1e-3))
    x, gy = torch.randn(*lead, 4), torch.randn(*lead, 6)
    assert layer(x).shape == (*lead, 6)
    g = gradient(layer, x, gy)
    assert g.shape == x.shape
    assert close(g.view(-1, 4), exact.vjp(x.view(-1, 4), gy.view(-1, 6)), 1e-2)


@pytest.mark.parametrize("make", [lambda x: x.T.contiguous().T, lambda x: x[:, ::2], lambda x: x[:1].expand(5, -1)])
def test_strided_input(make):
    x = make(torch.randn(5, 8))
    exact = Waves(x.shape[1], 3)
    gy = torch.randn(5, 3)
    assert close(gradient(BlackBox(exact, x.shape[1], policy=Fixed(1e-2)), x, gy), exact.vjp(x, gy))


# ---- numpy, torch, modules


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


def test_a_box_used_twice_in_one_graph():
    net = ffnn([4, 20, 4])
    layer = BlackBox(net, 4, policy=Fixed(1e-2))
    x, gy = torch.randn(9, 4), torch.randn(9, 4)
    assert close(gradient(lambda x: layer(layer(x)), x, gy), exact_vjp(lambda x: net(net(x)), x, gy))


def test_retained_graphs_give_a_gradient_each_time():
    exact = Waves(3, 3)
    layer = BlackBox(exact, 3, policy=Fixed(1e-2))
    x = torch.randn(5, 3, requires_grad=True)
    y = layer(x)
    for gy in torch.randn(2, 5, 3):
        (g,) = torch.autograd.grad(y, x, gy, retain_graph=True)
        assert close(g, exact.vjp(x.detach(), gy))


@pytest.mark.parametrize("loss", [lambda y: y.sum(), lambda y: y.square().sum()], ids=["linear", "square"])
def test_second_derivatives_are_refused(loss):
    x = torch.randn(5, 3, requires_grad=True)
    (g,) = torch.autograd.grad(loss(BlackBox(torch.sin, 3)(x)), x, create_graph=True)
    assert close(g.detach(), exact_vjp(torch.sin, x.detach(), torch.autograd.grad(loss(s := x.sin()), s)[0]), 0.1)
    with pytest.raises(bondgrad.BoxError, match="second derivatives through a BlackBox are not estimated"):
        (g.sum() + x.sum()).backward()


# ---- when nothing is to be estimated


@pytest.mark.parametrize("situation", ["no_grad", "inference_mode", "detached", "eval"])
def test_one_call_and_no_trace(situation):
    layer = BlackBox(Waves(3, 2), 3, seed=0)
    before = copy.deepcopy(layer.state_dict())
    x = torch.randn(5, 3, requires_grad=situation != "detached")
    if situation == "eval":
        layer.eval()
        y = layer(x)
    elif situation == "detached":
        y = layer(x)
    else:
        with getattr(torch, situation)():
            y = layer(x)
    assert y.shape == (5, 2)
    assert (layer.stats.calls, layer.stats.evaluations) == (1, 5)
    assert same_state(layer.state_dict(), before)


def test_gradients_in_eval_mode_leave_no_trace():
    exact = Waves(3, 2)
    layer = BlackBox(exact, 3, seed=0)
    x, gy = torch.randn(5, 3), torch.randn(5, 2)
    gradient(layer, x, gy)
    before = copy.deepcopy(layer.state_dict())
    layer.eval()
    g = gradient(layer, x, gy)
    assert close(g, exact.vjp(x, gy), 1e-2)
    assert torch.equal(g, gradient(layer, x, gy))
    assert same_state(layer.state_dict(), before)


def test_a_frozen_read_in_costs_nothing():
    layer = BlackBox(Waves(3, 2), 3)
    out = nn.Linear(2, 1)
    out(layer(torch.randn(5, 3))).sum().backward()
    assert layer.stats.calls == 1


# ---- precision


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
    before = layer.policy_sums.clone()
    convert(layer)
    assert torch.equal(layer.policy_sums, before)
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
    assert layer.policy_sums.dtype == torch.float32
    assert torch.allclose(layer.policy_sums[1], torch.ones(2, 3))


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
        return [*results, layer.policy_sums, torch.tensor(layer.stats.failures)]

    free = run()
    monkeypatch.setattr("bondgrad.box.look_is_free", lambda device: False)
    monkeypatch.setattr("bondgrad.policies._bond.look_is_free", lambda device: False)
    assert all(torch.equal(a, b) for a, b in zip(free, run(), strict=True))


def test_where_a_look_is_not_free_the_warning_waits_for_stats(monkeypatch):
    monkeypatch.setattr("bondgrad.box.look_is_free", lambda device: False)
    layer = BlackBox(torch.sqrt, 1, policy=Fixed(0.01))
    gradient(layer, torch.tensor([[0.005]]), torch.ones(1, 1))
    with pytest.warns(UserWarning, match="1 perturbed rows came back non-finite"):
        assert layer.stats.failures == 1


def test_a_step_is_never_lost_in_rounding():
    layer = BlackBox(lambda x: 2 * x, 2, policy=Fixed(1e-12))
    x = torch.tensor([[1e6, 3.0]])
    assert torch.equal(gradient(layer, x, torch.ones(1, 2)), torch.tensor([[2.0, 2.0]]))


# ---- state


def same_state(a, b):
    def equal(u, v):
        if isinstance(u, torch.Tensor):
            return torch.equal(u, v)
        return u.keys() == v.keys() and all(equal(u[k], v[k]) for k in u) if isinstance(u, dict) else u == v

    return equal(dict(a), dict(b))


def by_state_dict(layer):
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = BlackBox(layer.fn, 3, seed=99)
    other.load_state_dict(torch.load(file, weights_only=True))
    return other


@pytest.mark.parametrize("copied", [by_state_dict, copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_goes_on_bit_for_bit(copied):
    layer = BlackBox(Waves(3, 2), 3, seed=5)
    data = torch.randn(6, 5, 3)
    gy = torch.randn(5, 2)
    for x in data[:3]:
        gradient(layer, x, gy)
    other = copied(layer)
    for x in data[3:]:
        assert torch.equal(gradient(layer, x, gy), gradient(other, x, gy))


def test_torchs_seed_decides_where_none_is_given():
    def first_gradient():
        torch.manual_seed(3)
        layer = BlackBox(Waves(3, 2), 3)
        return gradient(layer, torch.ones(5, 3), torch.ones(5, 2))

    assert torch.equal(first_gradient(), first_gradient())


def test_a_checkpoint_from_another_device_can_be_loaded():
    layer = BlackBox(torch.sin, 3, seed=1)
    state = layer.state_dict()
    elsewhere = {"cuda:7": torch.zeros(16, dtype=torch.uint8)}
    layer.load_state_dict(state | {"_extra_state": {"seed": 1, "devices": elsewhere}})
    gradient(layer, torch.randn(4, 3), torch.ones(4, 3))
    assert set(layer.state_dict()["_extra_state"]["devices"]) == {"cpu", "cuda:7"}


def test_made_on_the_meta_device_and_filled_later():
    with torch.device("meta"):
        layer = BlackBox(torch.sin, 3)
    source = BlackBox(torch.sin, 3, seed=4)
    layer.to_empty(device="cpu").load_state_dict(source.state_dict())
    x, gy = torch.randn(4, 3), torch.ones(4, 3)
    assert torch.equal(gradient(layer, x, gy), gradient(source, x, gy))


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
    assert torch.equal(layers[0].policy_sums, layers[1].policy_sums)


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
    assert stats.calls == 1 + 5  # ten rows hold one row's six points, so five requests
    assert stats.seconds > 0
    assert stats.step.tolist() == stats.lower.tolist() == stats.upper.tolist() == [0.25] * 3


@pytest.mark.parametrize("estimator", [Central(), Forward(), Simultaneous(3)])
def test_evaluations_are_what_the_estimator_says(estimator):
    layer = BlackBox(Waves(4, 2), 4, estimator=estimator)
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
    assert "Fixed(0.1)" in text
    assert "Central" in text
