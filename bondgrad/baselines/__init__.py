"""Baselines that perturb the parameters of a network instead of the inputs of a box, and fill `.grad` from the loss."""

from bondgrad.baselines._fdsa import FDSA
from bondgrad.baselines._pgt import PGT
from bondgrad.baselines._spsa import SPSA

__all__ = ["FDSA", "PGT", "SPSA"]
