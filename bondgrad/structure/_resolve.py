"""From what a user says about structure to what the layer works with."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bondgrad.structure._findings import AutoHorizon, AutoPattern, Unknown
from bondgrad.structure._sequence import Sequence
from bondgrad.structure._structure import Dense, Pattern, Structure


def resolve(structure: Any, fn: Callable[..., Any]) -> Structure | Unknown:  # noqa: ANN401
    """The structure that was asked for; None: what fn declares as `fn.structure`, or dense."""
    if structure is None:
        own = getattr(fn, "structure", None)
        # Something else may go by that name.
        structure = own if isinstance(own, Structure) or _pattern(own) is not None else "dense"
    if isinstance(structure, str):
        if structure == "dense":
            return Dense()
        if structure == "auto":
            return AutoPattern()
    pattern = _pattern(structure)
    if pattern is not None:
        return Pattern(pattern)
    if not isinstance(structure, Structure):
        raise ValueError(
            "structure must be 'dense', 'auto', Blocks(n_in, n_out), Sequence(horizon), a bool pattern [out_features, "
            f"in_features], or None, got {structure!r}"
        )
    return AutoHorizon() if isinstance(structure, Sequence) and structure.horizon == "auto" else structure


def _pattern(value: Any) -> Tensor | None:  # noqa: ANN401
    """The value, if it is a pattern [d_out, d_in] of booleans."""
    if isinstance(value, np.ndarray) and value.dtype == bool:
        value = torch.from_numpy(np.ascontiguousarray(value))
    if not isinstance(value, Tensor) or value.dtype != torch.bool or value.ndim != 2 or value.numel() == 0:
        return None
    return value.to_dense() if value.layout != torch.strided else value
