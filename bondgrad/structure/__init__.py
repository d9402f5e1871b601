"""Structure: which outputs depend on which inputs, hence which inputs may move together."""

from bondgrad.structure._colouring import colour, lower_bound
from bondgrad.structure._groups import Groups
from bondgrad.structure._plot import plot
from bondgrad.structure._sequence import Sequence
from bondgrad.structure._structure import Blocks, Dense, Pattern, Structure
from bondgrad.structure.discovery._detect import Detection, detect

__all__ = [
    "Blocks",
    "Dense",
    "Detection",
    "Groups",
    "Pattern",
    "Sequence",
    "Structure",
    "colour",
    "detect",
    "lower_bound",
    "plot",
]
