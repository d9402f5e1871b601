"""The default policy: steps from measured noise and curvature."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bondgrad.calling._grid import Grid
from bondgrad.measuring._spread import Spread, input_sums
from bondgrad.measuring._step_trial import Differences, StartingPoint, StepTrial, climb, most_slopes, noise_covariance
from bondgrad.policies._policy import Batch, MeasuringPolicy, Observation, State, Steps


@dataclass(frozen=True)
class CalibrationSettings:
    """Constants of `Calibrated`. The values were tuned on the boxes of `benchmarks/calibrated.py`."""

    trial_rows: int = 16  # the number of rows of a whole trial
    small_trials: int = 4  # the number of batches that make a whole trial at most, where batches are small
    rounds: tuple[int, ...] = (1, 1, 2, 2, 3, 4, 6, 8)  # whole trials in each round; after a round steps change
    signal: float = 3.0  # standard errors by which slopes must exceed the noise to count as a signal
    finest: float = 1e-10  # of the squared slopes: less noise than this lengthens no step, less bending shortens none
    doubt: float = 2.0  # factor on the noise in `_ratio` and `_bending`: that of rounding falls more slowly with h
    one_sided_noise: float = 4.0  # factor on the variance of a slope where one of the two ends failed
    most_stretched: float = 0.25  # relative growth of all slopes of an input that is accepted
    most_shrunk: float = 0.1  # relative decrease that is accepted; less, since saturation is underestimated
    stretch_harm: float = 0.1  # weight of such a common factor, relative to an error that differs from row to row
    farthest: float = 1.5  # longest step, in units of the spread of the input
    farthest_when_calm: float = 4.0  # longest step where most inputs reach `farthest` and most are calm
    calm_stretch: float = 0.03  # an input is calm if its slopes are stretched by less than this,
    calm_sound: float = 0.8  # and if at more than this part of the rows no evaluation failed
    past_weight: float = 0.5  # weight of the earlier value, when noise or spread are measured again
    changed_noise: float = 4.0  # ratio of variances beyond which the earlier value has no weight
    shrunk_spread: float = 8.0  # factor by which the spread of a batch may fall before steps shrink with it
    spread_rows: int = 8  # the least number of rows of a batch whose spread is used
    # The policy starts again if the variance of slopes has grown by a factor of `lost_noise`, and is at least the part
    # `lost_share` of the squared slopes, at `lost_rows` rows or more.
    lost_noise: float = 100.0
    lost_share: float = 0.1
    lost_rows: int = 4


SETTINGS = CalibrationSettings()
FACTORS = torch.logspace(-2, 1, 25, base=2, dtype=torch.float32, device="cpu")[:, None]  # [25, 1] changes of a step


class TrialSums(NamedTuple):
    """Sums over the rows of trials, [d] each."""

    rows: Tensor  # the number of rows with slopes at all three steps
    product: Tensor  # D(h)·D(2h)
    square: Tensor  # D(2h)²
    residual: Tensor  # the square of the part of D(h) that D(2h) does not predict
    sound: Tensor  # the number of rows at which no evaluation failed
    noise: Tensor  # the variance of D(h) at those rows


SUMS = len(TrialSums._fields)


class Calibrated(MeasuringPolicy):
    """Chooses the step with the least error for the measured noise and curvature.

    The error of a slope D(h) over a step h has two parts: noise, which falls with h, and bending (truncation), which
    grows with a power of h. A trial measures the slopes of some rows at h/2, h and 2h, for less than one evaluation in
    20. The combination of the three from which both the gradient and the first term of bending drop out is noise alone.
    The part of D(h) that D(2h) does not predict, less that noise, is bending. Every input then gets the step at which
    both errors together are least, relative to its slope.

    Bending counts in full where it differs from row to row. A factor common to all slopes of an input, as of a box that
    saturates, leaves signs right and counts for a tenth. Slopes are those for a loss gradient of norm 1, and steps are
    relative to the spread of their inputs, so that neither the scale of the loss nor the units of inputs and outputs
    matter. No step is longer than one and a half times that spread, or four times where most inputs go that far and no
    slopes are stretched: farther out nothing is known of the box. An input without a signal follows the others.

    The first step of all comes from a ladder of steps, on which each input starts where two neighbouring rungs agree
    best. It is climbed again when there is suddenly much more noise.

    Choosing a policy: this one is the default, since it needs no numbers and follows changes of noise and data. Take
    `Bond` to train as the paper does, `Fixed` if you know a step that is right for all inputs, and `Optimal` if you
    know the noise and the third derivative. `BlackBox(noise=...)` has no influence here. All estimators work; of one
    that moves all inputs together, such as `Simultaneous`, only the common length of the steps is adjusted.

    References:
        P. Gill, W. Murray, M. Saunders, M. Wright, "Computing forward-difference intervals for numerical optimization",
        SIAM Journal on Scientific and Statistical Computing, 1983, for the balance of the two errors.
        H.-J. Shi, Y. Xie, M. Xuan, J. Nocedal, "Adaptive finite-difference interval estimation for noisy
        derivative-free optimization", SIAM Journal on Scientific Computing, 2022, for testing ratios of differences.
    """

    share = 0.04
    start_slopes = most_slopes()

    def init(self, in_features: int) -> State:
        """See `Policy.init`."""
        zeros = torch.zeros(in_features, dtype=torch.float32)
        return {
            "step": zeros,  # h; zero: not known yet
            "noise": torch.zeros((), dtype=torch.float32),  # h² times the variance of D(h), in units²
            "spread": zeros.clone(),  # of the inputs: see `StartingPoint.reach`
            "sums": zeros.expand(SUMS, -1).clone(),  # over the rows of this round: see `TrialSums`
            "unit": torch.ones((), dtype=torch.float32),  # the unit of slopes, so that their squares do not overflow
            "round": torch.zeros((), dtype=torch.float32),  # the number of completed rounds
        }

    def measure(self, x: Tensor) -> Tensor:
        """See `Policy.measure`: the sums from which `Spread` follows."""
        return input_sums(x)

    def start(self, state: State, start: StartingPoint) -> State:
        """See `MeasuringPolicy.start`."""
        first = climb(start)
        unit = first.slope.clamp(1e-30, 1e30)
        return state | {"step": first.step.float(), "spread": start.reach.float(), "unit": unit.float()}

    def needs_start(self, state: State) -> bool:
        """See `MeasuringPolicy.needs_start`."""
        return not float(state["step"].amin()) > 0

    def settable(self, state: State, grid: Grid) -> State:
        """See `Policy.settable`."""
        h = state["step"]
        return state | {"step": torch.where(h > 0, grid.moves(h, self.resolution_steps), h)}

    def steps(self, state: State, batch: Batch, n: int, noise: float) -> Steps:
        """See `Policy.steps`."""
        h = size = state["step"].to(batch.x.dtype)
        if batch.rows >= SETTINGS.spread_rows:
            size = h * _shrinking(state, Spread.of(batch.x, batch.sums, batch.rows).reach, batch.rows).to(h.dtype)
        return Steps(size.expand(n, *batch.x.shape), batch.uniform(n), h, h)

    def standard_error(self, state: State, size: Tensor) -> Tensor:
        """See `MeasuringPolicy.standard_error`."""
        error = torch.where(state["round"] > 0, state["noise"].sqrt() * state["unit"], math.nan)
        return error.to(size.dtype) / size

    def summarize(self, state: State, seen: Observation) -> Tensor:
        """See `Policy.summarize`: [SUMS + 5, d].

        The last five rows are averaged over processes: the spread and its weight, which are zero without a trial; the
        logarithms of step and unit and their weight, which are zero without a step.
        """
        step, trial = seen.steps.lower, seen.trial
        one = torch.ones_like(step)
        start = torch.where(step > 0, torch.stack((step.log(), state["unit"].log().expand_as(step), one)), 0)
        sums, spread = start.new_zeros(SUMS, len(step)), start.new_zeros(2, len(step))
        if trial is not None:
            sums, spread = _sums(state, trial), torch.stack((trial.spread, one))
        return torch.cat((sums.float(), torch.cat((spread, start)).float() * len(seen.g)))

    def observe(self, state: State, summary: Tensor, rows: int, differences: Differences) -> State:
        """See `Policy.observe`."""
        summary = summary.float()
        spread, tried, step, unit, weight = summary[SUMS:]
        if self.needs_start(state) and float(weight.amin()) > 0:  # several processes, each with a start of its own
            state = state | {"step": (step / weight).exp(), "unit": (unit / weight).exp().mean()}
        if self.needs_start(state) or not float(summary[0].amax()) > 0:  # no trial
            return state
        spread = spread / tried
        if _noise_jumped(state, summary):
            return {name: value.to(spread.device) for name, value in self.init(len(spread)).items()}
        shrinking = _shrinking(state, spread, rows)  # the same factors as in `steps`
        new = (shrinking < 1) | (state["spread"] == 0)
        state = state | {
            "step": state["step"] * shrinking,
            "sums": torch.where(new, 0, state["sums"]) + summary[:SUMS],
            "spread": torch.where(new, spread, torch.lerp(spread, state["spread"], SETTINGS.past_weight)),
        }
        a_trial = min(SETTINGS.trial_rows, SETTINGS.small_trials * float(summary[0].amax()))
        wanted = a_trial * SETTINGS.rounds[min(int(state["round"]), len(SETTINGS.rounds) - 1)]
        return state if float(state["sums"][0].amax()) < wanted else _next_round(state, differences)


def _shrinking(state: State, spread: Tensor, rows: int) -> Tensor:
    """The factors [d] that shorten the steps of inputs that vary much less than at the last trial; 1 for others."""
    allowed = SETTINGS.shrunk_spread if rows >= SETTINGS.spread_rows else math.inf
    return (allowed * spread / state["spread"]).clamp(max=1)


def _noise_jumped(state: State, summary: Tensor) -> bool:
    """Whether the noise has grown so much that the steps must be found anew: see `CalibrationSettings.lost_noise`."""
    sums = TrialSums(*summary[:SUMS])
    noise = (sums.noise / sums.sound).nanmedian()
    before = (state["noise"] / state["step"].square()).median()
    lost = (noise > SETTINGS.lost_noise * before) & (noise > SETTINGS.lost_share * (sums.square / sums.rows).median())
    return bool(lost & (sums.rows.amax() >= SETTINGS.lost_rows) & (state["round"] > 0))


def _sums(state: State, trial: StepTrial) -> Tensor:
    """The `TrialSums` of a trial, [SUMS, d]."""
    slopes = trial.slopes / state["unit"]
    known = torch.isfinite(slopes).all(0)  # [r, d]
    slopes = torch.where(known, slopes, 0)
    _, one, two = slopes
    sound = known & trial.sound
    noise = torch.where(sound, trial._replace(slopes=slopes).noise(), 0)
    sums = torch.stack((known, one * two, two.square(), torch.zeros_like(one), sound, noise)).sum(1).float()
    variance = state["noise"] / state["step"].square()
    ratio = _ratio(*_products(TrialSums(*(state["sums"] + sums)), variance, trial.differences), variance)
    sums[3] = (one - ratio.to(one.dtype) * two).square().sum(0)
    return sums


def _products(sums: TrialSums, variance: Tensor, differences: Differences) -> tuple[Tensor, Tensor]:
    """Means over rows of D(h)·D(2h) and of D(2h)², [d] each, less what noise adds; `variance` is that of D(h)."""
    rows, (common, far) = sums.rows.clamp_min(1), map(float, noise_covariance(differences)[1:, 2])
    return sums.product / rows - variance * common, (sums.square / rows - variance * far).clamp_min(0)


def _ratio(product: Tensor, square: Tensor, variance: Tensor) -> Tensor:
    """The ratio [d] of D(h) to D(2h), from their products; the larger the variance of the noise, the nearer to one."""
    product, square = product + SETTINGS.doubt * variance, square + SETTINGS.doubt * variance
    return torch.where(square > 0, product / square, 1).clamp(0.25, 4)


def _next_round(state: State, differences: Differences) -> State:
    """The state with new steps, after a round of trials."""
    h, spread, sums = state["step"], state["spread"], TrialSums(*state["sums"])
    noise = _noise(state, sums)
    variance = noise / h.square()  # [d] of D(h)
    product, square = _products(sums, variance, differences)
    ratio = _ratio(product, square, variance)
    stretch = (1 / ratio - 1) / (2**differences.order - 1)  # [d] relative growth of all slopes of an input, at h
    bending = _bending(sums, variance, ratio, differences)
    relative = h * _best_factor(variance, bending, stretch, square, differences.order) / spread

    signal = product > SETTINGS.signal * variance / 2 / sums.rows.sqrt()
    calm = (stretch.abs() < SETTINGS.calm_stretch) & (sums.sound > SETTINGS.calm_sound * sums.rows)
    farther = (SETTINGS.farthest * (h / spread)[signal].median()).clamp(SETTINGS.farthest, SETTINGS.farthest_when_calm)
    farthest = torch.where(calm[signal].float().mean() > 0.5, farther, SETTINGS.farthest)  # False without a signal
    typical = relative[signal].median().nan_to_num(1.0)  # NaN without a signal
    relative = torch.where(signal, relative, (relative * typical).sqrt())
    step, nothing = torch.minimum(relative, farthest) * spread, torch.zeros_like(state["sums"])
    return state | {"step": step, "noise": noise, "sums": nothing, "round": state["round"] + 1}


def _noise(state: State, sums: TrialSums) -> Tensor:
    """h² times the variance of the slopes: one number, since all inputs act through the same noisy outputs."""
    # The median over inputs, since bending that is no power of h looks like noise. NaN: evaluations failed at all rows.
    measured, before = (sums.noise / sums.sound * state["step"].square()).nanmedian(), state["noise"]
    alike = 1 / SETTINGS.changed_noise < float(measured / before) < SETTINGS.changed_noise
    return torch.where(measured.isnan(), before, torch.lerp(measured, before, SETTINGS.past_weight * alike))


def _bending(sums: TrialSums, variance: Tensor, ratio: Tensor, differences: Differences) -> Tensor:
    """The square of the error of D(h), [d], that differs from row to row without being noise.

    The residual D(h) - ratio·D(2h) is bending plus noise of known variance. `doubt` times this variance is subtracted;
    at the best step noise is `order` times the bending, and the divisor makes up there for what is subtracted too much.
    """
    order, rows = differences.order, sums.rows.clamp_min(1)
    common, far = map(float, noise_covariance(differences)[1:, 2])
    uncertain = variance * (1 - 2 * ratio * common + ratio.square() * far)
    uncertain = uncertain * (SETTINGS.one_sided_noise - (SETTINGS.one_sided_noise - 1) * sums.sound / rows)
    at_best = order * (1 - 2 * common + far)
    rest = (sums.residual / rows - SETTINGS.doubt * uncertain).clamp_min(0)
    return rest / ((2.0**order - 1) ** 2 - (SETTINGS.doubt - 1) * at_best)


def _best_factor(variance: Tensor, bending: Tensor, stretch: Tensor, size: Tensor, order: int) -> Tensor:
    """For each input [d] the one of `FACTORS` that gives its step the least error relative to the slope.

    Args:
        variance: [d] the variance of the noise in D(h).
        bending: [d] see `_bending`.
        stretch: [d] the relative growth of all slopes at h.
        size: [d] the mean square of the slopes.
        order: The power of the step with which errors fall.
    """
    factors = FACTORS.to(variance.device)  # [25, 1]
    floor = SETTINGS.finest * size
    stretched = stretch * factors**order
    error = (variance + floor) / factors.square() + bending * factors ** (2 * order)
    error = (error + (SETTINGS.stretch_harm * stretched).square() * size) / (1 + stretched).square()
    accepted = (stretched <= SETTINGS.most_stretched) & (stretched >= -SETTINGS.most_shrunk)
    factor = factors[torch.where(accepted, error, math.inf).argmin(0), 0]  # the smallest factor, where none is accepted
    return torch.where(variance < floor, factor.clamp(max=1), factor)
