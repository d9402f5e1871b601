"""Black boxes to train through: the paper's, a quantum-dot device, and others.

All are frozen modules that map rows [N, d_in] to [N, d_out], and declare their `structure`, which `BlackBox` uses
without being told.
"""

from bondgrad.reservoirs._compose import Noisy, Tile
from bondgrad.reservoirs._dots import QuantumDotArray
from bondgrad.reservoirs._farm import Farm
from bondgrad.reservoirs._instrument import Instrument
from bondgrad.reservoirs._networks import EchoState, Fixed, Parallel
from bondgrad.reservoirs._others import HamiltonianEvolution, OrthogonalKernel, Polynomial, SpringChain
from bondgrad.reservoirs._rockmelon import Rockmelon

__all__ = [
    "EchoState",
    "Farm",
    "Fixed",
    "HamiltonianEvolution",
    "Instrument",
    "Noisy",
    "OrthogonalKernel",
    "Parallel",
    "Polynomial",
    "QuantumDotArray",
    "Rockmelon",
    "SpringChain",
    "Tile",
]
