"""SPSA: all parameters are perturbed at once, by steps of equal size."""

import torch
from torch import Tensor

from bondgrad.baselines._parameter_method import SimultaneousPerturbation


class SPSA(SimultaneousPerturbation):
    """Simultaneous Perturbation Stochastic Approximation, by central differences.

        ∂f/∂θ_i ≈ 1/n Σ_k (f(θ + μΔ_k) - f(θ - μΔ_k)) / (2 μ Δ_ki),   Δ_ki = ±1 at random

    It costs 2n evaluations of the loss, whatever the number of parameters.

    Args:
        params: The parameters whose gradient is wanted.
        mu: Size of the perturbation.
        n: Number of random directions.
        seed: The seed of the random signs. None: drawn from torch's global generator.

    Example:
        >>> w = torch.tensor([1.0, -2.0], requires_grad=True)
        >>> SPSA([w], n=500, seed=0).estimate(lambda: (w**2).sum())
        >>> w.grad.sign()
        tensor([ 1., -1.])

    References:
        J. Spall, "Multivariate stochastic approximation using a simultaneous perturbation gradient approximation", IEEE
        Transactions on Automatic Control, 1992; the paper's Eq. central_spsa.
    """

    def sizes(self, at: Tensor) -> Tensor:
        """See `SimultaneousPerturbation.sizes`."""
        return torch.full_like(at, self.mu)
