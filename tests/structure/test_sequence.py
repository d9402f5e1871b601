"""Boxes of sequences: the Jacobian is causal, and memory may fade."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from bondgrad import BlackBox, Central, Forward, Simultaneous
from bondgrad.evaluators import Local
from bondgrad.policies import Fixed
from bondgrad.structure import Sequence
from tests.helpers import close, gradient, on_each_device


class Echo:
    """s_t = tanh(W s_{t-1} + V x_t), y_t = U s_t. With a state it can start anywhere."""

    def __init__(self, d=3, hidden=12, d_out=2, radius=0.5, seed=0):
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)  # noqa: E731
        w = draw(hidden, hidden)
        self.w = radius * w / torch.linalg.eigvals(w).abs().max()
        self.v, self.u = draw(hidden, d) / d**0.5, draw(d_out, hidden) / hidden**0.5
        self.hidden, self.time_steps = hidden, 0

    def run(self, x, state):
        w, v, u = (t.to(x) for t in (self.w, self.v, self.u))
        states = []
        for t in range(x.shape[1]):
            state = torch.tanh(state @ w.T + x[:, t] @ v.T)
            states.append(state)
        self.time_steps += x.shape[0] * x.shape[1]
        return torch.stack(states, 1) @ u.T, state

    def __call__(self, x: torch.Tensor, state=None):
        y, after = self.run(x, x.new_zeros(len(x), self.hidden) if state is None else state)
        return y if state is None else (y, after)

    def vjp(self, x, gy, state=None):
        state = x.new_zeros(len(x), self.hidden) if state is None else state
        at = x.clone().requires_grad_()
        return torch.autograd.grad(self.run(at, state)[0], at, gy)[0]


def problem(n=4, time=10, dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    draw = lambda width: torch.randn(n, time, width, dtype=torch.float64, generator=generator).to(dtype)  # noqa: E731
    return draw(3), draw(2)


def layer_of(box, horizon=None, state=None, **settings):
    settings = {"policy": Fixed(1e-5), "seed": 0} | settings
    return BlackBox(box, 3, structure=Sequence(horizon), state=state, **settings)


@pytest.mark.parametrize("time", [1, 2, 9, 10, 17])
@pytest.mark.parametrize("horizon", [None, 20])
@pytest.mark.parametrize("resumed", [False, True])
def test_exact(time, horizon, resumed):
    box = Echo(radius=1.0)
    x, gy = problem(time=time)
    layer = layer_of(box, horizon, torch.zeros(1, 12).double() if resumed else None)
    assert close(gradient(layer, x, gy), box.vjp(x, gy), 1e-7)


@pytest.mark.parametrize("time", [7, 8, 20])
@pytest.mark.parametrize("horizon", [1, 3, 4, 7])
def test_a_horizon_is_exact_for_a_box_that_forgets(time, horizon):
    """A moving sum over so many time steps, of a nonlinear function."""

    def fn(x):
        padded = torch.nn.functional.pad(torch.sin(x).sum(2), (horizon - 1, 0))
        return padded.unfold(1, horizon, 1).sum(2, keepdim=True)

    x = torch.randn(3, time, 3, dtype=torch.float64)
    gy = torch.randn(3, time, 1, dtype=torch.float64)
    at = x.clone().requires_grad_()
    (exact,) = torch.autograd.grad(fn(at), at, gy)
    layer = layer_of(fn, horizon)
    assert close(gradient(layer, x, gy), exact, 1e-8)
    assert layer.stats.evaluations == 3 * (1 + 2 * 3 * min(horizon, time))
    if horizon > 1:
        assert not close(gradient(layer_of(fn, horizon - 1), x, gy), exact, 0.05)


def test_fading_memory():
    box = Echo(radius=0.5)
    x, gy = problem(time=40)
    exact = box.vjp(x, gy)
    errors = [float((gradient(layer_of(box, h), x, gy) - exact).norm() / exact.norm()) for h in (1, 4, 8, 16)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.1
    assert errors[-1] < 1e-4


@pytest.mark.parametrize("horizon", [None, 1, 3, 8, "auto"])
@pytest.mark.parametrize("estimator", [Central(), Forward(), Simultaneous(2), Central(normalize_rows=True)])
def test_starting_in_the_middle_changes_the_cost_only(horizon, estimator):
    plain, resumable = Echo(), Echo()
    x, gy = problem(time=24)
    layers = [
        layer_of(plain, horizon, estimator=estimator),
        layer_of(resumable, horizon, torch.zeros(1, 12).double(), estimator=estimator),
    ]
    for _ in range(2):
        a, b = (gradient(layer, x, gy) for layer in layers)
        assert close(b, a, 1e-8)
        layers[1].reset()
    if horizon is None and not estimator.together:
        # Eight pieces of three time steps: 24 + 21 + ... + 3 instead of 8 x 24, and the forward pass.
        moves = 4 * 3 * 3 * estimator.evaluations(1)
        assert resumable.time_steps == 2 * (4 * 24 + moves * 108)
        assert plain.time_steps == 2 * (4 * 24 + moves * 192)


def test_rows_are_time_steps_where_they_are_normalized():
    x, gy = problem()
    g = gradient(layer_of(Echo(), estimator=Central(normalize_rows=True)), x, gy)
    assert torch.allclose(g.norm(dim=2), torch.ones(4, 10).double())


def test_a_stream_of_sequences():
    """A long sequence in two halves is the long sequence."""
    box = Echo(radius=0.9)
    x, gy = problem(time=20)
    layer = layer_of(box, state=torch.zeros(1, 12).double())
    first = layer(x[:, :10])
    assert torch.allclose(first, box(x)[:, :10])
    _, state = box.run(x[:, :10], torch.zeros(4, 12).double())
    assert close(gradient(layer, x[:, 10:], gy[:, 10:]), box.vjp(x[:, 10:], gy[:, 10:], state), 1e-7)


@pytest.mark.parametrize("width", [1, 3])
def test_time_first(width):
    def fn(x):
        return x.sin().cumsum(1)

    x = torch.randn(5, 4, width, dtype=torch.float64).transpose(0, 1)
    gy = torch.randn(4, 5, width, dtype=torch.float64)
    layer = BlackBox(fn, width, structure=Sequence("auto"), policy=Fixed(1e-5), seed=0)
    for _ in range(2):
        assert close(gradient(layer, x, gy), gy.flip(1).cumsum(1).flip(1) * x.cos(), 1e-7)


def test_contexts_in_time():
    """They cannot be told from others, so the forward pass is not cut where there are any."""

    def fn(x, state, gain):
        y = (gain * x.sin()).cumsum(1) + state[:, None]
        return y, y[:, -1]

    x, gain = torch.randn(2, 16, 3, dtype=torch.float64), torch.rand(2, 16, 1, dtype=torch.float64)
    gy = torch.randn(2, 16, 3, dtype=torch.float64)
    layer = layer_of(fn, state=torch.zeros(1, 3).double())
    assert close(gradient(layer, x, gy, gain), gain * gy.flip(1).cumsum(1).flip(1) * x.cos(), 1e-7)


def test_a_batch_read_as_time():
    box = Echo()
    x, gy = problem(n=1)
    layer = layer_of(box)
    g = gradient(layer, x[0], gy[0])
    assert g.shape == (10, 3)
    assert close(g, box.vjp(x, gy)[0], 1e-7)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3), (1, 1, 2)])
def test_shapes(lead):
    box = Echo()
    seen = []
    layer = layer_of(box)
    layer.register_step_hook(lambda _, step: seen.append(step))
    x = torch.randn(*lead, 5, 3, dtype=torch.float64)
    gy = torch.randn(*lead, 5, 2, dtype=torch.float64)
    g = gradient(layer, x, gy)
    flat = gradient(layer_of(box), x.reshape(-1, 5, 3), gy.reshape(-1, 5, 2))
    assert torch.allclose(g, flat.view_as(x))
    assert seen[0].x.shape == seen[0].g.shape == flat.shape
    with pytest.raises(ValueError, match="time, in_features=3"):
        layer(torch.randn(3).double())


def test_limits_context_and_half_precision():
    def fn(x, gain):
        assert x.abs().max() <= 0.5
        return (gain[:, None, None] * x).cumsum(1)

    layer = BlackBox(fn, 3, structure=Sequence(), limits=(-0.5, [0.5, 0.4, 0.3]), policy=Fixed(1e-2), seed=0)
    x, gain, gy = torch.randn(2, 6, 3), torch.tensor([1.0, 3.0]), torch.randn(2, 6, 3)
    exact = gain[:, None, None] * gy.flip(1).cumsum(1).flip(1)
    assert close(gradient(layer, x, gy, gain), exact, 1e-3)
    assert close(gradient(layer, x.half(), gy.half(), gain).float(), exact, 1e-2)


@pytest.mark.parametrize("max_rows", [1, 5])
def test_portions(max_rows):
    box = Echo()
    x, gy = problem()
    a, b = (gradient(layer_of(box, 4, evaluator=Local(max_rows=n)), x, gy) for n in (None, max_rows))
    assert close(a, b, 1e-8)


def test_a_sequence_that_fails_costs_its_own_time_steps():
    def fn(x):
        y = x.cumsum(1)
        return torch.where((x[:, 3:4] != 1.0).any(2, keepdim=True), torch.nan, y)  # moved at time step 3

    x, gy = torch.ones(1, 6, 2).double(), torch.ones(1, 6, 2).double()
    layer = BlackBox(fn, 2, structure=Sequence(), policy=Fixed(1e-3), seed=0)
    with pytest.warns(UserWarning, match="no finite output"):
        g = gradient(layer, x, gy)
    expected = torch.arange(6, 0, -1).double()[None, :, None].expand(1, 6, 2).clone()
    expected[:, 3] = 0
    assert torch.allclose(g, expected)


@pytest.mark.parametrize("horizon", ["4", 0, -1, 1.5, True])
def test_horizons_that_are_none(horizon):
    with pytest.raises(ValueError, match="horizon"):
        Sequence(horizon)


# ---- with the rest of PyTorch


def test_checkpointing():
    box = Echo()
    x, gy = problem()
    layer = layer_of(box, state=torch.zeros(1, 12).double())
    at = x.clone().requires_grad_()
    y = checkpoint(layer, at, use_reentrant=False)
    assert close(torch.autograd.grad(y, at, gy)[0], box.vjp(x, gy), 1e-7)


def test_transforms():
    box = Echo()
    x, gy = problem()
    layer = layer_of(box)
    per_sample = torch.func.vmap(torch.func.grad(lambda x, gy: (layer(x) * gy).sum()))(x, gy)
    assert close(per_sample, box.vjp(x, gy), 1e-7)


@on_each_device
@pytest.mark.parametrize("horizon", [None, 4, "auto"])
def test_on_each_device(device, horizon):
    box = Echo()
    x, gy = (t.to(device) for t in problem(time=30))
    layer = layer_of(box, horizon, torch.zeros(1, 12).double()).to(device)
    assert close(gradient(layer, x, gy), box.vjp(x, gy), {None: 1e-7, 4: 0.1, "auto": 0.01}[horizon])
