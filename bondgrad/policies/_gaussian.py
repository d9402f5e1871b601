"""Normally distributed steps, as in the paper's sweep over perturbation sizes."""

import math

import torch
from torch import Tensor

from bondgrad._arguments import positive_float
from bondgrad.policies._policy import Policy, State, Steps


class Gaussian(Policy):
    """Moves every input by a draw from N(0, sigma).

    Args:
        sigma: Standard deviation, > 0.
    """

    def __init__(self, sigma: float) -> None:
        self.sigma = positive_float("sigma", sigma)

    def __repr__(self) -> str:
        return f"Gaussian({self.sigma})"

    def steps(self, state: State, x: Tensor, n: int, noise: float, generator: torch.Generator) -> Steps:
        """See `Policy.steps`. The bounds reported are the distribution's, zero and infinity."""
        z = torch.empty((n, *x.shape), dtype=x.dtype, device=x.device).normal_(0, self.sigma, generator=generator)
        return Steps(z.abs(), z, x.new_zeros(x.shape[1]), x.new_full((x.shape[1],), math.inf))
