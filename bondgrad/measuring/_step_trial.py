"""Slopes at several steps side by side, from which noise and curvature can be told apart."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from bondgrad.measuring._spread import Spread

AMPLITUDE = (2.0, 1.0, 0.5)  # of the noise in the slopes at half the step, at the step and at twice the step


class Differences(NamedTuple):
    """What an estimator's differences are like, in numbers: all that a policy needs to know of it."""

    order: int = 2  # the power of the step with which their error falls
    shared_base: bool = False  # whether all differences of a row are taken from one and the same answer
    draws: int = 1  # perturbations of every entry

    @property
    def noise_gain(self) -> float:
        """The variance of a slope times the square of its step, for outputs with noise of variance 1.

        Both ends of a central difference have noise, over twice the step; a forward difference is over the step.
        """
        return (2 if self.shared_base else 0.5) / self.draws


class StartingPoint(NamedTuple):
    """A box of which nothing is known yet, at some rows of the first training step."""

    spread: Spread  # of the inputs
    reach: Tensor  # [d] the longest sensible step: `spread.reach`, or less between limits
    noise: Tensor  # h² times the variance that noise brings to the slopes, as repeated answers tell
    slopes: Callable[[Tensor], Tensor]  # at steps [d]: [r, d], scaled as in a `StepTrial`


class StepTrial(NamedTuple):
    """What was measured at some rows of a training step.

    Slopes are scaled, as if the loss's gradient at the outputs that depend on an input had norm 1. The scale of the
    loss is gone from them then, and equal noise on the outputs is equal noise in all of them. As a function of the step
    h a slope is

        D(h) = D + T hᵖ + noise / h

    with p the order of the differences.
    """

    differences: Differences
    spread: Tensor  # [d] the longest sensible step: see `StartingPoint.reach`
    step: Tensor  # [r, d] h
    slopes: Tensor  # [3, r, d] D(h/2), D(h), D(2h); not finite where nothing is known
    sound: Tensor  # [r, d] whether no evaluation failed of those behind them
    repeated: Tensor  # [r, d_out] by how much the answers changed when the rows themselves were asked about again

    def noise(self) -> Tensor:
        """Estimates [r, d] of the variance that noise brings to D(h): each from one entry, right on average.

        They come from the combination of the three slopes from which both D and T hᵖ drop out.
        """
        weight = 0.5**self.differences.order
        combination = self.slopes.new_tensor([1, -(1 + weight), weight])  # [3]
        variance = combination @ noise_covariance(self.differences).to(combination) @ combination
        left: Tensor = torch.tensordot(combination, self.slopes, 1)
        return left.square() / variance


def noise_covariance(differences: Differences) -> Tensor:
    """Of the noise in D(h/2), D(h), D(2h): [3, 3], for a variance of 1 in D(h)."""
    amplitude = torch.tensor(AMPLITUDE, dtype=torch.float64, device="cpu")
    independent = amplitude.square().diag()
    # With an end in common, half of every variance is one and the same number.
    return 0.5 * independent + 0.5 * amplitude.outer(amplitude) if differences.shared_base else independent
