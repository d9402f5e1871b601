"""PGT: SPSA with magnitudes that vary."""

from collections.abc import Iterable

import torch
from torch import Tensor

from bondgrad.baselines._perturb import Closure, checked_parameters, fill_simultaneously
from bondgrad.errors import positive_float, positive_int
from bondgrad.torch_support._random import Generators


class PGT:
    """Perturbative Gradient Training: SPSA whose perturbations differ in size as well as in sign.

        |Δ_ki| = μ (1 + r u),   u ~ U[-1, 1]

    so that more directions than the 2^d of plain signs can be searched. Costs 2n evaluations of the loss.

    Args:
        params: The parameters whose gradient is wanted.
        mu: Mean size of the perturbation.
        r: Spread of the sizes, in [0, 1). At 0 this is SPSA.
        n: Directions.
        seed: Of the random numbers. None: drawn from torch's.
    """

    def __init__(
        self, params: Iterable[Tensor], mu: float = 1e-3, r: float = 0.5, n: int = 1, seed: int | None = None
    ) -> None:
        if not (isinstance(r, (int, float)) and 0 <= r < 1):
            raise ValueError(f"r must be in [0, 1), got {r!r}")
        self.params = checked_parameters(params)
        self.mu = positive_float("mu", mu)
        self.r = r
        self.n = positive_int("n", n)
        self.random = Generators(seed)

    def estimate(self, closure: Closure) -> None:
        """Overwrite every parameter's `.grad`; the parameters are put back as they were.

        Args:
            closure: Returns the loss at the parameters' present values. Called without gradients, so it must not
                call backward.
        """
        fill_simultaneously(self.params, closure, self.n, self._draw)

    def _draw(self, at: Tensor) -> Tensor:
        generator = self.random.on(at.device)
        size = self.mu * (1 + self.r * torch.empty_like(at).uniform_(-1, 1, generator=generator))
        return torch.copysign(size, torch.empty_like(at).uniform_(-1, 1, generator=generator))
