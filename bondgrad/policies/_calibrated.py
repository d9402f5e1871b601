"""The default policy: steps from measured noise and curvature."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bondgrad.calling._grid import Grid
from bondgrad.errors import positive_int
from bondgrad.measuring._first_step import StartingPoint, climb, most_slopes
from bondgrad.measuring._jumps import PARTS, JumpEvidence
from bondgrad.measuring._spread import Spread, input_sums
from bondgrad.measuring._step_trial import Differences, StepTrial
from bondgrad.policies._new_steps import ROUNDS, if_rough, next_round
from bondgrad.policies._policy import Batch, MeasuringPolicy, Observation, State, Steps
from bondgrad.policies._trial_sums import COUNT, TrialSums


@dataclass(frozen=True)
class CalibrationSettings:
    """Constants of `Calibrated`. The values were tuned on the boxes of `benchmarks/calibrated.py`."""

    trial_rows: int = 16  # the number of rows of a whole trial
    small_trials: int = 4  # the number of batches that make a whole trial at most, where batches are small
    rounds: tuple[int, ...] = (1, 1, 2, 2, 3, 4, 6, 8)  # whole trials in each round; after a round steps change
    first_looks: float = 20.0  # rows at which jumps are looked for in every trial; later in every fourth round
    past_looks: float = 80.0  # rows of later looks, after which earlier ones have lost all but 1/e of their weight
    past_spread: float = 0.9  # weight of earlier trials in the spread
    off_spread: float = 1.5  # factor by which steps may differ from the spread of a batch, if there are jumps
    shrunk_spread: float = 8.0  # factor by which the spread of a batch may fall before steps shrink with it
    spread_rows: int = 8  # the least number of rows of a batch whose spread is used
    # The policy starts again if the variance of slopes has grown by a factor of `lost_noise`, and is at least the part
    # `lost_share` of the squared slopes, at `lost_rows` rows or more.
    lost_noise: float = 100.0
    lost_share: float = 0.1
    lost_rows: int = 4


SETTINGS = CalibrationSettings()
NOT_LIMITED = 1e30  # a longest step that is none
SUMS = COUNT + len(JumpEvidence._fields)  # rows of a summary that are sums over rows


class Calibrated(MeasuringPolicy):
    """Chooses the step with the least error for the measured noise and curvature.

    The error of a slope D(h) over a step h has two parts: noise, which falls with h, and bending (truncation), which
    grows with a power of h. A trial measures the slopes of some rows at h/2, h and 2h, for less than one evaluation in
    20. The combination of the three from which both the gradient and the first term of bending drop out is noise alone.
    The part of D(h) that D(2h) does not predict, less that noise, is bending. Every input then gets the step at which
    both errors together are least, relative to its slope.

    Bending counts in full where it differs from row to row. A factor common to all slopes of an input, as of a box that
    saturates, leaves signs right and counts for a tenth. Slopes are those for a loss gradient of norm 1, and steps are
    relative to the spread of their inputs (the standard deviation, or half the root mean square if that is more), so
    that neither the scale of the loss nor the units of inputs and outputs matter; rows with small slopes count as much
    as those with large ones. With eight rows or more no step is longer than four times that spread, nor than the spread
    if the box fails at some rows over it. An input without a signal follows the others.

    The first step of all comes from a ladder of steps, on which each input starts where two neighbouring rungs agree
    best. It is climbed again when there is suddenly much more noise. It also shows whether the box jumps, or is
    piecewise constant, on the scale of the spread: every input is then moved by its standard deviation.

    Choosing a policy: this one is the default, since it needs no numbers and follows changes of noise and data. Take
    `Bond` to train as the paper does, `Fixed` if you know a step that is right for all inputs, and `Optimal` if you
    know the noise and the third derivative. `BlackBox(noise=...)` has no influence here. All estimators work; of one
    that moves all inputs together, such as `Simultaneous`, only the common length of the steps is adjusted.

    Args:
        readings: The most readings that may be taken of every point, of a box that answers at random: this is its
            budget, as a factor on the evaluations. Longer steps cost nothing and come first. Readings are doubled until
            the best steps leave errors below a hundredth of the squared slopes. `BlackBox.repeats` says how many are
            taken now.

    References:
        P. Gill, W. Murray, M. Saunders, M. Wright, "Computing forward-difference intervals for numerical optimization",
        SIAM Journal on Scientific and Statistical Computing, 1983, for the balance of the two errors.
        H.-J. Shi, Y. Xie, M. Xuan, J. Nocedal, "Adaptive finite-difference interval estimation for noisy
        derivative-free optimization", SIAM Journal on Scientific Computing, 2022, for testing ratios of differences.
    """

    share = 0.04
    start_slopes = most_slopes()

    def __init__(self, readings: int = 1) -> None:
        self.most_readings = positive_int("readings", readings)

    def __repr__(self) -> str:
        return f"Calibrated({'' if self.most_readings == 1 else f'readings={self.most_readings}'})"

    def init(self, in_features: int) -> State:
        """See `Policy.init`."""
        zeros = torch.zeros(in_features, dtype=torch.float32)
        return {
            "step": zeros,  # h; zero: not known yet
            "noise": torch.zeros((), dtype=torch.float32),  # h² times the variance of D(h), in units²
            "spread": zeros.clone(),  # see `StartingPoint.reach`; of inputs with jumps `StartingPoint.typical`
            "sums": zeros.expand(COUNT, -1).clone(),  # over the rows of this round: see `TrialSums`
            "farthest": zeros + NOT_LIMITED,  # the longest step that fits between limits
            "unit": torch.ones((), dtype=torch.float32),  # the unit of slopes, so that their squares do not overflow
            "round": torch.zeros((), dtype=torch.float32),  # completed rounds: see `RoundSettings.settled`
            "jumps": zeros.clone(),  # mean roughness along inputs with jumps; zero of others, or `SMOOTH_AFTER_ALL`
            "evidence": zeros.expand(len(JumpEvidence._fields), -1).clone(),  # whether there are jumps
            "readings": torch.ones((), dtype=torch.float32),  # of every point
        }

    def measure(self, x: Tensor) -> Tensor:
        """See `Policy.measure`: the sums from which `Spread` follows."""
        return input_sums(x)

    def start(self, state: State, start: StartingPoint) -> State:
        """See `MeasuringPolicy.start`."""
        first = climb(start)
        jumps, unit = first.jumps, first.slope.clamp(1e-30, 1e30)
        step, spread = (torch.where(jumps, start.typical, of) for of in (first.step, start.reach))
        jumps, evidence = ROUNDS.jumping * jumps, torch.stack(first.evidence)
        found = {"step": step, "spread": spread, "unit": unit, "jumps": jumps, "evidence": evidence}
        found |= {} if start.room is None else {"farthest": start.room}
        return state | {name: value.float() for name, value in found.items()}

    def needs_start(self, state: State) -> bool:
        """See `MeasuringPolicy.needs_start`."""
        return not float(state["step"].amin()) > 0

    def looks_for_jumps(self, state: State) -> bool:
        """See `MeasuringPolicy.looks_for_jumps`: seldom after the first rows, since it costs as much as two trials."""
        begins, number = not bool(state["sums"].any()), int(state["round"])
        if begins and number == 0:  # the ladder of the first step is a look
            return False
        return float(state["evidence"][0].amax()) < SETTINGS.first_looks or (begins and number % 4 == 1)

    def jumps(self, state: State) -> Tensor:
        """See `MeasuringPolicy.jumps`."""
        return state["jumps"] > 0

    def readings(self, state: State) -> int | None:
        """See `MeasuringPolicy.readings`."""
        return None if self.most_readings == 1 else int(state["readings"])

    def settable(self, state: State, grid: Grid) -> State:
        """See `Policy.settable`."""
        h = state["step"]
        return state | {"step": torch.where(h > 0, grid.moves(h, self.resolution_steps), h)}

    def steps(self, state: State, batch: Batch, n: int, noise: float) -> Steps:
        """See `Policy.steps`."""
        h = size = state["step"].to(batch.x.dtype)
        if batch.rows >= SETTINGS.spread_rows:
            spread = Spread.of(batch.x, batch.sums, batch.rows)
            shrunk = h * _shrinking(state, spread.reach, batch.rows).to(h.dtype)
            off = SETTINGS.off_spread
            size = torch.where(state["jumps"] > 0, h.clamp(spread.typical / off, spread.typical * off), shrunk)
        return Steps(size.expand(n, *batch.x.shape), batch.uniform(n), h, h)

    def standard_error(self, state: State, size: Tensor) -> Tensor:
        """See `MeasuringPolicy.standard_error`."""
        error = torch.where(state["round"] > 0, state["noise"].sqrt() * state["unit"], math.nan)
        return error.to(size.dtype) / size

    def summarize(self, state: State, seen: Observation) -> Tensor:
        """See `Policy.summarize`: [COUNT + 4 + 9, d], with the sums of a trial, and its evidence of jumps.

        The last nine rows are averaged over processes: the longest sensible and the typical move, whether repeated
        answers differ, and their weight, which are zero without a trial; the logarithms of step, unit and longest step,
        the roughness of jumps, and their weight, which are zero without a step.
        """
        step, trial = seen.steps.lower, seen.trial
        one = torch.ones_like(step)
        unit, jumps = state["unit"].expand_as(step), state["jumps"]
        start = torch.stack((step.log(), unit.log(), state["farthest"].log(), jumps, one)).where(step > 0, 0)
        sums, moves = torch.zeros_like(step).expand(SUMS, -1), torch.zeros_like(step).expand(4, -1)
        if trial is not None:
            sums = TrialSums.of(trial, state["unit"], state["step"].clamp_min(torch.finfo(torch.float32).tiny))
            sums = torch.cat((sums, torch.stack(_evidence(trial)).float()))
            random = (trial.repeated.nan_to_num(0) != 0).any().to(one)
            moves = torch.stack((trial.spread, trial.typical, random.expand_as(one), one))
        return torch.cat((sums.float(), torch.cat((moves, start)).float() * len(seen.g)))

    def observe(self, state: State, summary: Tensor, rows: int, differences: Differences) -> State:
        """See `Policy.observe`."""
        summary = summary.float()
        (reach, typical, random, tried), (*begun, weight) = summary[SUMS : SUMS + 4], summary[SUMS + 4 :]
        if self.needs_start(state) and float(weight.amin()) > 0:  # several processes, each with a start of its own
            step, unit, farthest = (torch.exp(total / weight) for total in begun[:3])
            jumps = if_rough(begun[3] / weight, 0)
            state = state | {"step": step, "unit": unit.mean(), "farthest": farthest, "jumps": jumps}
        sums = TrialSums(*summary[:COUNT])
        if self.needs_start(state) or not float(sums.rows.amax()) > 0:  # no trial
            return state
        if _noise_jumped(state, sums):
            return {name: value.to(reach.device) for name, value in self.init(len(reach)).items()}
        evidence, found = _jumps_found(state, summary[COUNT:SUMS])
        jumps = torch.where(found, ROUNDS.jumping, state["jumps"])
        spread = torch.where(jumps > 0, typical, reach) / tried
        shrinking = _shrinking(state, spread, rows)  # the same factors as in `steps`
        new = (shrinking < 1) | (state["spread"] == 0) | found
        state = state | {
            "step": torch.where(found, spread, state["step"] * shrinking),
            "sums": torch.where(new, 0, state["sums"]) + torch.where(found, 0, summary[:COUNT]),
            "spread": torch.where(new, spread, torch.lerp(spread, state["spread"], SETTINGS.past_spread)),
            "jumps": jumps,
            "evidence": evidence,
        }
        a_trial = min(SETTINGS.trial_rows, SETTINGS.small_trials * float(sums.rows.amax()))
        wanted = a_trial * SETTINGS.rounds[min(int(state["round"]), len(SETTINGS.rounds) - 1)]
        tried_rows = float(TrialSums(*state["sums"]).rows.amax())
        most = self.most_readings if bool(random.amax() > 0) else 1
        return state if tried_rows < wanted else next_round(state, rows < SETTINGS.spread_rows, differences, most)


def _evidence(trial: StepTrial) -> JumpEvidence:
    """What a trial says of jumps."""
    typical = trial.typical
    if trial.far is None:
        return JumpEvidence(*torch.zeros(len(JumpEvidence._fields), len(typical), device=typical.device))
    # The trial's own steps may be so short that next to no row meets a jump over them.
    short = trial.step * 2 < PARTS[1] * typical  # [r, d]
    shorter = torch.stack([torch.where(short, own, trial.far[0]) for own in trial.slopes])
    variance = trial.random / (PARTS[1] * typical).square()
    return JumpEvidence.of(torch.cat((trial.far[:1], shorter)), trial.far[1:], variance)


def _jumps_found(state: State, evidence: Tensor) -> tuple[Tensor, Tensor]:
    """All evidence of jumps with that of this trial [4, d], and the inputs [d] along which they are found by it."""
    if not bool(evidence.any()):  # none was looked for
        return state["evidence"], torch.zeros_like(state["step"], dtype=torch.bool)
    evidence = torch.exp(-evidence[0].amax() / SETTINGS.past_looks) * state["evidence"] + evidence
    return evidence, JumpEvidence(*evidence).jumps() & (state["jumps"] == 0)


def _shrinking(state: State, spread: Tensor, rows: int) -> Tensor:
    """The factors [d] that shorten the steps of inputs that vary much less than at the last trial; 1 for others."""
    allowed = SETTINGS.shrunk_spread if rows >= SETTINGS.spread_rows else math.inf
    return (allowed * spread / state["spread"]).clamp(max=1)


def _noise_jumped(state: State, sums: TrialSums) -> bool:
    """Whether the noise has grown so much that the steps must be found anew: see `CalibrationSettings.lost_noise`."""
    smooth = state["jumps"] <= 0  # jumps look like noise, and come and go
    if not bool(smooth.any()):
        return False
    noise = (sums.noise / sums.sound)[smooth].nanmedian()
    before = (state["noise"] / state["step"].square())[smooth].median()
    square = (sums.square / sums.weight)[smooth].median()
    lost = (noise > SETTINGS.lost_noise * before) & (noise > SETTINGS.lost_share * square)
    return bool(lost & (sums.rows.amax() >= SETTINGS.lost_rows) & (state["round"] > 0))
