"""Baselines that perturb the parameters themselves, and fill `.grad` from a loss closure."""

from bondgrad.baselines._fdsa import FDSA
from bondgrad.baselines._pgt import PGT
from bondgrad.baselines._spsa import SPSA

__all__ = ["FDSA", "PGT", "SPSA"]
