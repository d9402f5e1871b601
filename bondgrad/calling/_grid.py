"""The values that inputs can have where a converter sets them in steps of one size."""

from typing import Any

import torch
from torch import Tensor


class Grid:
    """The values that inputs can have: whole steps from an offset on, the lower limit, or zero where there is none.

    A value is computed in double precision from the number of its steps, so that it is the same to the last bit however
    it was reached.

    Args:
        resolution: The size of a step, a number or one for every input.
        low: [d] the lower limits, in double precision; -inf: none.
        high: [d] the upper limits.

    Attributes:
        step: [d] the size of a step.
        highest: [d] the largest value; inf: there is none.
    """

    def __init__(self, resolution: Any, low: Tensor, high: Tensor) -> None:  # noqa: ANN401
        try:
            step = torch.as_tensor(resolution, dtype=torch.float64, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"resolution must be numbers, got {resolution!r}") from error
        if step.shape not in ((), low.shape) or not bool((torch.isfinite(step) & (step > 0)).all()):
            raise ValueError(f"resolution must be a number > 0, or {len(low)} of them, got {resolution!r}")
        self.step = step.expand_as(low).clone()
        bounded = torch.isfinite(low)
        self.offset = torch.where(bounded, low, 0)
        self._first = torch.where(bounded, 0, -torch.inf)  # the number of the lowest value, in steps from the offset
        # A millionth of a step more, since rounding may make 0.3 / 0.1 less than three.
        self._last = ((high - self.offset) / self.step + 1e-6).floor()
        if not bool((self._last > self._first).all()):
            raise ValueError(f"resolution must leave two values within limits for every input, got {resolution!r}")
        self.highest = torch.minimum(self.offset + self._last * self.step, high)
        self._made: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def nearest(self, points: Tensor) -> Tensor:
        """The values that can be set nearest to those of points [..., d], or [..., T·d]; in the dtype of points."""
        wide = points if points.device.type == "mps" else points.double()
        offset, step, first, last = self._like(wide)
        number: Tensor = ((wide - offset) / step).round_().clamp_(first, last)
        return number.mul_(step).add_(offset).to(points.dtype)

    def moves(self, size: Tensor, steps: int = 1) -> Tensor:
        """Lengths [..., d], or [..., T·d], rounded to whole multiples of so many steps, and to one at least."""
        unit = self._like(size)[1] * steps  # [d], or [T·d]
        count: Tensor = (size / unit).round().clamp_min(1)
        return count * unit

    def _like(self, x: Tensor) -> Tensor:
        """The offset, the step, and the first and the last number, for every entry of a row of x, in its dtype."""
        key = (x.dtype, x.device)
        if key not in self._made:
            facts = torch.stack((self.offset, self.step, self._first, self._last))
            self._made[key] = facts.to(x.device, x.dtype)
        facts = self._made[key]
        return facts.repeat(1, x.shape[-1] // len(self.step))  # [4, d], or [4, T·d]
