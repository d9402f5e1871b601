"""A device as an experimenter meets it."""

import math
import time
from typing import Any

import torch
from torch import Tensor

from bondgrad.calling._inputs import Limits
from bondgrad.errors import not_negative, positive_float
from bondgrad.reservoirs._reservoir import Reservoir, part
from bondgrad.torch_support._random import Generators


class Instrument(Reservoir):
    """A reservoir on a bench: voltages take time, readings are noisy, and nothing stays as it is.

    Rows are read one after the other, in their order. All that makes it difficult is off by default; then it answers as
    the reservoir does.

    Args:
        device: What is measured, such as a `QuantumDotArray`; any module of rows with `in_features`, `out_features`.
        limits: (low, high), each a number or one for each input: voltages outside are refused. None: all are taken.
        noise: Standard deviation of a reading.
        drift: By how much the voltage that arrives at each input wanders off in one second, as a standard deviation
            that grows with the root of time.
        spread: How much copies of the device differ: the standard deviation of a voltage that is added to each input of
            this one, from the beginning on. See `Farm` for several of them.
        hysteresis: How far what the device notices lags behind. A voltage that turns back has to go twice that far
            before it is noticed.
        ramp: Volts per second at which voltages change; the input with the longest way decides.
        settle: Seconds to wait after a change.
        integrate: Seconds that one reading takes.
        one_at_a_time: Refuse calls with more than one row: `evaluator=bondgrad.evaluators.Local(max_rows=1)`. A `Tile`
            of it asks for its groups one by one.
        sleep: Really take the time. Otherwise it is only counted, in `seconds`.
        seed: Of noise, drift and spread. None: drawn from torch's own random numbers.

    Example:
        >>> from bondgrad.reservoirs import QuantumDotArray
        >>> bench = Instrument(QuantumDotArray(), limits=(-3, 3), noise=0.01, ramp=10.0, settle=0.02, seed=0)
        >>> y = bench(torch.eye(10))
        >>> bench.readings, round(bench.seconds, 2)
        (10, 1.21)
    """

    voltage: Tensor  # [d] that was set last
    follows: Tensor  # [d] what the device noticed of it
    offset: Tensor  # [d] that is added to it: of this copy of the device, and by drift since

    def __init__(
        self,
        device: Any,  # noqa: ANN401
        *,
        limits: tuple[Any, Any] | None = None,
        noise: float = 0.0,
        drift: float = 0.0,
        spread: float = 0.0,
        hysteresis: float = 0.0,
        ramp: float = math.inf,
        settle: float = 0.0,
        integrate: float = 1e-3,
        one_at_a_time: bool = False,
        sleep: bool = False,
        seed: int | None = None,
    ) -> None:
        structure = part(device)
        super().__init__(device.in_features, device.out_features)
        self.device, self.structure = device, structure
        self.limits = None if limits is None else Limits(limits, self.in_features)
        self.noise, self.drift = not_negative("noise", noise), not_negative("drift", drift)
        self.spread = not_negative("spread", spread)
        self.hysteresis, self.settle = not_negative("hysteresis", hysteresis), not_negative("settle", settle)
        self.ramp = math.inf if ramp == math.inf else positive_float("ramp", ramp)
        self.integrate = positive_float("integrate", integrate)
        self.one_at_a_time, self.sleep = one_at_a_time, sleep
        self.readings, self.seconds = 0, 0.0  # since it was switched on
        self.random = Generators(seed)
        for name in ("voltage", "follows", "offset"):
            self.register_buffer(name, torch.zeros(self.in_features))
        if self.spread:
            self.offset += self.spread * self._normal(self.offset)

    def answer(self, x: Tensor) -> Tensor:
        """Voltages [N, d] -> readings [N, d_out]."""
        self._refuse(x)
        if len(x) == 0:
            return x.new_zeros(0, self.out_features)
        duration = self._duration(x.detach())  # [N]
        noticed, offset = self._arriving(x), self._drifted(duration, x)
        y: Tensor = self.device(noticed + offset)
        if self.noise:
            y = y + self.noise * self._normal(y)
        # Only now, lest a device that fails leaves half of it behind.
        for state, now in ((self.voltage, x), (self.follows, noticed), (self.offset, offset)):
            state.copy_(now[-1].detach())
        seconds = float(duration.sum())
        self.seconds += seconds
        self.readings += len(x)
        if self.sleep:
            time.sleep(seconds)
        return y

    def _refuse(self, x: Tensor) -> None:
        """What an experimenter would regret."""
        if self.one_at_a_time and len(x) > 1:
            raise ValueError(
                f"this instrument takes one reading at a time, got {len(x)} rows: give BlackBox "
                "evaluator=bondgrad.evaluators.Local(max_rows=1)"
            )
        if not bool(torch.isfinite(x).all()):
            raise ValueError("voltages must be finite: leave out rows with NaN or infinite values")
        if self.limits is not None:
            low, high = self.limits.like(x)
            if not bool(((x >= low) & (x <= high)).all()):
                raise ValueError("voltages must be within the limits of the instrument: give BlackBox the same limits")

    def _duration(self, x: Tensor) -> Tensor:
        """Seconds [N] that each reading takes."""
        way = torch.cat((self.voltage[None].to(x.dtype), x)).diff(dim=0).abs().amax(1).double()
        return way / self.ramp + self.settle * (way > 0) + self.integrate

    def _arriving(self, x: Tensor) -> Tensor:
        """Of the voltages set [N, d], what the device notices: it lags behind by the hysteresis (a play operator)."""
        if not self.hysteresis:
            return x
        low, high = x - self.hysteresis, x + self.hysteresis  # between which each row brings what was noticed before
        done = 1
        while done < len(x):  # one clamp after another is a clamp again: rows are joined two by two, four by four, ...
            last, before = slice(done, None), slice(None, -done)
            low, high = (
                torch.cat((end[:done], torch.clamp(end[before], low[last], high[last]))) for end in (low, high)
            )
            done *= 2
        return torch.clamp(self.follows.to(x.dtype, copy=True), low, high)

    def _drifted(self, duration: Tensor, x: Tensor) -> Tensor:
        """The voltages [N, d] that are added to the inputs at each reading."""
        if not self.drift:
            return self.offset.to(x.dtype).expand(x.shape)
        wander = (self.drift * duration.sqrt()[:, None]).to(x.dtype) * self._normal(x)
        return self.offset.to(x.dtype) + wander.cumsum(0)

    def _normal(self, like: Tensor) -> Tensor:
        generator = self.random.on(like.device)
        return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)

    def get_extra_state(self) -> dict[str, Any]:
        """Random numbers, readings and time, for `state_dict`."""
        return self.random.state() | {"readings": self.readings, "seconds": self.seconds}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """The counterpart of `get_extra_state`."""
        self.random.load(state)
        self.readings, self.seconds = state["readings"], state["seconds"]
