"""Checks of the inputs of a box, and the limits that they are clamped to.

Each error names the argument, what was expected, and what to do.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bondgrad.calling._grid import Grid
from bondgrad.torch_support import _device as device


def check_callable(fn: object) -> None:
    """Raise TypeError if fn is not callable."""
    if not callable(fn):
        raise TypeError(f"fn must be callable, got {type(fn).__name__}")


def check_input(x: Tensor, in_features: int | None, in_time: bool = False) -> None:
    """Raise an error unless x is a dense floating-point tensor [..., in_features] that is not empty.

    Args:
        x: The inputs.
        in_features: The number of inputs. None: any number.
        in_time: Whether rows are sequences, so that x must be [..., T, in_features].
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch tensor, got {type(x).__name__}")
    if not x.dtype.is_floating_point or x.layout != torch.strided:
        raise TypeError(f"x must be dense and floating point, got {x.dtype}, {x.layout}: call x.float(), x.to_dense()")
    if x.ndim < (2 if in_time else 1) or (in_features is not None and x.shape[-1] != in_features):
        shape = f"[..., {'time, ' if in_time else ''}in_features={in_features or 'any'}]"
        raise ValueError(f"x must have shape {shape}, got {list(x.shape)}")
    if x.numel() == 0:
        raise ValueError(f"x is an empty batch, shape {list(x.shape)}: skip it, or give it at least one row")


def check_rows(x: Tensor) -> None:
    """Raise an error unless x is a floating-point tensor [N, d] that is not empty."""
    check_input(x, None)
    if x.ndim != 2:
        raise ValueError(f"x must be rows, [N, d], got {list(x.shape)}")


def context_rows(context: tuple[Tensor, ...], lead: torch.Size) -> tuple[Tensor, ...]:
    """The contexts, detached and reshaped from [*lead, ...] to rows [N, ...]; `lead` is that of x [*lead, d]."""
    for i, c in enumerate(context):
        if not isinstance(c, Tensor):
            raise TypeError(f"context {i} must be a torch tensor, got {type(c).__name__}")
        if c.shape[: len(lead)] != lead:
            shape = f"[{', '.join([*map(str, lead), '...'])}]"
            raise ValueError(f"context {i} must have one entry per row of x, shape {shape}, got {list(c.shape)}")
    return tuple(c.detach().reshape(lead.numel(), *c.shape[len(lead) :]) for c in context)


NOT_FINITE_REMEDY = (
    "The numbers come from the network before the box: look for NaN in its inputs and weights, or lower the learning "
    "rate."
)


def seen_to_be_finite(x: Tensor) -> bool:
    """Whether all entries of x are finite, as far as their sum tells; False on an accelerator, where nothing is read.

    A sum is finite only if all its terms are. It may overflow where they are.
    """
    return device.reading_is_free(x.device) and math.isfinite(x.sum())


def with_typical_rows(x: Tensor) -> Tensor:
    """The rows x [B, d], with the mean of the others in place of those that are not finite; zero if all are not."""
    finite = torch.isfinite(x).all(1, keepdim=True)
    mean = torch.where(finite, x, 0).sum(0) / finite.sum().clamp_min(1)
    return torch.where(finite, x, mean)


class Limits:
    """The range of inputs in which the box may be evaluated, as tensors in the dtype and on the device of x.

    Args:
        limits: (low, high), each a number or one number per input. None: (-inf, inf).
        in_features: Number of inputs.
        resolution: The step in which inputs can be set, a number or one per input. None: any value can be set.

    Attributes:
        given: The limits as they were given, None among them; `resolution` likewise.
        grid: The values that can be set; None: all.
    """

    @classmethod
    def of(cls, limits: tuple[Any, Any] | None, in_features: int, resolution: Any) -> "Limits | None":  # noqa: ANN401
        """The limits of a box; None: each of its inputs can be any number."""
        return None if limits is None and resolution is None else cls(limits, in_features, resolution)

    def __init__(self, limits: tuple[Any, Any] | None, in_features: int, resolution: Any = None) -> None:  # noqa: ANN401
        self.given, self.resolution = limits, resolution
        limits = (-math.inf, math.inf) if limits is None else limits
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
        self.grid: Grid | None = None
        if resolution is not None:
            self.grid = Grid(resolution, *self._exact)
            self._exact = self._exact[0], self.grid.highest
        self._made: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    def numbers(self) -> tuple[list[float], list[float]]:
        """The lower and the upper limit of every input, as they were given."""
        return self._exact[0].tolist(), self._exact[1].tolist()

    def values(self) -> tuple[object, ...]:
        """What is equal (`==`) for limits that leave the same values to every input, in whichever form given."""
        return *self.numbers(), None if self.grid is None else self.grid.step.tolist()

    def like(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The lower and the upper limits, [d] or [T·d] like a row of x. They are rounded inwards to the dtype of x."""
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
        return (low, high) if times == 1 else (low.repeat(times), high.repeat(times))

    def clamped(self, x: Tensor) -> Tensor:
        """The rows x [B, d], clamped to the limits, and moved to the nearest values that can be set.

        It is NaN where an entry is not finite, since that says nothing.
        """
        inside = (x if self.grid is None else self.grid.nearest(x)).clamp(*self.like(x))
        return inside if seen_to_be_finite(x) else torch.where(torch.isfinite(x), inside, math.nan)

    def admissible(self, x: Tensor) -> Tensor:
        """The rows x [B, d], with values that the box may be given in place of entries that are not finite."""
        return torch.where(torch.isfinite(x), x, self.clamped(torch.zeros_like(x[:1])))
