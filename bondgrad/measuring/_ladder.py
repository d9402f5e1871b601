"""A first step for a box of which nothing is known: a ladder of steps is climbed until slopes agree."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bondgrad.measuring._step_trial import StartingPoint


@dataclass(frozen=True)
class LadderSettings:
    """Of the climb. The values were found on the boxes of `benchmarks/calibrated.py`."""

    rungs: int = 9  # each step is four times the one before, the last as long as the inputs reach
    more_rungs: int = 12  # that may be added below, for inputs that vary much less than their size
    below: float = 256.0  # the first step is that much shorter than the inputs vary
    agreement: float = 0.2  # relative disagreement of two rungs, squared, from which on they say nothing
    enough: float = 1e-7  # the same, below which no better rung is looked for
    clearance: float = 16.0  # factor by which to stay below a step at which no row had an answer


SETTINGS = LadderSettings()


class FirstStep(NamedTuple):
    """Where slopes agree best."""

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
    """Than usual, for inputs that vary much less than their size."""
    deviation = start.spread.deviation
    ratio = torch.where(deviation > 0, start.reach / deviation, 1).amax()
    more = 1 + math.ceil(math.log(SETTINGS.below * float(ratio), 4)) - SETTINGS.rungs
    return min(SETTINGS.more_rungs, max(0, more))
