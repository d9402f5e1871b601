"""Checks of what users pass to the layer: each error names the argument, what was expected, and what to do."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def chosen(name: str, value: object, by_name: dict[str, Callable[[], T]], kind: type[Any]) -> T:
    """An instance made from its name, or the instance itself."""
    if isinstance(value, str) and value in by_name:
        return by_name[value]()
    if isinstance(value, kind):
        chosen_one: T = value
        return chosen_one
    names = ", ".join(map(repr, by_name))
    raise ValueError(f"{name} must be one of {names} or an instance of {kind.__name__}, got {value!r}")


def checked_limits(limits: tuple[Any, Any], in_features: int) -> tuple[Tensor, Tensor]:
    """Both limits as float64 [in_features]."""
    if not isinstance(limits, Sequence) or len(limits) != 2:
        raise ValueError(f"limits must be a pair (low, high), got {limits!r}")
    try:
        low, high = (torch.as_tensor(limit, dtype=torch.float64).cpu() for limit in limits)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"limits must be numbers, got {limits!r}") from error
    if any(limit.shape not in ((), (in_features,)) for limit in (low, high)):
        raise ValueError(f"each of limits must be a number or {in_features} numbers, got {limits!r}")
    if not bool((low < high).all()):
        raise ValueError(f"limits must have low < high for every input, got {limits!r}")
    return low.expand(in_features), high.expand(in_features)


def check_input(x: Tensor, in_features: int) -> None:
    """Refuse an x that is not [..., in_features] of floating point."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch tensor, got {type(x).__name__}")
    if not x.dtype.is_floating_point:
        raise TypeError(f"x must be floating point, got {x.dtype}: call x.float()")
    if x.ndim == 0 or x.shape[-1] != in_features:
        raise ValueError(f"x must have shape [..., in_features={in_features}], got {list(x.shape)}")
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
