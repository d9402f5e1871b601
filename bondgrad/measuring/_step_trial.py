"""Slopes at half, once and twice a step: they tell noise and curvature apart."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class WeightSettings:
    """The weight of a row in sums: 1 / (the square of its slopes + that of noise + a part of a typical one)."""

    noise: float = 30.0  # variances of the noise; with fewer, rows that noise makes small would count too much
    least: float = 1e-3  # part of the typical square: in trials the median over rows, at the first step their mean


WEIGHTS = WeightSettings()
AMPLITUDE = (2.0, 1.0, 0.5)  # relative noise in the slopes at half the step, at the step and at twice the step


class Differences(NamedTuple):
    """The properties of an estimator's differences that a policy needs to know."""

    order: int = 2  # the power of the step with which their error falls
    shared_base: bool = False  # whether all differences of a row have the unmoved output as one end
    draws: int = 1  # number of perturbations of every entry
    together: bool = False  # whether all inputs move at once

    @property
    def noise_gain(self) -> float:
        """The variance of a slope times the square of its step, for outputs with noise of variance 1.

        Both ends of a central difference have noise, over twice the step; a forward difference is over the step.
        """
        return (2 if self.shared_base else 0.5) / self.draws


class StepTrial(NamedTuple):
    """What was measured at some rows of a training step.

    Slopes are scaled as if the loss's gradient at the outputs that depend on an input had norm 1. They are then
    independent of the scale of the loss, and equal noise on the outputs is equal noise in all of them. As a function of
    the step h a slope is

        D(h) = D + T hᵖ + noise / h

    with p the order of the differences.
    """

    differences: Differences
    spread: Tensor  # [d] the longest sensible step: see `StartingPoint.reach`
    typical: Tensor  # [d] a typical move of an input: see `StartingPoint.typical`
    step: Tensor  # [r, d] the step h
    slopes: Tensor  # [3, r, d] D(h/2), D(h), D(2h); not finite where nothing is known
    sound: Tensor  # [r, d] whether all evaluations behind the slopes succeeded
    repeated: Tensor  # [r, d_out] change of the outputs when the rows themselves were evaluated again
    random: Tensor  # h² times the variance that this noise brings to slopes over steps h; zero with seeds
    far: Tensor | None = None  # [5, r, d] slopes over `PARTS` of `typical`, if the policy looks for jumps

    def noise(self) -> Tensor:
        """Unbiased estimates [r, d] of the variance that noise brings to D(h), each from a single entry.

        They are taken from the linear combination of the three slopes in which both D and T hᵖ cancel.
        """
        weight = 0.5**self.differences.order
        combination = self.slopes.new_tensor([1, -(1 + weight), weight])  # [3]
        variance = combination @ noise_covariance(self.differences).to(combination) @ combination
        left: Tensor = torch.tensordot(combination, self.slopes, 1)
        return left.square() / variance


def noise_covariance(differences: Differences) -> Tensor:
    """The covariance [3, 3] of the noise in D(h/2), D(h), D(2h), for a variance of 1 in D(h)."""
    amplitude = torch.tensor(AMPLITUDE, dtype=torch.float64, device="cpu")
    independent = amplitude.square().diag()
    # With an end in common, half of every variance comes from the noise of that end.
    return 0.5 * independent + 0.5 * amplitude.outer(amplitude) if differences.shared_base else independent
