"""horizon="auto": how long a box of sequences remembers."""

import copy

import pytest
import torch

from bondgrad import BlackBox
from bondgrad.structure import Sequence
from bondgrad.structure.discovery._tracker import AutoHorizon
from tests.helpers import close, gradient
from tests.structure.discovery.test_dependencies import batch_of
from tests.structure.test_sequence import Echo, layer_of, problem


@pytest.mark.parametrize("radius", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("noise", [None, 1e-4])
def test_measured_horizon(radius, noise):
    box = Echo(radius=radius)
    generator = torch.Generator().manual_seed(0)

    def fn(x):
        y = box(x)
        return y if noise is None else y + noise * torch.randn(y.shape, dtype=y.dtype, generator=generator)

    x, gy = problem(n=8, time=60)
    layer = layer_of(fn, "auto", noise=noise, policy="bond")
    gradient(layer, x, gy)
    assert 1 < layer.structure.horizon < 60
    exact = box.vjp(x, gy)
    assert close(gradient(layer_of(box, layer.structure.horizon), x, gy), exact, 0.02 if noise is None else 0.05)
    if noise is None:
        assert not close(gradient(layer_of(box, layer.structure.horizon // 2), x, gy), exact, 0.02)


def test_memory_that_does_not_fade():
    layer = layer_of(lambda x: torch.sin(x).cumsum(1), "auto")
    x = torch.randn(2, 30, 3).double()
    gradient(layer, x, torch.randn(2, 30, 3).double())
    assert layer.structure.horizon is None


def test_the_measured_horizon_follows_the_box():
    box = Echo(radius=0.3)
    layer = layer_of(box, "auto")
    x, gy = problem(n=8, time=40)
    gradient(layer, x, gy)
    short = layer.structure.horizon
    box.w = box.w * 3
    while layer.structure.horizon == short:
        gradient(layer, x, gy)
        assert layer.stats.evaluations < 60_000, "the change was not noticed"
    assert layer.structure.horizon > short
    state = copy.deepcopy(layer.state_dict())
    fresh = layer_of(box, "auto")
    fresh.load_state_dict(state)
    assert fresh.structure.horizon == layer.structure.horizon
    assert torch.equal(gradient(fresh, x, gy), gradient(layer, x, gy))


@pytest.mark.parametrize("times", [(1, 30), (4, 30), (30, 2), (2, 30, 2)])
def test_short_sequences_say_nothing_of_long_ones(times):
    layer = layer_of(lambda x: torch.sin(x).cumsum(1), "auto")
    for i in range(60):
        x = torch.randn(2, times[i % len(times)], 3).double()
        gy = torch.randn(x.shape).double()
        assert close(gradient(layer, x, gy), gy.flip(1).cumsum(1).flip(1) * x.cos(), 1e-6)


def test_nothing_seen_is_nothing_known():
    """A first batch to which the box does not react, or which it does not answer."""
    failing = [True]

    def fn(x):
        y = torch.relu(x).cumsum(1)
        return torch.full_like(y, torch.nan) if failing[0] and len(x) > 2 else y

    layer = layer_of(fn, "auto")
    gy = torch.randn(2, 20, 3).double()
    with pytest.warns(UserWarning, match="no finite output"):
        gradient(layer, torch.ones(2, 20, 3).double(), gy)
    failing[0] = False
    gradient(layer, -torch.ones(2, 20, 3).double(), gy)
    x = torch.randn(2, 20, 3).double()
    for _ in range(3):
        assert close(gradient(layer, x, gy), gy.flip(1).cumsum(1).flip(1) * (x > 0), 1e-6)


def test_sequences_of_changing_length():
    box = Echo(radius=0.5)
    layer = layer_of(box, "auto")
    for time in (20, 1, 35):
        x, gy = problem(time=time)
        assert close(gradient(layer, x, gy), box.vjp(x, gy), 0.02)


@pytest.mark.parametrize("noise", [1e-3, 1e-2, 3e-2])
def test_memory_that_disappears_in_the_noise(noise):
    """It is taken to decay on as it did."""
    generator = torch.Generator().manual_seed(0)

    def fn(x):
        s, states = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            s = 0.6 * s + torch.sin(x[:, t])
            states.append(s)
        y = torch.stack(states, 1)
        return y + noise * torch.randn(y.shape, dtype=y.dtype, generator=generator)

    horizons = []
    for seed in range(5):
        layer = BlackBox(fn, 2, policy="bond", structure=Sequence("auto"), noise=noise, seed=seed)
        x = torch.randn(4, 40, 2).double()
        for _ in range(20):
            gradient(layer, x, torch.randn(4, 40, 2).double())
        horizons.append(layer.structure.horizon)
    assert min(horizons) >= 9  # a hundredth is left by then
    assert max(horizons) <= 20


def test_an_echo_that_comes_late():
    def fn(x):
        return x + torch.nn.functional.pad(x, (0, 0, 12, 0))[:, : x.shape[1]] ** 2

    layer = layer_of(fn, "auto")
    gy = torch.randn(4, 40, 3).double()
    gradient(layer, torch.randn(4, 10, 3).double(), gy[:, :10])
    assert layer.structure.horizon == 1
    for _ in range(3):  # longer sequences: nothing is known of what comes later in them
        x = torch.randn(4, 40, 3).double()
        late = torch.nn.functional.pad(gy[:, 12:], (0, 0, 0, 12))
        assert close(gradient(layer, x, gy), gy + 2 * x * late, 1e-6)
    assert layer.structure.horizon == 13


@pytest.mark.parametrize(
    ("known", "time", "measured", "after"),
    [
        ((), 20, 0, ()),
        ((), 20, 5, (5, 5, 20)),
        ((), 20, 20, (None, 20, 20)),  # it did not forget
        ((5, 5, 20), 20, 0, (5, 5, 20)),
        ((5, 5, 20), 20, 6, (6, 6, 20)),
        ((5, 5, 20), 20, 20, (None, 20, 20)),
        ((5, 5, 20), 20, 3, (5, 3, 20)),  # once is not enough
        ((5, 3, 20), 20, 2, (3, 2, 20)),
        ((5, 4, 20), 20, 4, (5, 4, 20)),  # and a little shorter is not worth a change
        ((8, 6, 20), 20, 6, (8, 6, 20)),  # nor is three quarters
        ((5, 5, 20), 4, 4, (5, 5, 20)),  # too short a sequence
        ((5, 5, 20), 10, 7, (7, 7, 20)),
        ((5, 5, 20), 30, 4, (4, 4, 30)),  # a longer one says more
        ((None, 20, 20), 20, 14, (None, 14, 20)),
        ((None, 14, 20), 20, 13, (14, 13, 20)),
    ],
)
def test_how_a_horizon_follows_what_is_measured(known, time, measured, after):
    def echo(points):  # of so many time steps
        x = points.unflatten(-1, (time, 2))[..., 0]
        late = torch.nn.functional.pad(x, (max(0, measured - 1), 0))[..., :time]
        return (x + late) * (measured > 0)

    names = ("horizon", "last", "time")
    before, expected = (dict(zip(names, values, strict=False)) for values in (known, after))
    batch = batch_of(echo, torch.ones(1, 2 * time), features=2)
    assert AutoHorizon().search(before, batch, 0, torch.Generator()) == expected
