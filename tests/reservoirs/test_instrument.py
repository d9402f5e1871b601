"""A device on a bench: time, noise, drift, hysteresis, refusals."""

import copy

import pytest
import torch
from torch import Tensor

from bondgrad import BlackBox
from bondgrad.evaluators import Local
from bondgrad.reservoirs import Instrument, QuantumDotArray, Tile
from bondgrad.reservoirs._reservoir import Reservoir
from tests.helpers import gradient


class Wires(Reservoir):
    """What arrives is what is read."""

    def __init__(self, n: int = 2) -> None:
        super().__init__(n, n)

    def answer(self, x: Tensor) -> Tensor:
        return x.clone()


def volts(n, d=2, seed=0):
    return torch.rand(n, d, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def test_by_default_it_is_the_device():
    device, x = QuantumDotArray(), volts(20, 10)
    assert torch.equal(Instrument(device)(x), device(x))


def test_time_is_counted():
    bench = Instrument(Wires(), ramp=2.0, settle=0.1, integrate=0.01)
    bench(torch.tensor([[1.0, 0.5], [1.0, 0.5], [0.0, 0.5]]))  # ways of 1, 0 and 1 V
    assert bench.seconds == pytest.approx(1 / 2 + 0.1 + 1 / 2 + 0.1 + 3 * 0.01)
    bench(torch.tensor([[0.0, 0.5]]))  # where it is already
    assert bench.seconds == pytest.approx(1.23 + 0.01)
    assert bench.readings == 4


def test_noise():
    error = Instrument(Wires(), noise=0.1, seed=0)(volts(20_000)) - volts(20_000)
    assert float(error.std()) == pytest.approx(0.1, rel=0.02)
    assert abs(float(error.mean())) < 0.003


def test_drift_grows_with_the_root_of_time():
    def wandered(n, integrate, seed):
        bench = Instrument(Wires(500), drift=0.3, integrate=integrate, seed=seed)
        return float((bench(torch.zeros(n, 500))[-1]).std())

    assert wandered(4, 1.0, 0) == pytest.approx(0.3 * 2, rel=0.15)
    assert wandered(400, 1.0, 1) == pytest.approx(0.3 * 20, rel=0.15)
    assert wandered(400, 0.01, 2) == pytest.approx(0.3 * 2, rel=0.15)


def test_drift_goes_on_from_call_to_call():
    """As in one call, with the same random numbers."""
    whole, parts = (Instrument(Wires(), drift=0.3, integrate=1.0, seed=0) for _ in range(2))
    expected = whole(torch.zeros(100, 2))
    assert torch.allclose(torch.cat([parts(torch.zeros(n, 2)) for n in (40, 60)]), expected, atol=1e-5)


def test_hysteresis_as_row_after_row():
    """Against the definition of a play operator, one reading at a time."""
    bench, x = Instrument(Wires(), hysteresis=0.3), volts(50)
    y, now = torch.cat((bench(x[:13]), bench(x[13:]))), torch.zeros(2)
    for row, read in zip(x, y, strict=True):
        now = torch.minimum(torch.maximum(now, row - 0.3), row + 0.3)
        assert torch.allclose(read, now)


def test_hysteresis_is_a_loop():
    up = torch.linspace(-1, 1, 21)[:, None].expand(-1, 2)
    bench = Instrument(Wires(), hysteresis=0.1)
    bench(up[:1])
    forth, back = bench(up), bench(up.flip(0)).flip(0)
    assert torch.allclose((back - forth)[5:-5], torch.tensor(0.2), atol=1e-6)


def test_what_it_remembers_has_no_gradient():
    bench = Instrument(Wires(), noise=0.1, drift=0.1, hysteresis=0.1, ramp=1.0, seed=0)
    x = volts(5).requires_grad_()
    bench(x).sum().backward()
    assert torch.isfinite(x.grad).all()
    assert not any(buffer.requires_grad for buffer in bench.buffers())


def test_it_refuses_what_would_harm_it():
    bench = Instrument(Wires(), limits=(-1, 1))
    with pytest.raises(
        ValueError, match="voltages must be within the limits of the instrument: give BlackBox the same"
    ):
        bench(torch.tensor([[0.0, 1.1]]))
    each = Instrument(Wires(), limits=([-1, -2], [1, 2]))
    each(torch.tensor([[0.0, 1.1]]))
    with pytest.raises(ValueError, match="voltages must be within"):
        each(torch.tensor([[1.1, 0.0]]))
    with pytest.raises(ValueError, match="voltages must be finite"):
        Instrument(Wires())(torch.tensor([[0.0, float("nan")]]))
    assert bench.readings == 0


def test_a_device_that_fails_leaves_it_as_it_was():
    class Fuse(Wires):
        def answer(self, x):
            raise RuntimeError("burnt")

    bench = Instrument(Fuse(), drift=0.1, hysteresis=0.1, ramp=1.0, seed=0)
    before = [buffer.clone() for buffer in bench.buffers()]
    with pytest.raises(RuntimeError, match="burnt"):
        bench(volts(5))
    assert all(torch.equal(a, b) for a, b in zip(before, bench.buffers(), strict=True))
    assert bench.readings == bench.seconds == 0


def test_one_reading_at_a_time():
    bench = Instrument(QuantumDotArray(), one_at_a_time=True, limits=(-3.0, 3.0))
    with pytest.raises(ValueError, match=r"one reading at a time, got 2 rows: .*max_rows=1"):
        bench(torch.zeros(2, 10))
    layer = BlackBox(bench, 10, limits=(-3.0, 3.0), policy="bond", evaluator=Local(max_rows=1))
    gradient(layer, 4 * volts(3, 10), torch.ones(3, 2))
    assert bench.readings == layer.stats.evaluations == 3 * 21


def test_a_tile_of_it_asks_one_by_one():
    bench = Instrument(QuantumDotArray(), one_at_a_time=True)
    layer = BlackBox(Tile(bench, 3), 30, policy="bond", evaluator=Local(max_rows=1))
    gradient(layer, volts(2, 30), torch.ones(2, 6))
    assert bench.readings == 3 * layer.stats.evaluations


def test_it_can_really_take_its_time():
    import time

    bench = Instrument(Wires(), settle=0.05, sleep=True)
    begun = time.perf_counter()
    bench(volts(2))
    assert time.perf_counter() - begun >= bench.seconds > 0.1


def test_resumed_it_goes_on_as_it_would_have():
    def make(seed):
        return Instrument(Tile(QuantumDotArray(), 1), noise=0.01, drift=0.01, hysteresis=0.1, ramp=5.0, seed=seed)

    bench, x = make(0), volts(5, 10)
    bench(x)
    state = copy.deepcopy(bench.state_dict())
    expected = bench(x)
    other = make(1)
    other.load_state_dict(state)
    assert torch.equal(other(x), expected)
    assert other.readings == bench.readings
    assert other.seconds == bench.seconds


@pytest.mark.parametrize(
    "wrong",
    [
        {"noise": -1.0},
        {"noise": "much"},
        {"drift": float("nan")},
        {"hysteresis": float("inf")},
        {"ramp": 0.0},
        {"ramp": None},
        {"integrate": 0.0},
        {"integrate": float("inf")},
        {"limits": 3},
        {"limits": (3, -3)},
    ],
    ids=str,
)
def test_wrong_arguments(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must "):
        Instrument(Wires(), **wrong)
