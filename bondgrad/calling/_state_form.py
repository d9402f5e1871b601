"""How the state of a box with memory is made up, and who owns it."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map


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


class StateForm:
    """How a state is made of tensors: alone, or in tuples, lists and dictionaries."""

    def __init__(self, state: object) -> None:
        self._example = tree_map(lambda _: 0, state)  # travels better than torch's own specification
        self.spec = tree_flatten(self._example)[1]

    def __deepcopy__(self, _memo: dict[int, Any]) -> "StateForm":
        return self

    def __reduce__(self) -> Any:  # noqa: ANN401
        return StateForm, (self._example,)
