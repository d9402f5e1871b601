"""Slopes at several steps: they tell noise and curvature apart, and lead to a first step.

For a box of which nothing is known, the step is increased along a ladder until slopes at neighbouring steps agree.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bondgrad.measuring._spread import Spread

AMPLITUDE = (2.0, 1.0, 0.5)  # relative noise in the slopes at half the step, at the step and at twice the step


@dataclass(frozen=True)
class LadderSettings:
    """How the ladder of steps is climbed. The values were found on the boxes of `benchmarks/calibrated.py`."""

    rungs: int = 9  # number of steps; each is four times the one before, the last is the longest sensible step
    more_rungs: int = 12  # most shorter steps that are added for inputs that vary much less than their size
    below: float = 256.0  # the first step is at most the standard deviation of the inputs divided by this
    agreement: float = 0.2  # squared relative difference of two rungs' slopes, from which on they count as noise
    enough: float = 1e-7  # squared relative difference below which no better rung is searched for
    clearance: float = 16.0  # the step stays below one at which no row has a finite output by this factor


SETTINGS = LadderSettings()


class Differences(NamedTuple):
    """The properties of an estimator's differences that a policy needs to know."""

    order: int = 2  # the power of the step with which their error falls
    shared_base: bool = False  # whether all differences of a row have the unmoved output as one end
    draws: int = 1  # number of perturbations of every entry

    @property
    def noise_gain(self) -> float:
        """The variance of a slope times the square of its step, for outputs with noise of variance 1.

        Both ends of a central difference have noise, over twice the step; a forward difference is over the step.
        """
        return (2 if self.shared_base else 0.5) / self.draws


class StartingPoint(NamedTuple):
    """What is measured of a box at some rows of the first training step, to find a first step size."""

    spread: Spread  # spread of the inputs
    reach: Tensor  # [d] the longest sensible step: `spread.reach`, or less between limits
    noise: Tensor  # h² times the variance that noise brings to the slopes, from repeated evaluations
    slopes: Callable[[Tensor], Tensor]  # maps steps [d] to slopes [r, d], scaled as in a `StepTrial`


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
    step: Tensor  # [r, d] the step h
    slopes: Tensor  # [3, r, d] D(h/2), D(h), D(2h); not finite where nothing is known
    sound: Tensor  # [r, d] whether all evaluations behind the slopes succeeded
    repeated: Tensor  # [r, d_out] change of the outputs when the rows themselves were evaluated again

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


class FirstStep(NamedTuple):
    """The step at which slopes agree best, and the size of these slopes."""

    step: Tensor  # [d] the step of each input
    slope: Tensor  # median size of the slopes over inputs; one if no slope was found


def most_slopes() -> int:
    """The largest number of steps at which `climb` measures slopes."""
    return SETTINGS.rungs + SETTINGS.more_rungs


def climb(start: StartingPoint) -> FirstStep:
    """For each input, the step at which the slopes of two neighbouring rungs agree best."""
    reach = start.reach
    best = torch.full_like(reach, math.inf)
    step, size = reach, torch.zeros_like(reach)
    answered = torch.zeros_like(reach)  # the longest step at which all rows had finite outputs
    before: Tensor | None = None
    rungs = SETTINGS.rungs + _more_rungs(start)
    for rung in range(rungs):
        h = reach * 4.0 ** (rung + 1 - rungs)
        slopes = start.slopes(h)  # [r, d]
        if before is not None:
            known = torch.isfinite(slopes) & torch.isfinite(before)
            if not bool(known.any()) and bool((best < math.inf).any()):
                step = torch.minimum(step, h / SETTINGS.clearance)  # the box fails this far out
                break
            apart = torch.where(known, slopes - before, 0).square().sum(0)
            apart = torch.maximum(apart, start.noise * (1 + 16) / h.square() * known.sum(0))  # due to noise
            total = torch.where(known, torch.hypot(slopes, before), 0).square().sum(0)
            score = apart / total
            # Equal slopes are no evidence: outputs that are rounded may not have changed yet.
            score = torch.where((score > 0) & (total > 0), score, math.inf)
            step = torch.where((score < best) & (score < SETTINGS.agreement), h / 2, step)
            size = torch.where(score < best, (total / known.sum(0)).sqrt(), size)
            best = torch.minimum(best, score)
            if bool((best < SETTINGS.enough).all()):
                break
        answered = torch.where(torch.isfinite(slopes).all(0), h, answered)
        before = slopes
    nothing = (best >= SETTINGS.agreement) & (answered > 0)
    step = torch.where(nothing, torch.minimum(step, answered), step)
    sizes = size[(size > 0) & torch.isfinite(size)]
    return FirstStep(step, sizes.median() if len(sizes) else size.new_ones(()))


def _more_rungs(start: StartingPoint) -> int:
    """The number of shorter steps to add to the usual ones, for inputs that vary much less than their size."""
    deviation = start.spread.deviation
    ratio = torch.where(deviation > 0, start.reach / deviation, 1).amax()
    more = 1 + math.ceil(math.log(SETTINGS.below * float(ratio), 4)) - SETTINGS.rungs
    return min(SETTINGS.more_rungs, max(0, more))
