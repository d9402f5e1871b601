"""Electrons through an array of quantum dots."""

import math

import numpy as np
import torch
from torch import Tensor, nn

from bondgrad.errors import checked_seed, not_negative, positive_float, positive_int
from bondgrad.reservoirs._reservoir import Reservoir

MEMORY = 2**31  # bytes, about, that are taken at a time
ENTRY = 12  # numbers for each entry of a matrix: it is complex, and copied, and the gradient keeps some


class QuantumDotArray(Reservoir):
    """Gate voltages in, current and phase out: a device of irregularly placed dots between a source and a drain.

    It is a model of the device from which the paper's Rockmelon was learnt (phosphorus-doped silicon dots, ten gates),
    in standard quantum transport. An electron on dot i has the energy

        ε_i - Σ_g α_ig V_g        with lever arms α that fall off with the distance of gate g

    and hops to dot j with an amplitude that falls exponentially with their distance. Source and drain are leads without
    structure of their own (the wide-band limit), each coupled to the dots on its side with amplitudes γ. With W the
    matrix of the two γ, an electron of energy E is scattered by

        S(E) = 1 - i Wᵀ G(E) W        G(E) = (E - H + i W Wᵀ / 2)⁻¹

    of which one entry, t, is the amplitude for coming through (Fisher and Lee). The readings are averages over the
    energies between the two chemical potentials, smeared out by temperature: the current <|t|²>, in units of that of a
    perfect channel (Landauer and Büttiker), and the phase of 1 + <t>, that is, against a reference arm of the same
    strength, as phases of dots are measured. It stays within ± π/2 and never wraps around.

    Lengths are in units of the distance of typical neighbours; energies in a common unit that is left open.

    Args:
        dots: Their number.
        gates: Their number, around the array.
        hopping: Between dots at distance one.
        decay: Distance in which hopping falls by a factor e.
        lever_arm: Energy by which a gate at distance one moves a dot, for one volt.
        coupling: Width that a lead gives to a dot next to it.
        disorder: Standard deviation of the energies ε.
        temperature: As an energy.
        bias: Between source and drain, as an energy.
        energies: At how many the averages are taken. More of them change the readings of the usual nine by a tenth of
            their deviation or less.
        seed: Of positions and energies: another device of the same make.

    Attributes:
        limits: (low, high) in volts, the range that gates are meant for. Not enforced here: give it to `BlackBox`, or
            see `Instrument`.
    """

    limits = (-3.0, 3.0)

    positions: Tensor  # [dots, 2]
    hamiltonian: Tensor  # [dots, dots] with all gates at zero
    lever_arms: Tensor  # [dots, gates]
    leads: Tensor  # [dots, 2] γ of source and drain
    energy: Tensor  # [energies]
    weight: Tensor  # [energies] of each, in averages

    def __init__(
        self,
        dots: int = 14,
        gates: int = 10,
        *,
        hopping: float = 1.2,
        decay: float = 0.4,
        lever_arm: float = 0.2,
        coupling: float = 1.0,
        disorder: float = 0.5,
        temperature: float = 0.15,
        bias: float = 0.3,
        energies: int = 9,
        seed: int = 3,
    ) -> None:
        super().__init__(gates, 2)
        with torch.device("cpu"):
            random = torch.Generator().manual_seed(checked_seed(seed))
            positions = scattered(positive_int("dots", dots), random)
            hops = -hopping * torch.exp((1 - torch.cdist(positions, positions)) / positive_float("decay", decay))
            own = not_negative("disorder", disorder) * torch.randn(dots, generator=random, dtype=torch.float64)
            energy, weight = window(temperature, bias, energies)
            width = positions[:, 0].amax()
            near = torch.stack((positions[:, 0], width - positions[:, 0]), 1)  # [dots, 2] distance from either end
            apart = torch.cdist(positions, around(positions, gates))  # [dots, gates]
        for name, value in (
            ("positions", positions),
            ("hamiltonian", hops.fill_diagonal_(0) + own.diag()),
            ("lever_arms", 2 * lever_arm / (1 + apart.square())),
            ("leads", math.sqrt(positive_float("coupling", coupling)) * torch.exp(-near)),
            ("energy", energy),
            ("weight", weight),
        ):
            self.register_buffer(name, value.float())

    def answer(self, x: Tensor) -> Tensor:
        """Voltages [N, gates] -> readings [N, 2]: current, and phase."""
        rows = max(1, MEMORY // (ENTRY * len(self.energy) * self.hamiltonian.numel() * x.itemsize))
        return torch.cat([self._read(some) for some in torch.split(x, rows)])

    def scattering(self, x: Tensor, energy: Tensor) -> Tensor:
        """S(E) for voltages [N, gates] and energies [K]: [N, K, 2, 2], complex and unitary, [..., to, from]."""
        n = len(self.hamiltonian)
        leads = self.leads.to(x.dtype)
        h = self.hamiltonian.to(x.dtype) - torch.diag_embed(x @ self.lever_arms.T.to(x.dtype))  # [N, n, n]
        matrix = torch.complex(
            energy.to(x.dtype)[:, None, None] * torch.eye(n, dtype=x.dtype, device=x.device) - h[:, None],
            (0.5 * leads @ leads.T).expand(len(x), len(energy), n, n),
        )
        w = leads.to(matrix.dtype)
        came = torch.linalg.solve(matrix, w.expand(len(x), len(energy), n, 2))
        s: Tensor = torch.eye(2, dtype=w.dtype, device=x.device) - 1j * (w.T @ came)
        return s

    def _read(self, x: Tensor) -> Tensor:
        t = self.scattering(x, self.energy)[:, :, 1, 0]  # [N, K] from source to drain
        weight = self.weight.to(x.dtype)
        current = (t.real.square() + t.imag.square()) @ weight
        return torch.stack((current, torch.angle(1 + t @ weight.to(t.dtype))), 1)


def scattered(n: int, random: torch.Generator) -> Tensor:
    """Points [n, 2] in a strip, each at distance one of some other, more or less, and of none much less.

    They are those of a triangular lattice, three high, moved at random.
    """
    i = torch.arange(n, dtype=torch.float64)
    column, row = torch.div(i, 3, rounding_mode="floor"), i % 3
    lattice = torch.stack((column + 0.5 * (row % 2), row * math.sqrt(3) / 2), 1)
    points = lattice + 0.25 * (2 * torch.rand(n, 2, generator=random, dtype=torch.float64) - 1)
    return points - points.amin(0)


def around(positions: Tensor, gates: int) -> Tensor:
    """Places [gates, 2] on an ellipse around the dots [n, 2]."""
    middle, half = positions.amax(0) / 2, positions.amax(0) / 2 + 0.8
    angle = 2 * math.pi * (torch.arange(gates, dtype=torch.float64) + 0.5) / gates
    return middle + half * torch.stack((angle.cos(), angle.sin()), 1)


def window(temperature: float, bias: float, n: int) -> tuple[Tensor, Tensor]:
    """Energies and weights [n] each, for averages over the electrons that carry the current: f(E - b/2) - f(E + b/2).

    By Gauss and Legendre, over the share of electrons below each energy.
    """
    temperature, bias = positive_float("temperature", temperature), positive_float("bias", bias)
    most = bias / 2 + 40 * temperature
    grid = torch.linspace(-most, most, 100_001, dtype=torch.float64)
    upper, lower = (nn.functional.softplus((grid + side * bias / 2) / temperature) for side in (1, -1))
    below = (upper - lower) * temperature / bias
    nodes, weights = np.polynomial.legendre.leggauss(positive_int("energies", n))
    return grid[torch.searchsorted(below, torch.from_numpy((nodes + 1) / 2))], torch.from_numpy(weights / 2)
