"""FDSA: central differences along one parameter at a time."""

import math

import numpy as np
import torch
from torch import Tensor

from bondgrad.baselines._parameter_method import Closure, ParameterMethod


class FDSA(ParameterMethod):
    """Finite Difference Stochastic Approximation: a central difference along every single parameter.

        ∂f/∂θ_i ≈ (f(θ + μ e_i) - f(θ - μ e_i)) / (2 μ)

    It is accurate, but costs two evaluations of the loss per parameter. It is meant for small models, and for checking
    other methods. Where a loss is not finite, the gradient is zero.

    Args:
        params: The parameters whose gradient is wanted.
        mu: Size of the perturbation.

    References:
        J. Kiefer and J. Wolfowitz, "Stochastic estimation of the maximum of a regression function", Annals of
        Mathematical Statistics, 1952; the paper's Eq. central_fdsa.
    """

    def gradient(self, closure: Closure) -> list[Tensor]:
        """See `ParameterMethod.gradient`."""
        gradient = [torch.zeros_like(p) for p in self.params]
        for p, g in zip(self.params, gradient, strict=True):
            for at in np.ndindex(tuple(p.shape)):
                original = p[at].clone()
                points, losses = [], []
                for step in (self.mu, -self.mu):
                    p[at] = original + step
                    points.append(float(p[at]))
                    losses.append(float(closure()))
                p[at] = original
                difference, span = losses[0] - losses[1], points[0] - points[1]  # `span` is what rounding left of 2μ
                if span != 0 and math.isfinite(difference):
                    g[at] = difference / span
        return gradient
