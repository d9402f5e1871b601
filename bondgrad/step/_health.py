"""Whether all is well with a box that is being trained through, as far as trials tell."""

import math
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bondgrad.errors import BoxError
from bondgrad.estimators import Estimator
from bondgrad.policies import Trial

ROUNDING = 16  # units of rounding by which answers to the same question may differ
GREW = 4.0  # times as much noise as at first
AT_FIRST = 4  # trials
IN_A_ROW = 4  # trials that must agree before anything is said
CERTAIN = 3.0  # standard deviations
DROWNED = 0.1  # noise in the square of the slopes, from which on every tenth sign or so is wrong


class Vitals(NamedTuple):
    """What one trial says of the box."""

    alike: bool  # whether it gave the same answers to the same questions
    noise: float  # standard deviation of its answers to them
    rough: float  # standard deviation of its outputs that differences show, random or not
    signal: float  # how far slopes at one step tell those at another, in standard deviations; of few rows never far
    drowned: float  # part of the slopes' square that is noise
    at_limit: float  # part of the inputs whose steps are as long as they may be
    dead: bool  # whether nothing changed at all


def examine(trial: Trial, y: Tensor, estimator: Estimator) -> Vitals:
    """What a trial says. Looks at values, so that it waits for the device.

    Args:
        trial: What was measured.
        y: [B, d_out] the answers in the forward pass.
        estimator: That the slopes were measured with.
    """
    rounding = ROUNDING * torch.finfo(y.dtype).eps * y.abs().nan_to_num(0, 0, 0).amax(0)
    change = trial.repeated.nan_to_num(0, 0, 0)
    sound = trial.sound & torch.isfinite(trial.slopes).all(0)  # [r, d]
    slopes = torch.where(sound, trial.slopes, 0)
    scale = slopes.abs().amax().clamp_min(torch.finfo(y.dtype).tiny)  # lest squares overflow
    _, one, two = slopes / scale
    n = sound.sum(0)
    noise = trial._replace(slopes=slopes / scale).noise(estimator.order, estimator.shared)
    share = (noise.sum(0) / n).nanmedian()
    rough = scale * (noise * trial.step.square()).sum(0).div(n).nanmedian().sqrt()
    # Noise alone would give products of the mean square that the noise itself has, half as much at twice the step.
    by_chance = (noise.sum(0) / n / 2).clamp_min(torch.finfo(y.dtype).tiny)  # [d]
    agreement = ((one * two).sum(0) / by_chance).nansum() / n.sum().sqrt()
    numbers = torch.stack(
        (
            (change.abs() > rounding).any().double(),
            (change.double().square().mean() / 2).sqrt(),
            # Two ends, each with its noise, over twice the step; or over the step.
            (rough * (math.sqrt(0.5) if estimator.shared else math.sqrt(2))).double(),
            agreement.double(),
            (share / (two.square().sum(0) / n).nanmedian()).double(),
            (trial.step[0] >= 0.99 * trial.spread).double().mean(),
            (sound.any() & (slopes == 0).all()).double(),
        )
    )
    differ, spread, rough_, signal, drowned, at_limit, dead = numbers.nan_to_num(0, math.inf).tolist()
    return Vitals(differ == 0, spread, rough_, signal, drowned, at_limit, dead == 1)


class Health:
    """Watches trials, and says once what is wrong. Not part of a layer's state."""

    def __init__(self) -> None:
        self.last: Vitals | None = None
        self._seen: list[Vitals] = []  # the first, and the last few
        self._said: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins anew."""
        return Health().__dict__

    def watch(self, now: Vitals) -> None:
        """After a trial."""
        self.last = now
        first, lately = self._seen[:AT_FIRST], [*self._seen, now][-IN_A_ROW:]
        if len(first) == AT_FIRST:
            if all(v.alike for v in first) and not now.alike:
                self._say(
                    "differs",
                    "the box gave the same answers to the same questions at first, and does so no more: they differ by "
                    f"{now.noise:.2g} (standard deviation). Was something in it switched to training mode, or did a "
                    "device wake up?",
                )
            usual = max(v.noise for v in first)
            if usual > 0 and all(v.noise > GREW * usual for v in lately):
                self._say(
                    "grew",
                    f"the noise on the box's outputs grew from {usual:.2g} to {now.noise:.2g} (standard deviation): "
                    "gradients have become worse. Is the device drifting or loose?",
                )
        if len(lately) == IN_A_ROW:
            self._warn_of_weakness(lately)
        self._seen = [*first, *lately[1:]] if len(first) == AT_FIRST else [*self._seen, now]

    def raised(self, error: BoxError) -> None:
        """In a trial."""
        self._say(
            "raised",
            "the box raised an error when it was tried out with other steps than usual, and nothing was learnt then. "
            f"Training goes on; limits= keeps points inside the range where it answers. {error}",
        )

    def _warn_of_weakness(self, lately: list[Vitals]) -> None:
        now = lately[-1]
        if all(v.dead for v in lately):
            self._say(
                "dead",
                "the box's outputs do not change at all when its inputs are moved: the network before it learns "
                "nothing. Do the inputs reach it, and is it within the range where it answers?",
            )
        elif all(v.signal < CERTAIN and v.drowned > 1 and not v.dead for v in lately):
            self._say(
                "silent",
                "there is no signal in the gradient: differences are nothing but noise "
                f"({now.noise or now.rough:.2g} on the outputs). The network before the box learns nothing; average "
                "several readings, or give the box larger inputs.",
            )
        elif "silent" not in self._said and all(v.drowned > DROWNED and v.at_limit >= 0.5 for v in lately):
            if all(v.alike for v in lately):
                self._say(
                    "drowned",
                    f"the box's outputs are too rough or too coarse ({now.rough:.2g}) for its gradient: many signs are "
                    "wrong, although the steps are as long as the spread of the inputs. Does it answer in few levels? "
                    "Give it larger inputs, or wider limits.",
                )
            else:
                self._say(
                    "drowned",
                    f"noise on the outputs ({now.noise or now.rough:.2g}) spoils many signs of the gradient, although "
                    "the steps are as long as the spread of the inputs. Average several readings, give the box larger "
                    "inputs, or wider limits.",
                )

    def _say(self, kind: str, message: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            warnings.warn(message, stacklevel=2)
