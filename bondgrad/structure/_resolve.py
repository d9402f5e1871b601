"""The structure that a layer works with, from its argument `structure`."""

from collections.abc import Callable
from typing import Any

from bondgrad.structure._sequence import Sequence
from bondgrad.structure._structure import Dense, Pattern, Structure, as_pattern
from bondgrad.structure.discovery._detect import Detection
from bondgrad.structure.discovery._tracker import AutoHorizon, AutoPattern, AutoStructure


def resolve(structure: Any, fn: Callable[..., Any]) -> Structure | AutoStructure:  # noqa: ANN401
    """The structure that an argument stands for; None stands for `fn.structure`, or "dense" if there is none."""
    if structure is None:
        own = getattr(fn, "structure", None)
        # An attribute of that name may mean something else.
        structure = own if _is_name(own) or isinstance(own, Structure) or as_pattern(own) is not None else "dense"
    if _is_name(structure):
        return Dense() if structure == "dense" else AutoPattern()
    if isinstance(structure, Detection):
        structure = structure.depends
    if as_pattern(structure) is not None:
        return Pattern(structure)
    if not isinstance(structure, Structure):
        raise ValueError(
            "structure must be 'dense', 'auto', Blocks(n_in, n_out), Sequence(horizon), a pattern [out_features, "
            f"in_features] of booleans (pattern.bool()), or None, got {structure!r}"
        )
    return AutoHorizon() if isinstance(structure, Sequence) and structure.horizon == "auto" else structure


def _is_name(structure: object) -> bool:
    """Whether this is one of the names of a structure."""
    return isinstance(structure, str) and structure in ("dense", "auto")
