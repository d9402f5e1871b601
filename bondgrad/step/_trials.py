"""Trials: a few rows of a training step measured at other steps, so that the policy and the layer can learn."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bondgrad.calling._inputs import seen_to_be_finite, with_typical_rows
from bondgrad.errors import BoxError
from bondgrad.measuring._first_step import StartingPoint, climb
from bondgrad.measuring._jumps import PARTS
from bondgrad.measuring._spread import Spread
from bondgrad.measuring._step_trial import StepTrial
from bondgrad.policies import Batch, MeasuringPolicy, Policy, State, Steps
from bondgrad.step._health import HealthReport, TrialResult, examine
from bondgrad.step._neighbourhood import Neighbourhood
from bondgrad.step._perturbations import perturbations
from bondgrad.step._records import Parts, Step, StepInputs
from bondgrad.step._state import PolicyState, Schedule


@dataclass(frozen=True)
class TrialSettings:
    """How many rows trials use, what they may cost, and when they change the noise."""

    start_rows: int = 8  # at which a first step is looked for
    rows: int = 16  # of a trial
    batch_part: int = 4  # trials use at most the batch divided by this, since they must cost less than training
    noise_share: float = 0.01  # of the evaluations of training, for noise="auto" with a policy that does not measure
    rough_factor: float = 8.0  # ratio of roughness to noise of repeated answers from which on the noise is rounding
    noise_change: float = 1.25  # smallest factor by which the assumed noise changes: steps are captured again then


SETTINGS = TrialSettings()


def trial_share(policy: Policy, noise: float | str | None) -> float:
    """The share of the evaluations of training that trials may cost."""
    return policy.share if isinstance(policy, MeasuringPolicy) else SETTINGS.noise_share if noise == "auto" else 0.0


def trial_due(policy: Policy, noise: float | str | None, schedule: Schedule) -> bool:
    """Whether the next training step has a trial."""
    share = trial_share(policy, noise)
    return share > 0 and schedule.due(share, early=isinstance(policy, MeasuringPolicy))


def half_width(noise: float | str | None, measured: float, rounding: float) -> float:
    """The half-width of the noise on the outputs that the policy is told.

    Args:
        noise: As it was given to the layer.
        measured: Half-width as trials found it; 0: not known.
        rounding: Of inputs and outputs.
    """
    if isinstance(noise, float):
        return noise
    return max(rounding, measured) if noise == "auto" else rounding


def assumed_noise(step: StepInputs, measured: float) -> float:
    """The half-width of the noise on the outputs that the policy is told, `measured` being what trials found."""
    rounding = max(torch.finfo(step.x.dtype).eps, step.parts.function.rounding)
    return half_width(step.noise, measured, rounding)


def rows_of(step: StepInputs) -> Batch:
    """The batch for the policy: every time step is a row, and several processes may have a part of the rows each."""
    rows, part, d = step.x, step.forward.part, step.parts.in_features
    if rows.shape[1] != d:
        rows = rows.reshape(-1, d)
    if step.parts.limits is not None and not seen_to_be_finite(rows):  # a policy never sees them
        rows = with_typical_rows(rows)
    sums = None if part.sums is None else part.sums.to(rows.device)
    return Batch(rows, step.generator, part.rows or rows.shape[0], part.first, sums)


class TrialRows:
    """The box at those rows of a batch from which trials choose.

    Args:
        step: The training step.
        box: The box near the whole batch.
        batch: The rows of all time steps.
    """

    def __init__(self, step: StepInputs, box: Neighbourhood, batch: Batch) -> None:
        self.box, self.gy = box, step.gy
        # Where the loss has no gradient nothing can be learnt; so it is with all but the last step of a sequence.
        self.live = (torch.isfinite(step.gy).all(1) & (step.gy != 0).any(1)).nonzero().squeeze(1)
        self.answered = False  # whether the box gave any answer when a first step was looked for
        self.spread = Spread.of(batch.x, batch.sums, batch.rows)
        self.reach = self.spread.reach  # [d]
        self.room: Tensor | None = None
        if box.low is not None and box.high is not None:
            room = (box.high - box.low)[: len(self.reach)] / 4  # where a step can be doubled, in most places
            self.reach, self.room = torch.minimum(self.reach, room), 1.5 * room

    def starting_point(self) -> StartingPoint:
        """What a measuring policy needs to find its first step."""
        rows = RowSubset(self, SETTINGS.start_rows)
        shape = (self.box.parts.estimator.draws, *rows.x.shape)
        # Any directions will do, if only they are the same at every step.
        generator = torch.Generator("cpu").manual_seed(0)
        sign = torch.empty(shape, device="cpu").uniform_(-1, 1, generator=generator).to(rows.x)

        def slopes(h: Tensor) -> Tensor:
            measured = rows.slopes(h.expand(shape), sign)[0]
            self.answered |= bool(torch.isfinite(measured).any())
            return measured

        together = self.box.parts.estimator.together
        return StartingPoint(self.spread, self.reach, rows.noise(), slopes, self.room, together)

    def trial(self, steps: Steps, slopes: Tensor | None = None, looks_for_jumps: bool = False) -> StepTrial:
        """Measure slopes at some rows with these steps, with half and with twice as long ones.

        The slopes [B, W] with the steps themselves are not measured again if they are given. See `StepTrial.far` for
        what else is measured to look for jumps.
        """
        rows = RowSubset(self, SETTINGS.rows)
        size, sign = rows.of(steps.size), rows.of(steps.sign)  # [n, r, d]
        half, sound = rows.slopes(size / 2, sign)
        twice, also_sound = rows.slopes(size * 2, sign)
        once = rows.slopes(size, sign)[0] if slopes is None else rows.scaled(slopes[rows.which] / rows.size)
        step = size[0] if len(size) == 1 else size.square().mean(0).sqrt()
        repeated = rows.box.ask_again("trial") - rows.box.y
        differences, measured = self.box.parts.estimator.differences, torch.stack((half, once, twice))
        typical = torch.minimum(self.spread.typical, self.reach)
        far = None
        # Of fewer rows the spread is not known, and where all inputs move together a slope is that of all.
        if looks_for_jumps and len(self.box.x) >= SETTINGS.start_rows and not self.box.parts.estimator.together:
            far = torch.stack([rows.slopes((part * typical).to(size).expand_as(size), sign)[0] for part in PARTS])
        random = rows.variance(repeated[None])
        return StepTrial(differences, self.reach, typical, step, measured, sound & also_sound, repeated, random, far)

    def trial_at_first_step(self, batch: Batch) -> StepTrial:
        """A trial for a policy that does not measure, with steps at which slopes of the box agree."""
        step, grid = climb(self.starting_point()).step.to(batch.x), self.box.parts.grid
        step = step if grid is None else grid.moves(step, MeasuringPolicy.resolution_steps)
        generator = torch.Generator(batch.x.device).manual_seed(0)
        draws = self.box.parts.estimator.draws
        sign = batch._replace(generator=generator).uniform(draws)
        return self.trial(Steps(step.expand(draws, *batch.x.shape), sign, step, step))


class RowSubset:
    """Some rows of a batch, evenly spaced; all of them, if the box keeps a state about them."""

    def __init__(self, rows: TrialRows, wanted: int) -> None:
        box = rows.box
        (batch, width), d = box.x.shape, len(rows.reach)
        live = torch.arange(batch, device=box.x.device) if box.whole else rows.live
        most = max(1, min(wanted * d // width, batch // SETTINGS.batch_part))
        count = batch if box.whole else min(len(live), most)
        self.which = live[torch.arange(count, device=live.device) * len(live) // count]
        self.box = box.subset(self.which)
        gy = rows.gy[self.which]
        self.size = gy.abs().amax(1, keepdim=True)  # [r, 1], divided out first, so that squares do not overflow
        self.gy = gy / self.size  # not finite where gy is zero: nothing can be learnt there
        self.x = self.box.x.reshape(-1, d)  # [r, d]
        self.norm = self.box.output_norm(self.gy)
        self.seeded = box.parts.function.seed_position is not None

    def of(self, t: Tensor) -> Tensor:
        """The entries [n, r, d] for these rows of a tensor [n, B·T, d] about all rows."""
        return t.reshape(len(t), -1, self.box.x.shape[1])[:, self.which].view(len(t), *self.x.shape)

    def scaled(self, slopes: Tensor) -> Tensor:
        """Slopes [b, W] for `gy`, divided by the norm of `gy` at the outputs that depend on each input: [r, d]."""
        return (slopes / self.norm).reshape(self.x.shape)

    def noise(self) -> Tensor:
        """h² times the variance of slopes over steps h, from repeated answers; zero with seeds, which cancel."""
        if self.seeded:
            return self.x.new_zeros(())
        times = 1 if self.box.whole else -(-SETTINGS.start_rows // len(self.which))
        return self.variance(torch.stack([self.box.ask_again("trial") - self.box.y for _ in range(times)]))

    def variance(self, change: Tensor) -> Tensor:
        """The same, given how outputs changed when rows were evaluated again: [times, r, W_out]."""
        weight = self.gy.square().expand_as(change)
        known = torch.isfinite(change) & torch.isfinite(weight)
        variance = torch.where(known, change.square() * weight, 0).sum() / torch.where(known, weight, 0).sum() / 2
        noise = (variance * self.box.parts.estimator.differences.noise_gain).nan_to_num(0, 0, 0)
        return noise * (not self.seeded)

    def slopes(self, size: Tensor, sign: Tensor) -> tuple[Tensor, Tensor]:
        """The scaled slopes [r, d] over steps of that size [n, r, d], and which of them had all their evaluations."""
        parts = self.box.parts
        delta = perturbations(self.x, size, sign, parts.policy.least_ulps, parts.grid)
        delta = delta.view(len(delta), *self.box.x.shape)
        slopes, sound = self.box.trial_slopes(self.gy, delta)
        return self.scaled(slopes), sound.view(self.x.shape)


def result_of(trial: StepTrial, step: StepInputs, evaluations: int, state: State) -> TrialResult:
    """What a trial found out, in the form in which the layer keeps it; `state` is that of the policy before it."""
    if not bool(trial.sound.any()):  # it did not answer
        return TrialResult(evaluations, None, step.schedule.noise)
    policy = step.parts.policy
    report, jumps = examine(trial, step.y), policy.jumps(state) if isinstance(policy, MeasuringPolicy) else None
    report = report if jumps is None else report._replace(jumps=tuple(jumps.nonzero().flatten().tolist()))
    seeded = step.parts.function.seed_position is not None
    if seeded:  # other seeds, other answers, if only by less than rounding; what both ends have in common hides nothing
        report = report._replace(alike=False, hidden=0.0)
    return TrialResult(evaluations, report, measured_noise(report, step.schedule.noise, seeded))


def measured_noise(report: HealthReport, before: float, seeded: bool) -> float:
    """The half-width of the noise on the outputs after a trial.

    Args:
        report: Of the trial.
        before: The half-width as it was known before the trial; 0: not known.
        seeded: Whether the box takes a seed, so that its random numbers are the same at both ends of a move.
    """
    # Answers that differ say it best. But noise that both ends of a move have in common does no harm, and answers that
    # are rounded may be all alike.
    random = not seeded and report.noise * SETTINGS.rough_factor > report.rough
    deviation = report.noise if random else report.rough
    noise = math.sqrt(3) * deviation  # half-width of a uniform distribution
    if before > 0 and noise > 0:
        noise = math.sqrt(noise * before)
    change = SETTINGS.noise_change
    return before if not math.isfinite(noise) or 1 / change < noise / (before or math.inf) < change else noise


def standard_error(parts: Parts, policy_state: PolicyState, last: Steps | None, seen: Step) -> Tensor:
    """See `BlackBox.standard_error`."""
    policy = parts.policy
    if last is None or not isinstance(policy, MeasuringPolicy):
        raise BoxError(f"{policy} does not measure the noise: use policy='calibrated', and ask in a step hook")
    size = last.size.square().mean(0).sqrt().view(seen.x.shape)
    if parts.limits is not None:  # moves are cut short there
        low, high = parts.limits.like(seen.x)
        size = (torch.minimum(seen.x + size, high) - torch.maximum(seen.x - size, low)) / 2
    error = policy.standard_error(policy_state.read(seen.x.device), size)
    x, gy = seen.x.flatten(1), seen.gy.flatten(1)  # [B, W] and [B, W_out], of sequences too
    norm = Neighbourhood(parts, x, gy).output_norm(gy)
    return (error.flatten(1) * norm).view(seen.x.shape)
