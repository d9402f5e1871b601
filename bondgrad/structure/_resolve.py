"""The structure that a layer works with, from its argument `structure`."""

from collections.abc import Callable
from typing import Any

from bondgrad.structure._sequence import Sequence
from bondgrad.structure._structure import Dense, Pattern, Structure, as_pattern
from bondgrad.structure.discovery._detect import Detection
from bondgrad.structure.discovery._tracker import AutoHorizon, AutoPattern, AutoStructure


def resolve(structure: Any, fn: Callable[..., Any]) -> Structure | AutoStructure:  # noqa: ANN401
    """The structure that an argument stands for; None stands for `fn.structure`, or for "dense" if there is none."""
    if structure is None:
        return _resolved(getattr(fn, "structure", None)) or Dense()  # an attribute of that name may mean something else
    found = _resolved(structure)
    if found is None:
        raise ValueError(
            "structure must be 'dense', 'auto', Blocks(n_in, n_out), Sequence(horizon), a pattern [out_features, "
            f"in_features] of booleans (pattern.bool()), or None, got {structure!r}"
        )
    return found


def _resolved(structure: object) -> Structure | AutoStructure | None:
    """The structure that a value stands for; None, if it stands for none."""
    if isinstance(structure, str):
        return Dense() if structure == "dense" else AutoPattern() if structure == "auto" else None
    if isinstance(structure, Structure):
        return AutoHorizon() if isinstance(structure, Sequence) and structure.horizon == "auto" else structure
    pattern = as_pattern(structure.depends if isinstance(structure, Detection) else structure)
    return None if pattern is None else Pattern(pattern)
