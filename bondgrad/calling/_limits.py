"""The range that a box may be asked about."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Limits:
    """The range that the box may be asked about, as tensors for whichever dtype and device x has.

    Args:
        limits: (low, high), each a number or one number per input.
        in_features: Number of inputs.
    """

    def __init__(self, limits: tuple[Any, Any], in_features: int) -> None:
        if not isinstance(limits, (Sequence, np.ndarray, Tensor)) or len(limits) != 2:
            raise ValueError(f"limits must be a pair (low, high), got {limits!r}")
        try:
            low, high = (torch.as_tensor(limit, dtype=torch.float64, device="cpu") for limit in limits)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"limits must be numbers, got {limits!r}") from error
        if any(limit.shape not in ((), (in_features,)) for limit in (low, high)):
            raise ValueError(f"each of limits must be a number or {in_features} numbers, got {limits!r}")
        if not bool((low < high).all()):
            raise ValueError(f"limits must have low < high for every input, got {limits!r}")
        self._exact = low.expand(in_features).clone(), high.expand(in_features).clone()
        self._made: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    def numbers(self) -> tuple[list[float], list[float]]:
        """Low and high of every input, as they were given."""
        low, high = self._exact
        return low.tolist(), high.tolist()

    def like(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Low and high, each like the rows of x [N, d], or [N, T·d]. Rounded inwards: no point may lie outside."""
        key = (x.dtype, x.device)
        if key not in self._made:
            low, high = (limit.to(x.dtype) for limit in self._exact)
            low = torch.where(low < self._exact[0], low.nextafter(high), low)
            high = torch.where(high > self._exact[1], high.nextafter(low), high)
            if not bool((low < high).all()):
                raise ValueError(f"limits must be within what {x.dtype} can tell apart: use float64, or other units")
            self._made[key] = low.to(x.device), high.to(x.device)
        low, high = self._made[key]
        times = x.shape[-1] // len(low)
        return low.repeat(times), high.repeat(times)

    def clamped(self, x: Tensor) -> Tensor:
        """The rows x [B, d], kept inside."""
        return x.clamp(*self.like(x))
