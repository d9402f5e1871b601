"""SPSA: all parameters at once."""

from collections.abc import Iterable

import torch
from torch import Tensor

from bondgrad.baselines._perturb import Closure, checked_parameters, fill_simultaneously
from bondgrad.errors import positive_float, positive_int
from bondgrad.torch_support._random import Generators


class SPSA:
    """Simultaneous Perturbation Stochastic Approximation, by central differences.

        ∂f/∂θ_i ≈ 1/n Σ_k (f(θ + μΔ_k) - f(θ - μΔ_k)) / (2 μ Δ_ki),   Δ_ki = ±1 at random

    Costs 2n evaluations of the loss, whatever the number of parameters.

    Args:
        params: The parameters whose gradient is wanted.
        mu: Size of the perturbation.
        n: Directions.
        seed: Of the random signs. None: drawn from torch's.

    Example:
        >>> w = torch.tensor([1.0, -2.0], requires_grad=True)
        >>> SPSA([w], n=500, seed=0).estimate(lambda: (w**2).sum())
        >>> w.grad.sign()
        tensor([ 1., -1.])

    Reference: Spall, 1992; the paper's Eq. central_spsa.
    """

    def __init__(self, params: Iterable[Tensor], mu: float = 1e-3, n: int = 1, seed: int | None = None) -> None:
        self.params = checked_parameters(params)
        self.mu = positive_float("mu", mu)
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
        u = torch.empty_like(at).uniform_(-1, 1, generator=self.random.on(at.device))
        return torch.copysign(torch.full_like(at, self.mu), u)
