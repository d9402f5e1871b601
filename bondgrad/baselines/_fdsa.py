"""FDSA: one parameter at a time."""

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from bondgrad.baselines._perturb import Closure, checked_parameters, restored
from bondgrad.errors import positive_float


class FDSA:
    """Finite Difference Stochastic Approximation: a central difference along every single parameter.

        ∂f/∂θ_i ≈ (f(θ + μ e_i) - f(θ - μ e_i)) / (2 μ)

    Accurate, and costs two evaluations of the loss per parameter: for small models and for checking other methods.

    Args:
        params: The parameters whose gradient is wanted.
        mu: Size of the perturbation.

    Reference: Kiefer and Wolfowitz, 1952; the paper's Eq. central_fdsa.
    """

    def __init__(self, params: Iterable[Tensor], mu: float = 1e-3) -> None:
        self.params = checked_parameters(params)
        self.mu = positive_float("mu", mu)

    def estimate(self, closure: Closure) -> None:
        """Overwrite every parameter's `.grad`; the parameters are put back as they were.

        Args:
            closure: Returns the loss at the parameters' present values. Called without gradients, so it must not
                call backward.
        """
        gradient = [torch.zeros_like(p) for p in self.params]
        with restored(self.params) as originals:
            for p, original, g in zip(self.params, originals, gradient, strict=True):
                for at in np.ndindex(tuple(p.shape)):
                    points, losses = [], []
                    for step in (self.mu, -self.mu):
                        p[at] = original[at] + step
                        points.append(float(p[at]))
                        losses.append(float(closure()))
                    p[at] = original[at]
                    difference, span = losses[0] - losses[1], points[0] - points[1]
                    if span != 0 and math.isfinite(difference):
                        g[at] = difference / span
        for p, g in zip(self.params, gradient, strict=True):
            p.grad = g
