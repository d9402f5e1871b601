"""Checks of the rows that a box is given: each error names the argument, what was expected, and what to do."""

import torch
from torch import Tensor


def check_callable(fn: object) -> None:
    """Refuse what cannot be called."""
    if not callable(fn):
        raise TypeError(f"fn must be callable, got {type(fn).__name__}")


def check_input(x: Tensor, in_features: int | None, in_time: bool = False) -> None:
    """Refuse an x that is not [..., in_features] of floating point, with time before the features if it has that.

    None: there may be any number of features.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch tensor, got {type(x).__name__}")
    if not x.dtype.is_floating_point or x.layout != torch.strided:
        raise TypeError(f"x must be dense and floating point, got {x.dtype}, {x.layout}: call x.float(), x.to_dense()")
    if x.ndim == 0 or (in_features is not None and x.shape[-1] != in_features):
        raise ValueError(f"x must have shape [..., in_features={in_features or 'any'}], got {list(x.shape)}")
    if in_time and x.ndim == 1:
        raise ValueError(f"x must have shape [..., time, in_features={in_features}], got {list(x.shape)}")
    if x.numel() == 0:
        raise ValueError(f"x is an empty batch, shape {list(x.shape)}: skip it, or give it at least one row")


def check_rows(x: Tensor) -> None:
    """Refuse an x that is not rows [N, d] of floating point."""
    check_input(x, None)
    if x.ndim != 2:
        raise ValueError(f"x must be rows, [N, d], got {list(x.shape)}")


def context_rows(context: tuple[Tensor, ...], lead: torch.Size) -> tuple[Tensor, ...]:
    """Every context as rows, [N, ...], given that x has the leading shape `lead`."""
    for i, c in enumerate(context):
        if not isinstance(c, Tensor):
            raise TypeError(f"context {i} must be a torch tensor, got {type(c).__name__}")
        if c.shape[: len(lead)] != lead:
            shape = f"[{', '.join([*map(str, lead), '...'])}]"
            raise ValueError(f"context {i} must have one entry per row of x, shape {shape}, got {list(c.shape)}")
    return tuple(c.detach().reshape(lead.numel(), *c.shape[len(lead) :]) for c in context)
