"""Reservoirs that the paper mentions and does not keep: small and smooth, to see for yourself."""

import math

import torch
from torch import Tensor, nn

from bondgrad.errors import not_negative, positive_float, positive_int
from bondgrad.reservoirs._reservoir import Reservoir, random_numbers


class Polynomial(Reservoir):
    """A sum of powers of mixtures of the inputs, Σ_p (W_p x)ᵖ / p!.

    Args:
        d_in: Inputs.
        d_out: Outputs.
        degree: The highest power.
        seed: Of the mixtures. None: from torch's own random numbers.
    """

    def __init__(self, d_in: int, d_out: int, *, degree: int = 3, seed: int | None = None) -> None:
        super().__init__(d_in, d_out)
        with random_numbers(seed):
            weight = torch.randn(positive_int("degree", degree), d_in, d_out) / math.sqrt(d_in)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def answer(self, x: Tensor) -> Tensor:
        """[N, d_in] -> [N, d_out]."""
        y = x.new_zeros(())
        for p, weight in enumerate(self.weight, 1):
            y = y + (x @ weight) ** p / math.factorial(p)
        return y


class OrthogonalKernel(Reservoir):
    """Waves along orthogonal directions: random features of a Gaussian kernel, with less scatter than independent ones.

    Args:
        d_in: Inputs.
        d_out: Outputs.
        width: Of the kernel.
        seed: Of directions and phases. None: from torch's own random numbers.
    """

    def __init__(self, d_in: int, d_out: int, *, width: float = 2.0, seed: int | None = None) -> None:
        super().__init__(d_in, d_out)
        with random_numbers(seed):
            turns = [torch.linalg.qr(torch.randn(d_in, d_in))[0] for _ in range(-(-d_out // d_in))]
            lengths = torch.randn(d_out, d_in).norm(dim=1)  # as those of independent directions
            phase = 2 * math.pi * torch.rand(d_out)
        direction = torch.cat(turns)[:d_out] * lengths[:, None] / positive_float("width", width)
        self.direction, self.phase = (nn.Parameter(t, requires_grad=False) for t in (direction, phase))

    def answer(self, x: Tensor) -> Tensor:
        """[N, d_in] -> [N, d_out]."""
        return math.sqrt(2) * torch.cos(x @ self.direction.T + self.phase)


class HamiltonianEvolution(Reservoir):
    """Spins that are turned by the inputs, left to one another for a while, and measured.

    Each spin starts up, is turned about the y axis by the angle x_i, and then evolves for a time under
    Σ J_ij Z_i Z_j + Σ h_i X_i. The outputs are the expectations of Z_i.

    Args:
        spins: Inputs and outputs; a state has 2ⁿ entries.
        time: Of the evolution.
        seed: Of couplings and fields. None: from torch's own random numbers.
    """

    evolution: Tensor  # [2, 2ⁿ, 2ⁿ] its real and its imaginary part
    z: Tensor  # [2ⁿ, n] of each spin in each basis state

    def __init__(self, spins: int = 5, *, time: float = 2.0, seed: int | None = None) -> None:
        super().__init__(spins, spins)
        n = self.in_features
        with random_numbers(seed):
            coupling, field = torch.randn(n, n).triu(1).double(), torch.rand(n).double() + 0.5
        states = torch.arange(2**n, device=field.device)
        bits = states[:, None] >> torch.arange(n).to(states).flip(0) & 1  # [2ⁿ, n] the first spin is the highest bit
        z = 1.0 - 2.0 * bits.double()
        h = torch.einsum("si,ij,sj->s", z, coupling, z).diag()
        for i in range(n):
            h[states, states ^ (1 << (n - 1 - i))] += field[i]
        evolution = torch.linalg.matrix_exp(-1j * not_negative("time", time) * h)
        self.register_buffer("evolution", torch.stack((evolution.real, evolution.imag)).float())
        self.register_buffer("z", z.float())

    def answer(self, x: Tensor) -> Tensor:
        """[N, spins] -> [N, spins]."""
        state = x.new_ones(len(x), 1)
        for spin in torch.stack((torch.cos(x / 2), torch.sin(x / 2)), 2).unbind(1):  # [N, 2]
            state = (state[:, :, None] * spin[:, None]).flatten(1)
        after = state @ self.evolution.mT  # [2, N, 2ⁿ]
        return after.square().sum(0) @ self.z


class SpringChain(Reservoir):
    """Masses in a row, between walls, with springs that stiffen: displaced by the inputs, and let go.

    The outputs are where they are after a while, by the leapfrog method, which keeps the energy.

    Args:
        masses: Inputs and outputs.
        stiffening: Of the springs: the force is r + stiffening · r³.
        time: From letting go to looking.
        dt: Of one step of integration.
    """

    def __init__(self, masses: int = 5, *, stiffening: float = 0.5, time: float = 4.0, dt: float = 0.05) -> None:
        super().__init__(masses, masses)
        self.stiffening, self.dt = not_negative("stiffening", stiffening), positive_float("dt", dt)
        self.steps = max(1, round(positive_float("time", time) / dt))

    def answer(self, x: Tensor) -> Tensor:
        """[N, masses] -> [N, masses]."""
        return self.evolve(x)[0]

    def evolve(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Positions and velocities [N, masses] at the end."""
        v = 0.5 * self.dt * self._force(x)
        for _ in range(self.steps):
            x = x + self.dt * v
            force = self._force(x)
            v = v + self.dt * force
        return x, v - 0.5 * self.dt * force

    def energy(self, x: Tensor, v: Tensor) -> Tensor:
        """[N]."""
        r = nn.functional.pad(x, (1, 1)).diff(dim=1)
        return 0.5 * v.square().sum(1) + (0.5 * r.square() + 0.25 * self.stiffening * r**4).sum(1)

    def _force(self, x: Tensor) -> Tensor:
        r = nn.functional.pad(x, (1, 1)).diff(dim=1)  # [N, masses + 1] by how much each spring is stretched
        return (r + self.stiffening * r**3).diff(dim=1)
