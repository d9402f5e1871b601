"""Checks of what users pass: each error names the argument, what was expected, and what to do."""

import math
import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")


def positive_int(name: str, value: Any) -> int:  # noqa: ANN401
    """The value as an int, if it is a whole number of at least one."""
    if (number := _whole(value)) < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return number


def checked_seed(value: Any) -> int:  # noqa: ANN401
    """The value as an int, if it is a seed."""
    if not 0 <= (seed := _whole(value)) < 2**63:
        raise ValueError(f"seed must be an integer from 0 to 2**63 - 1, or None, got {value!r}")
    return seed


def _whole(value: Any) -> int:  # noqa: ANN401
    """The value as an int, of whichever library; -1 if it is not a whole number."""
    try:
        return -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return -1


def positive_float(name: str, value: Any) -> float:  # noqa: ANN401
    """The value as a float, if it is a positive finite number."""
    if not 0 < (number := _number(value)) < math.inf:
        raise ValueError(f"{name} must be a positive finite number, got {value!r}")
    return number


def not_negative(name: str, value: Any) -> float:  # noqa: ANN401
    """The value as a float, if it is a finite number of at least zero."""
    if not 0 <= (number := _number(value)) < math.inf:
        raise ValueError(f"{name} must be zero or a positive finite number, got {value!r}")
    return number


def _number(value: Any) -> float:  # noqa: ANN401
    """The value as a float, of whichever library; NaN if it is not a number."""
    try:
        return math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def checked_noise(value: Any) -> float | str | None:  # noqa: ANN401
    """A half-width of noise; None, if it is rounding; or "auto"."""
    if value is None or (isinstance(value, str) and value == "auto"):
        return value
    try:
        return positive_float("noise", value)
    except ValueError as error:
        raise ValueError(f"{error} (None and 'auto' are possible, too)") from error


def warn_of_seed(in_vain: bool) -> None:
    """Where both ends of a move cannot have the same random numbers."""
    if in_vain:
        warnings.warn(
            "fn takes a seed, but estimator='forward' compares with the answer of the forward pass, which has other "
            "random numbers: their noise does not cancel. Use estimator='central'.",
            stacklevel=3,
        )


def chosen(name: str, value: object, by_name: dict[str, Callable[[], T]], kind: type[Any]) -> T:
    """An instance made from its name, or the instance itself."""
    if isinstance(value, str) and value in by_name:
        return by_name[value]()
    if not isinstance(value, kind):
        names = ", ".join(map(repr, by_name))
        raise ValueError(f"{name} must be one of {names} or an instance of {kind.__name__}, got {value!r}")
    instance: T = value
    return instance


def check_callable(fn: object) -> None:
    """Refuse what cannot be called."""
    if not callable(fn):
        raise TypeError(f"fn must be callable, got {type(fn).__name__}")


def check_eager(eager: object) -> None:
    """Refuse what is to come, but not there yet."""
    if eager:
        raise ValueError("eager is not supported yet: leave it out")


def check_input(x: Tensor, in_features: int, in_time: bool = False) -> None:
    """Refuse an x that is not [..., in_features] of floating point; with time before the features, if it has that."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch tensor, got {type(x).__name__}")
    if not x.dtype.is_floating_point or x.layout != torch.strided:
        raise TypeError(f"x must be dense and floating point, got {x.dtype}, {x.layout}: call x.float(), x.to_dense()")
    if x.ndim == 0 or x.shape[-1] != in_features:
        raise ValueError(f"x must have shape [..., in_features={in_features}], got {list(x.shape)}")
    if in_time and x.ndim == 1:
        raise ValueError(f"x must have shape [..., time, in_features={in_features}], got {list(x.shape)}")
    if x.numel() == 0:
        raise ValueError(f"x is an empty batch, shape {list(x.shape)}: skip it, or give it at least one row")


def context_rows(context: tuple[Tensor, ...], lead: torch.Size) -> tuple[Tensor, ...]:
    """Every context as rows, [N, ...], given that x has the leading shape `lead`."""
    for i, c in enumerate(context):
        if not isinstance(c, Tensor):
            raise TypeError(f"context {i} must be a torch tensor, got {type(c).__name__}")
        if c.shape[: len(lead)] != lead:
            shape = f"[{', '.join([*map(str, lead), '...'])}]"
            raise ValueError(f"context {i} must have one entry per row of x, shape {shape}, got {list(c.shape)}")
    return tuple(c.detach().reshape(lead.numel(), *c.shape[len(lead) :]) for c in context)


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
            inf = torch.tensor(math.inf, dtype=x.dtype, device="cpu")
            low = torch.where(low.double() < self._exact[0], torch.nextafter(low, inf), low)
            high = torch.where(high.double() > self._exact[1], torch.nextafter(high, -inf), high)
            if not bool((low < high).all()):
                raise ValueError(f"limits must be within what {x.dtype} can tell apart: use float64, or other units")
            self._made[key] = low.to(x.device), high.to(x.device)
        low, high = self._made[key]
        times = x.shape[-1] // len(low)
        return (low, high) if times == 1 else (low.repeat(times), high.repeat(times))


def inside(limits: Limits | None, x: Tensor) -> Tensor:
    """The rows x [B, d], kept to the limits if there are any."""
    return x if limits is None else x.clamp(*limits.like(x))
