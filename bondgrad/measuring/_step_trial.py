"""Slopes at several steps side by side: they tell noise and curvature apart, and find a first step.

For a box of which nothing is known, a ladder of steps is climbed until slopes agree.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bondgrad.measuring._spread import Spread

AMPLITUDE = (2.0, 1.0, 0.5)  # of the noise in the slopes at half the step, at the step and at twice the step


@dataclass(frozen=True)
class LadderSettings:
    """How the ladder of steps is climbed. The values were found on the boxes of `benchmarks/calibrated.py`."""

    rungs: int = 9  # each step is four times the one before, the last as long as the inputs reach
    more_rungs: int = 12  # that may be added below, for inputs that vary much less than their size
    below: float = 256.0  # the first step is that much shorter than the inputs vary
    agreement: float = 0.2  # relative disagreement of two rungs, squared, from which on they say nothing
    enough: float = 1e-7  # the same, below which no better rung is looked for
    clearance: float = 16.0  # factor by which to stay below a step at which no row had an answer


SETTINGS = LadderSettings()


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
    """The covariance [3, 3] of the noise in D(h/2), D(h), D(2h), for a variance of 1 in D(h)."""
    amplitude = torch.tensor(AMPLITUDE, dtype=torch.float64, device="cpu")
    independent = amplitude.square().diag()
    # With an end in common, half of every variance is one and the same number.
    return 0.5 * independent + 0.5 * amplitude.outer(amplitude) if differences.shared_base else independent


class FirstStep(NamedTuple):
    """The step at which slopes agree best, and how large they are."""

    step: Tensor  # [d]
    slope: Tensor  # the typical size of the slopes: the median over inputs; one where none was seen


def most_slopes() -> int:
    """How often slopes are measured at most."""
    return SETTINGS.rungs + SETTINGS.more_rungs


def climb(start: StartingPoint) -> FirstStep:
    """For each input, the step at which the slopes of two neighbouring rungs agree best."""
    reach = start.reach
    best = torch.full_like(reach, math.inf)
    step, size = reach, torch.zeros_like(reach)
    answered = torch.zeros_like(reach)  # the longest step at which all rows had an answer
    before: Tensor | None = None
    rungs = SETTINGS.rungs + _more_rungs(start)
    for rung in range(rungs):
        h = reach * 4.0 ** (rung + 1 - rungs)
        slopes = start.slopes(h)  # [r, d]
        if before is not None:
            known = torch.isfinite(slopes) & torch.isfinite(before)
            if not bool(known.any()) and bool((best < math.inf).any()):
                step = torch.minimum(step, h / SETTINGS.clearance)  # so far out it does not answer, or raises an error
                break
            apart = torch.where(known, slopes - before, 0).square().sum(0)
            apart = torch.maximum(apart, start.noise * (1 + 16) / h.square() * known.sum(0))  # or by chance
            total = torch.where(known, torch.hypot(slopes, before), 0).square().sum(0)
            score = apart / total
            # Two equal slopes say nothing: a box that rounds its answers has not moved yet.
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
    """How many rungs to add below the usual ones, for inputs that vary much less than their size."""
    deviation = start.spread.deviation
    ratio = torch.where(deviation > 0, start.reach / deviation, 1).amax()
    more = 1 + math.ceil(math.log(SETTINGS.below * float(ratio), 4)) - SETTINGS.rungs
    return min(SETTINGS.more_rungs, max(0, more))
