"""A device as an experimenter meets it."""

import math
import time
from typing import Any

import torch
from torch import Tensor

from bondgrad._random import Generators
from bondgrad.reservoirs._reservoir import Reservoir


class Instrument(Reservoir):
    """A reservoir on a bench: voltages take time, readings are noisy, and nothing stays as it is.

    Rows are read one after the other, in their order. All that makes it difficult is off by default; then it answers as
    the reservoir does.

    Args:
        device: What is measured, such as a `QuantumDotArray`.
        limits: (low, high): voltages outside are refused. None: all are taken.
        noise: Standard deviation of a reading.
        drift: By how much the voltage that arrives at each input wanders off in one second, as a standard deviation
            that grows with the root of time.
        hysteresis: How far a voltage must turn back before the device notices.
        ramp: Volts per second at which voltages change; the input with the longest way decides.
        settle: Seconds to wait after a change.
        integrate: Seconds that one reading takes.
        one_at_a_time: Refuse calls with more than one row: `evaluator=bondgrad.evaluators.Local(max_rows=1)`.
        sleep: Really take the time. Otherwise it is only counted, in `seconds`.
        seed: Of noise and drift. None: drawn from torch's own random numbers.

    Example:
        >>> from bondgrad.reservoirs import QuantumDotArray
        >>> bench = Instrument(QuantumDotArray(), limits=(-3, 3), noise=0.01, ramp=10.0, settle=0.02, seed=0)
        >>> y = bench(torch.eye(10))
        >>> bench.readings, round(float(bench.seconds), 2)
        (10, 1.21)
    """

    seconds: Tensor  # since it was switched on, float64
    voltage: Tensor  # [d] that was set last
    follows: Tensor  # [d] what the device noticed of it
    offset: Tensor  # [d] how far it has drifted

    def __init__(
        self,
        device: Reservoir,
        *,
        limits: tuple[float, float] | None = None,
        noise: float = 0.0,
        drift: float = 0.0,
        hysteresis: float = 0.0,
        ramp: float = math.inf,
        settle: float = 0.0,
        integrate: float = 1e-3,
        one_at_a_time: bool = False,
        sleep: bool = False,
        seed: int | None = None,
    ) -> None:
        super().__init__(device.in_features, device.out_features)
        for name, value in (("noise", noise), ("drift", drift), ("hysteresis", hysteresis), ("settle", settle)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be zero or a positive number, got {value!r}")
        if not (ramp > 0 and integrate > 0):
            raise ValueError(f"ramp and integrate must be positive, got {ramp!r} and {integrate!r}")
        self.device, self.limits = device, limits
        self.noise, self.drift, self.hysteresis = noise, drift, hysteresis
        self.ramp, self.settle, self.integrate = ramp, settle, integrate
        self.one_at_a_time, self.sleep = one_at_a_time, sleep
        self.readings = 0
        self.random = Generators(seed)
        self.register_buffer("seconds", torch.zeros((), dtype=torch.float64))
        for name in ("voltage", "follows", "offset"):
            self.register_buffer(name, torch.zeros(self.in_features))

    @property
    def structure(self) -> Any:  # type: ignore[override]  # noqa: ANN401
        """That of the device."""
        return self.device.structure

    def forward(self, x: Tensor) -> Tensor:
        """Voltages [N, d] -> readings [N, d_out]."""
        if self.one_at_a_time and len(x) > 1:
            raise ValueError(
                f"this instrument takes one reading at a time, got {len(x)} rows: give BlackBox "
                "evaluator=bondgrad.evaluators.Local(max_rows=1)"
            )
        if self.limits is not None and not bool(((x >= self.limits[0]) & (x <= self.limits[1])).all()):
            raise ValueError(f"voltages must be within {self.limits}: give BlackBox limits={self.limits}")
        if len(x) == 0:
            return x.new_zeros(0, self.out_features)
        duration = self._duration(x.detach())  # [N]
        y: Tensor = self.device(self._arriving(x) + self._drifted(duration, x))
        if self.noise:
            y = y + self.noise * self._normal(y)
        self.voltage.copy_(x[-1].detach())
        self.seconds += duration.sum()
        self.readings += len(x)
        if self.sleep:
            time.sleep(float(duration.sum()))
        return y

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
        noticed = torch.clamp(self.follows.to(x.dtype, copy=True), low, high)
        self.follows.copy_(noticed[-1].detach())
        return noticed

    def _drifted(self, duration: Tensor, x: Tensor) -> Tensor:
        """How far [N, d] the inputs have drifted at each reading."""
        if not self.drift:
            return self.offset.to(x.dtype)
        wander = (self.drift * duration.sqrt()[:, None]).to(x.dtype) * self._normal(x)
        offset = self.offset.to(x.dtype) + wander.cumsum(0)
        self.offset.copy_(offset[-1])
        return offset

    def _normal(self, like: Tensor) -> Tensor:
        generator = self.random.on(like.device)
        return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)

    def get_extra_state(self) -> dict[str, Any]:
        """Random numbers and readings, for `state_dict`."""
        return self.random.state() | {"readings": self.readings}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """The counterpart of `get_extra_state`."""
        self.random.load(state)
        self.readings = state["readings"]
