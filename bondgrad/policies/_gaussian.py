"""Normally distributed steps, as in the paper's sweep over perturbation sizes."""

import math

import torch

from bondgrad.errors import positive_float
from bondgrad.policies._policy import Batch, Policy, State, Steps


class Gaussian(Policy):
    """Moves every input by a draw from N(0, sigma).

    Args:
        sigma: Standard deviation, > 0.
    """

    def __init__(self, sigma: float) -> None:
        self.sigma = positive_float("sigma", sigma)

    def steps(self, state: State, batch: Batch, n: int, noise: float) -> Steps:
        """See `Policy.steps`. The reported bounds are zero and infinity."""
        z = batch.normal(n, self.sigma)
        zeros = batch.x.new_zeros(batch.x.shape[1])
        return Steps(z.abs(), z, zeros, torch.full_like(zeros, math.inf))
