"""The health of a box during training, as trials show it: noise, weak or dead signals, and warnings about them."""

import math
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bondgrad.measuring._step_trial import StepTrial


@dataclass(frozen=True)
class HealthSettings:
    """The thresholds of warnings about a box."""

    rounding_units: int = 16  # units of rounding by which answers to the same question may differ
    grown_noise: float = 4.0  # factor of the noise at first that is worth a warning
    first_trials: int = 4  # that say what is usual
    trials_in_a_row: int = 4  # that must agree before anything is said
    settling: int = 64  # rows of trials with which a policy looks for its steps, so that they are not judged yet
    signal: float = 3.0  # standard deviations by which slopes at two steps must agree to count as a signal
    hidden: float = 2.0  # standard deviations of the noise of a slope, below which it counts as hidden
    hidden_share: float = 0.2  # part of the slopes that is hidden, from which on a warning is worth it
    uneven: float = 1e3  # ratio of the slopes of rows that are not hidden from which on one step does not suit all
    uneven_rows: int = 8  # with fewer, rows are not compared
    alive: float = 0.7  # part of its slopes' square that is noise, below which an input has a signal
    noisy_share: float = 0.1  # part of the slopes' square that is noise, from which on every tenth sign or so is wrong


SETTINGS = HealthSettings()


class HealthReport(NamedTuple):
    """What one trial shows about the box."""

    alike: bool  # whether it gave the same answers to the same questions
    noise: float  # standard deviation of its answers to them
    rough: float  # standard deviation of its outputs that differences show, random or not
    signal: float  # how far D(h) agrees with D(h/2) or D(2h), in standard deviations; of few rows never far
    drowned: float  # part of the slopes' square that is noise, at inputs whose slopes are not lost in it
    dead: bool  # whether nothing changed at all
    hidden: float = 0.0  # part of the slopes that the noise of repeated answers hides
    uneven: bool = False  # whether slopes that it does not hide differ by orders of magnitude from row to row
    jumps: tuple[int, ...] = ()  # the inputs along which it jumps, or is piecewise constant, as far as they vary
    rows: int = 0  # of the trial
    woken: int = 0  # dependencies that a found structure lacked, and that were added to it in the course of training


class TrialResult(NamedTuple):
    """What a trial found out about the box, and what it cost."""

    evaluations: int  # spent on it, and on finding a first step
    report: HealthReport | None  # None: the box did not answer
    noise: float  # half-width of the noise on the outputs, as measured now; 0: not known


def examine(trial: StepTrial, y: Tensor) -> HealthReport:
    """The report of one trial. Reading its numbers waits for the device.

    Args:
        trial: What was measured.
        y: [B, d_out] the answers in the forward pass.
    """
    rounding = SETTINGS.rounding_units * torch.finfo(y.dtype).eps * y.abs().nan_to_num(0, 0, 0).amax(0)
    change = trial.repeated.nan_to_num(0, 0, 0)
    sound = trial.sound & torch.isfinite(trial.slopes).all(0)  # [r, d]
    slopes = torch.where(sound, trial.slopes, 0)
    scale = slopes.abs().amax().clamp_min(torch.finfo(y.dtype).tiny)  # so that squares do not overflow
    half, one, two = slopes / scale
    n = sound.sum(0)
    noise = trial._replace(slopes=slopes / scale).noise()
    drowned = noise.sum(0) / one.square().sum(0)  # [d]
    alive = drowned < SETTINGS.alive
    rough = scale * (noise * trial.step.square()).sum(0).div(n).nanmedian().sqrt()
    # By noise alone products would be as its variance, half as large beside D(2h), and twice as large beside D(h/2).
    by_chance = (noise.sum(0) / n).clamp_min(torch.finfo(y.dtype).tiny)  # [d]
    products = torch.stack(((one * two).sum(0) * 2 / by_chance, (half * one).sum(0) / 2 / by_chance))  # [2, d]
    agreement = (products.nansum(1) / n.sum().sqrt()).amax()
    deviation = (change.double().square().mean() / 2).sqrt()
    error = deviation * math.sqrt(trial.differences.noise_gain) / trial.step  # [r, d]
    slope = scale * one.abs()
    seen = sound & (slope > SETTINGS.hidden * error)
    contrast = torch.where(seen, slope, 0).amax(0) / torch.where(seen, slope, math.inf).amin(0)  # [d]
    numbers = (
        (change.abs() <= rounding).all(),
        deviation,
        # Two ends, each with its noise, over twice the step; or over the step.
        rough * (math.sqrt(0.5) if trial.differences.shared_base else math.sqrt(2)),
        agreement,
        torch.where(alive.any(), drowned[alive].median(), drowned.nanmedian()),
        sound.any() & (slopes == 0).all(),
        (1 - seen.sum() / sound.sum()) * (deviation > 0),  # slopes of zero are not hidden where there is no noise
        (contrast > SETTINGS.uneven).double().mean(),
    )
    read = torch.stack([number.double() for number in numbers]).nan_to_num(0, math.inf)  # one transfer for all
    alike, deviation, roughness, signal, drowned, dead, hidden, contrast = read.tolist()
    uneven = contrast > 0.5 and len(sound) >= SETTINGS.uneven_rows
    return HealthReport(alike == 1, deviation, roughness, signal, drowned, dead == 1, hidden, uneven, rows=len(sound))


class HealthMonitor:
    """Compares the reports of trials, and warns once of each thing that is wrong. It is not saved with a model."""

    def __init__(self) -> None:
        self.last: HealthReport | None = None
        self._seen: list[HealthReport] = []  # the first, and the last few
        self._rows = 0  # of all trials
        self._said: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        """The state of a new monitor, with which copies of a layer begin."""
        return HealthMonitor().__dict__

    def watch(self, now: HealthReport) -> None:
        """Take in the report of a trial, and warn of what it and those before it show."""
        self.last = now
        self._rows += now.rows
        first, lately = self._seen[: SETTINGS.first_trials], [*self._seen, now][-SETTINGS.trials_in_a_row :]
        if len(first) == SETTINGS.first_trials:
            if all(v.alike for v in first) and not now.alike:
                self._say(
                    "differs",
                    "the box gave the same answers to the same questions at first, and does so no more: they differ by "
                    f"{now.noise:.2g} (standard deviation). A part of it became random, or rows of a call influence "
                    "one another. Switch that part to evaluation mode if it has one; if not, go on, since steps adapt.",
                )
            usual = max(v.noise for v in first)
            if usual > 0 and all(v.noise > SETTINGS.grown_noise * usual and not v.alike for v in lately):
                self._say(
                    "grew",
                    f"the noise on the box's outputs grew from {usual:.2g} to {now.noise:.2g} (standard deviation): "
                    "gradients have become worse. Look for drift or a loose contact, or average readings (repeats=).",
                )
        if len(lately) == SETTINGS.trials_in_a_row:
            self._warn_of_weakness(lately)
        self._seen = [*first, *lately[1:]] if len(first) == SETTINGS.first_trials else [*self._seen, now]

    def raised(self, error: Exception) -> None:
        """Warn that the box raised an error in a trial."""
        self._say(
            "raised",
            "the box raised an error when it was tried out with other steps than usual, and nothing was learnt then: "
            f"{error} Training goes on. Give limits= within which the box answers.",
        )

    def _warn_of_weakness(self, lately: list[HealthReport]) -> None:
        if all(v.dead for v in lately):
            self._say(
                "dead",
                "the box's outputs do not change at all when its inputs are moved: the network before it learns "
                "nothing. Measure it at these inputs with bondgrad.probe, keep them within the range where it answers, "
                "or take longer steps: policy=bondgrad.policies.Fixed(step).",
            )
        elif all(v.jumps for v in lately):
            self._say(
                "jumps",
                "the box jumps, or is piecewise constant, on the scale on which its inputs vary "
                f"({_numbered(lately[-1].jumps)}): short steps see nothing, or a single jump. Its gradient is taken "
                "over one standard deviation of these inputs, as long as box.stats.health.jumps has them; "
                "policy=bondgrad.policies.Fixed(step) sets another distance.",
            )
        elif self._rows > SETTINGS.settling and not any(v.jumps or v.dead for v in lately):
            self._warn_of_noise(lately)

    def _warn_of_noise(self, lately: list[HealthReport]) -> None:
        now, signal = lately[-1], sum(v.signal for v in lately) / math.sqrt(len(lately))
        size = f"{now.noise or now.rough:.2g}"
        drowned = all(v.drowned > SETTINGS.noisy_share for v in lately)
        if drowned and signal < SETTINGS.signal:
            self._say(
                "silent",
                f"there is no signal in the gradient: differences are almost entirely noise ({size} on the outputs), "
                "and the network before the box learns nothing. Average readings (repeats=), or give the box larger "
                "inputs.",
            )
        elif drowned and "silent" not in self._said:
            coarse = all(v.alike for v in lately)
            cause = "the box's outputs are too rough or coarse" if coarse else "the noise on the outputs is too large"
            remedy = "G" if coarse else "Average readings (repeats=), or g"
            self._say(
                "drowned",
                f"{cause} ({size}): many signs of the gradient are wrong, although the steps are the best that were "
                f"found. {remedy}ive the box larger inputs, or wider limits.",
            )
        elif all(v.uneven and v.hidden > SETTINGS.hidden_share for v in lately):
            self._say(
                "uneven",
                f"the noise on the outputs ({size}) hides {100 * now.hidden:.0f} % of the slopes, while others are a "
                "thousand times larger: one step for each input does not suit all rows. Average readings (repeats=), "
                "or give the box inputs on a scale on which slopes are alike, such as logarithms.",
            )

    def _say(self, kind: str, message: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            warnings.warn(message, stacklevel=2)


def _numbered(inputs: tuple[int, ...], most: int = 4) -> str:
    """The numbers of inputs, not too many of them: "0, 1, 2, 3 and 12 more"."""
    named = inputs if len(inputs) <= most + 1 else inputs[:most]
    more = f" and {len(inputs) - most} more" if len(named) < len(inputs) else ""
    return f"input{'s' if len(inputs) > 1 else ''} {', '.join(map(str, named))}{more}"
