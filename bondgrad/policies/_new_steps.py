"""New steps after a round of trials: those with the least errors, kept to where anything is known of the box."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bondgrad.measuring._step_trial import Differences
from bondgrad.policies._best_step import best_factor, least_readings
from bondgrad.policies._policy import State
from bondgrad.policies._trial_sums import SlopeErrors, TrialSums, roughness_at_best


@dataclass(frozen=True)
class RoundSettings:
    """What a round of trials changes. The values were tuned on the boxes of `benchmarks/calibrated.py`."""

    past_noise: float = 0.5  # weight of earlier rounds in the noise
    changed_noise: float = 4.0  # ratio of variances beyond which the earlier value has no weight
    # Roughness: noise makes D(h/2) and D(h) differ four times as much as D(h) and D(2h), on average, jumps twice,
    # and bending a sixteenth. At the best step of a smooth box with noise both are nearly alike.
    rough: float = 1.0  # from which on shorter steps are no better
    very_rough: float = 1.5  # from which on steps grow by `growth`
    growth: float = 2.0
    explained: float = 0.5  # part of it that repeated answers explain, from which on steps grow as their noise asks for
    too_long: float = 0.5  # factor on steps over which slopes are much smaller, or hardly any row has a slope
    jumping: float = 2.0  # what is supposed of a box with jumps at first
    smooth: float = 0.6  # mean over rounds, the last of which counts half, below which a box does not jump
    signal: float = 3.0  # standard errors by which slopes must exceed the noise to count as a signal
    answered: float = 0.7  # part of the rows at which no evaluation failed, below which an input counts as failing
    lost: float = 0.3  # part of the rows with any slopes, below which the step of an input is too long
    farthest: float = 4.0  # longest step, in units of the spread of the input
    farthest_few: float = 64.0  # longest step where batches have too few rows to show a spread
    farthest_failing: float = 1.0  # longest step of an input at which evaluations failed at some rows
    settled: float = 0.5  # octaves; after a round that changes most steps by more, the next one is not longer


ROUNDS = RoundSettings()
SMOOTH_AFTER_ALL = -1.0  # roughness of an input that seemed to jump, and does not over the steps that it then gets


def next_round(state: State, few: bool, differences: Differences, most_readings: int = 1) -> State:
    """The state of `Calibrated` with new steps, after a round of trials.

    Args:
        state: Before, with the sums of the round.
        few: Whether batches have too few rows to show the spread of their inputs.
        differences: Of the estimator.
        most_readings: The most readings that may be taken of every point.
    """
    h, spread, sums = state["step"], state["spread"], TrialSums(*state["sums"])
    noise = mean_noise(state, sums)
    errors = SlopeErrors.of(sums, noise / h.square(), differences, state["jumps"] > 0)
    jumps = _still_jumping(state["jumps"], errors)
    smooth = SlopeErrors(*(part[jumps <= 0] for part in errors))  # slopes over jumps are no better with more readings
    readings = least_readings(smooth, state["readings"], most_readings if len(smooth.noise) else 1, differences.order)
    less = state["readings"] / readings  # noise of the mean of readings
    noise, errors = noise * less, errors._replace(noise=errors.noise * less)

    factor = _factor(errors, spread / h, differences)
    factor = torch.where(sums.rows < ROUNDS.lost * sums.rows.amax(), ROUNDS.too_long, factor)
    relative = _where_no_signal(h * factor / spread, sums, errors, jumps, few)
    if differences.together:  # the slope over a short step of one input would be lost in what others add over long ones
        relative = relative.log().mean().exp().expand_as(relative)
    answered = sums.sound >= ROUNDS.answered * sums.rows.amax()
    farthest = torch.where(answered, ROUNDS.farthest_few if few else ROUNDS.farthest, ROUNDS.farthest_failing)
    step = torch.where(jumps > 0, spread, torch.minimum(relative, farthest) * spread)
    step = torch.minimum(step, state["farthest"])
    settled = (step / h).log2().median().abs() < ROUNDS.settled
    number = torch.where(settled, state["round"] + 1, state["round"].clamp_min(1))  # after the first the noise is known
    found = {"step": step, "noise": noise, "jumps": jumps, "readings": readings, "round": number}
    return state | found | {"sums": torch.zeros_like(state["sums"])}


def mean_noise(state: State, sums: TrialSums) -> Tensor:
    """h² times the variance of the slopes: one number, since all inputs act through the same noisy outputs."""
    smooth = state["jumps"] <= 0  # jumps look like noise as well
    smooth |= ~smooth.any()
    # The median over inputs, since bending that is no power of h looks like noise. NaN: evaluations failed at all rows.
    measured = (sums.noise / sums.sound * state["step"].square())[smooth].nanmedian()
    before = state["noise"]
    alike = 1 / ROUNDS.changed_noise < float(measured / before) < ROUNDS.changed_noise
    return torch.where(measured.isnan(), before, torch.lerp(measured, before, ROUNDS.past_noise * alike))


def if_rough(roughness: Tensor, otherwise: float) -> Tensor:
    """The same, as long as a box with jumps is that rough."""
    return torch.where(roughness > ROUNDS.smooth, roughness, otherwise)


def _still_jumping(jumps: Tensor, errors: SlopeErrors) -> Tensor:
    """The mean roughness [d] along inputs with jumps, this round included; of those that are smooth as it was."""
    rough = errors.roughness.nan_to_num(ROUNDS.jumping, ROUNDS.jumping)  # not finite: D(h) is D(2h) everywhere
    return torch.where(jumps > 0, if_rough((jumps + rough) / 2, SMOOTH_AFTER_ALL), jumps)


def _factor(errors: SlopeErrors, reach: Tensor, differences: Differences) -> Tensor:
    """The factor on every step [d] that its errors ask for, and that its roughness allows.

    Where shorter steps are rougher, what looks like bending is none. Then steps get no shorter, and longer if it is
    clear: by as much as noise asks for if repeated answers explain it, and otherwise by `RoundSettings.growth`. None of
    that goes beyond the spread, the factor `reach` [d], since farther out the outputs of a smooth box may look rough.
    """
    factor, _ = best_factor(errors, differences.order)
    unbent, _ = best_factor(errors._replace(bending=torch.zeros_like(factor)), differences.order)
    at_best = max(1.0, roughness_at_best(differences))
    least = torch.where(errors.random > ROUNDS.explained, unbent.clamp_min(1), ROUNDS.growth)
    least = torch.where(errors.rough > ROUNDS.very_rough * at_best, least, 1.0)
    longer = torch.maximum(factor, torch.minimum(reach, least))
    factor = torch.where(errors.rough > ROUNDS.rough * at_best, longer, factor)
    return torch.where(errors.too_long, factor.clamp(max=ROUNDS.too_long), factor)


def _where_no_signal(relative: Tensor, sums: TrialSums, errors: SlopeErrors, jumps: Tensor, few: bool) -> Tensor:
    """Steps relative to their spread [d], those of inputs without a signal half way to the typical one.

    With few rows each input goes its own way. Along an input that moves nothing steps go half way to the spread,
    since something may move farther out.
    """
    signal = errors.square > ROUNDS.signal * errors.noise / sums.rows.sqrt()
    signal &= ~(errors.signal < ROUNDS.signal)  # of many inputs, some exceed the noise by chance
    typical = relative[signal & ~(jumps > 0)].median().nan_to_num(1.0)  # NaN without a signal
    unmoved = (sums.square == 0) & (sums.sound == sums.rows.amax())
    typical = torch.where(unmoved, 1.0, typical)
    return torch.where(signal | few, relative, (relative * typical).sqrt())
