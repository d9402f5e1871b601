"""The state of a box with memory: who owns it, and what it may be made of."""

import numpy as np
import torch
from torch import Tensor


def snapshot_owner(fn: object) -> object | None:
    """The object that keeps a state behind fn, if there is one: with methods `snapshot` and `restore`."""
    for candidate in (fn, getattr(fn, "__self__", None)):
        if callable(getattr(candidate, "snapshot", None)) and callable(getattr(candidate, "restore", None)):
            return candidate
    return None


def state_tensor(value: object) -> Tensor:
    """A part of a state, whatever kind of numbers it has."""
    if isinstance(value, np.ndarray):
        return torch.as_tensor(value.copy(), device="cpu")
    if not isinstance(value, Tensor):
        raise TypeError(f"{type(value).__name__} is neither a tensor nor an array")
    return value
