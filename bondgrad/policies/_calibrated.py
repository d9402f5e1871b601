"""Steps from measured noise and curvature: nothing to be told."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bondgrad.measuring._ladder import climb, most_slopes
from bondgrad.measuring._spread import Spread, input_sums
from bondgrad.measuring._step_trial import Differences, StartingPoint, StepTrial, noise_covariance
from bondgrad.policies._policy import Batch, MeasuringPolicy, Observation, State, Steps


@dataclass(frozen=True)
class CalibrationSettings:
    """How trials become steps. The values were found on the boxes of `benchmarks/calibrated.py`."""

    trial_rows: int = 16  # rows that make a whole trial; a smaller batch counts as `small_trials` of them at most
    small_trials: int = 4
    rounds: tuple[int, ...] = (1, 1, 2, 2, 3, 4, 6, 8)  # trials before steps change: few at first, then more
    signal: float = 3.0  # standard deviations by which slopes must exceed noise to say anything
    finest: float = 1e-10  # of the slopes' square: less noise is worth no longer step, less bending no shorter one
    bending_doubt: float = 2.0  # times the noise that bending must exceed: of rounded outputs, noise falls more slowly
    stretch_doubt: float = 2.0  # times the noise that slopes must exceed before they are believed to be stretched
    one_sided_noise: float = 4.0  # times the usual variance, where one of the two ends failed
    most_stretched: float = 0.25  # relative growth of all slopes of an input that is accepted
    most_shrunk: float = 0.1  # relative decrease of them that is accepted; a box that saturates shows too little of it
    stretch_harm: float = 0.1  # weight of such a common factor, beside an error that differs from row to row
    farthest: float = 1.5  # longest step, in units of the spread
    farthest_when_calm: float = 4.0  # the same where most inputs go that far and the box is calm
    calm_stretch: float = 0.03  # a box is calm where slopes are stretched by less than this,
    calm_sound: float = 0.8  # and more than this part of the rows had all their answers
    past_weight: float = 0.5  # of the past, when noise or spread are measured again
    changed_noise: float = 4.0  # factor of the variance from which on the past has no weight
    shrunk_spread: float = 8.0  # factor by which the spread of a batch may fall before steps shrink with it
    spread_rows: int = 8  # rows from which on the spread of a batch is believed
    lost_noise: float = 100.0  # factor of the variance from which on all begins anew, if it also is
    lost_share: float = 0.1  # at least this part of the slopes' square,
    lost_rows: int = 4  # at that many rows or more


SETTINGS = CalibrationSettings()
FACTORS = torch.logspace(-2, 1, 25, base=2, dtype=torch.float32, device="cpu")[:, None]  # [25, 1] for one change
SUMS = 6  # numbers per input that are summed over the rows of trials: see `_sums`


class Calibrated(MeasuringPolicy):
    """The step that is best for noise and curvature as they are measured. Nothing needs to be told.

    The best step balances noise, whose share falls with the step, against bending, which grows with its square. Now and
    then, for less than one evaluation in 20, some rows are measured at half and twice their steps. In a combination of
    these three slopes neither the gradient nor the first term of bending is left: that is the noise. What the slopes at
    twice the step do not tell of those at the step itself is bending. Only that part counts in full which differs from
    row to row; what stretches or shrinks all slopes of an input alike, as in a box that saturates, leaves their signs
    right, and counts for a tenth. Every input gets the step at which all errors together are least, relative to the
    slope.

    Slopes are those for a loss gradient of norm 1, and steps are relative to the spread of their inputs, so that
    neither the scale of the loss nor the units of inputs and outputs matter. No step is longer than one and a half
    times that spread, or four times where most inputs go so far and nothing is stretched: of what the box does farther
    out nothing is known. An input that shows no signal follows the others.

    At the first step of all a ladder of steps is climbed, and each input starts where two rungs agree best. So it is
    again when there is suddenly much more noise.

    `BlackBox`'s `noise=` has no influence. Works with every estimator; of one with directions, such as `Simultaneous`,
    all inputs of which move together, only the common length of the steps is adjusted.
    """

    share = 0.04
    start_slopes = most_slopes()

    def __repr__(self) -> str:
        return "Calibrated()"

    def init(self, in_features: int) -> State:
        """See `Policy.init`."""
        zeros = torch.zeros(in_features, dtype=torch.float32)
        return {
            "step": zeros,  # h; zero: not known yet
            "noise": torch.zeros((), dtype=torch.float32),  # h² times the variance of D(h), in units²
            "spread": zeros.clone(),
            "sums": zeros.expand(SUMS, -1).clone(),  # over the rows of this round: see `_sums`
            "unit": torch.ones((), dtype=torch.float32),  # of slopes, lest their squares overflow
            "round": torch.zeros((), dtype=torch.float32),
        }

    def measure(self, x: Tensor) -> Tensor:
        """See `Policy.measure`: for the spread."""
        return input_sums(x)

    def start(self, state: State, start: StartingPoint) -> State:
        """See `MeasuringPolicy.start`."""
        first = climb(start)
        unit = first.slope.clamp(1e-30, 1e30)
        return state | {"step": first.step.float(), "spread": start.reach.float(), "unit": unit.float()}

    def needs_start(self, state: State) -> bool:
        """See `MeasuringPolicy.needs_start`."""
        return not float(state["step"].amin()) > 0

    def steps(self, state: State, batch: Batch, n: int, noise: float) -> Steps:
        """See `Policy.steps`."""
        h = state["step"].to(batch.x.dtype)
        size = h
        if batch.rows >= SETTINGS.spread_rows:
            size = h * _shrinking(state, Spread.of(batch.x, batch.sums, batch.rows).reach).to(h.dtype)
        return Steps(size.expand(n, *batch.x.shape), batch.uniform(n), h, h)

    def standard_error(self, state: State, size: Tensor) -> Tensor:
        """See `MeasuringPolicy.standard_error`."""
        error = torch.where(state["round"] > 0, state["noise"].sqrt() * state["unit"], math.nan)
        return error.to(size.dtype) / size

    def summarize(self, state: State, seen: Observation) -> Tensor:
        """See `Policy.summarize`: [SUMS + 5, d].

        The last five rows tell other processes where this one stands: the spread and its weight, if there was a trial,
        step and unit and their weight, if there is a step.
        """
        (rows, d), steps, trial = seen.g.shape, seen.steps, seen.trial
        summary = torch.zeros(SUMS + 5, d, dtype=torch.float32, device=seen.g.device)
        if trial is not None:
            summary[:SUMS] = _sums(state, trial)
            summary[SUMS : SUMS + 2] = torch.stack((trial.spread, torch.ones_like(trial.spread)))
        known = steps.lower > 0
        here = torch.stack((steps.lower.log(), state["unit"].log().expand(d), torch.ones_like(steps.lower)))
        summary[SUMS + 2 :] = torch.where(known, here, 0)
        summary[SUMS:] *= rows
        return summary

    def observe(self, state: State, summary: Tensor, rows: int, differences: Differences) -> State:
        """See `Policy.observe`."""
        summary = summary.float()
        spread, tried, step, unit, weight = summary[SUMS:]
        if self.needs_start(state) and float(weight.amin()) > 0:  # several processes: each has started by itself
            state = state | {"step": (step / weight).exp(), "unit": (unit / weight).exp().mean()}
        if self.needs_start(state) or not float(summary[0].amax()) > 0:  # no trial
            return state
        spread = spread / tried
        if _is_another_box(state, summary):
            return {name: value.to(spread.device) for name, value in self.init(len(spread)).items()}
        shrinking = (
            _shrinking(state, spread) if rows >= SETTINGS.spread_rows else torch.ones_like(spread)
        )  # as `steps` had it
        new = (shrinking < 1) | (state["spread"] == 0)
        state = state | {
            "step": state["step"] * shrinking,
            "sums": torch.where(new, 0, state["sums"]) + summary[:SUMS],
            "spread": torch.where(new, spread, torch.lerp(spread, state["spread"], SETTINGS.past_weight)),
        }
        a_trial = min(SETTINGS.trial_rows, SETTINGS.small_trials * float(summary[0].amax()))
        wanted = a_trial * SETTINGS.rounds[min(int(state["round"]), len(SETTINGS.rounds) - 1)]
        if float(state["sums"][0].amax()) < wanted:
            return state
        return _moved(state, differences) | {"sums": torch.zeros_like(state["sums"]), "round": state["round"] + 1}


def _shrinking(state: State, spread: Tensor) -> Tensor:
    """By what steps are to be multiplied, [d], where inputs vary much less than at the last trial; else 1."""
    return (SETTINGS.shrunk_spread * spread / state["spread"]).clamp(max=1)


def _is_another_box(state: State, summary: Tensor) -> bool:
    """Whether there is so much more noise than there was that the steps have nothing to do with it."""
    rows, _, square, _, sound, noise = summary[:SUMS]
    share = (noise / sound).nanmedian()
    before = (state["noise"] / state["step"].square()).median()
    lost = (share > SETTINGS.lost_noise * before) & (share > SETTINGS.lost_share * (square / rows).median())
    return bool(lost & (rows.amax() >= SETTINGS.lost_rows) & (state["round"] > 0))


def _sums(state: State, trial: StepTrial) -> Tensor:
    """Over the rows, [SUMS, d]: their number, D(h)·D(2h), D(2h)², and the square of what D(2h) does not tell of D(h).

    Then, of those rows where nothing failed, their number and their noise.
    """
    slopes = trial.slopes / state["unit"]
    known = torch.isfinite(slopes).all(0)  # [r, d]
    slopes = torch.where(known, slopes, 0)
    _, one, two = slopes
    sound = known & trial.sound
    noise = torch.where(sound, trial._replace(slopes=slopes).noise(), 0)
    sums = torch.stack((known, one * two, two.square(), torch.zeros_like(one), sound, noise)).sum(1).float()
    ratio = _ratio(state["sums"] + sums, state["noise"] / state["step"].square(), trial.differences)
    sums[3] = (one - ratio.to(one.dtype) * two).square().sum(0)
    return sums


def _ratio(sums: Tensor, noise: Tensor, differences: Differences) -> Tensor:
    """Of D(h) to D(2h), [d], from sums over rows and the variance of the noise in D(h)."""
    covariance = noise_covariance(differences).to(sums)
    product, square = sums[1:3] / sums[0].clamp_min(1)
    product = product - noise * covariance[1, 2]
    square = (square - noise * covariance[2, 2]).clamp_min(0)
    # Where there is more noise than slope nothing is known of their ratio, and it is one.
    product, square = product + SETTINGS.stretch_doubt * noise, square + SETTINGS.stretch_doubt * noise
    return torch.where(square > 0, product / square, 1).clamp(0.25, 4)


def _moved(state: State, differences: Differences) -> State:
    """Longer or shorter steps, after a round of trials."""
    h, spread, sums = state["step"], state["spread"], state["sums"]
    order, covariance = differences.order, noise_covariance(differences).to(sums)
    n = sums[0].clamp_min(1)
    _, product, square, rest, *_ = sums / n
    # All inputs are seen through the same outputs. One whose noise looks different bends in some other way.
    heard = sums[4] > 0
    noise = state["noise"]
    if bool(heard.any()):
        measured = (sums[5] / sums[4] * h.square())[heard].median()
        alike = 1 / SETTINGS.changed_noise < float(measured / noise) < SETTINGS.changed_noise
        noise = torch.lerp(measured, noise, SETTINGS.past_weight if alike else 0.0)
    share = noise / h.square()  # [d] of the square of D(h)
    signal = product - share * covariance[1, 2] > SETTINGS.signal * share / 2 / n.sqrt()
    size = (square - share / 4).clamp_min(0)  # of slopes, squared

    # What is left of D(h) - ratio·D(2h) is bending, and noise of known size. At the best step noise is `order` times
    # the bending: that much of it is to be counted twice without consequences.
    ratio = _ratio(sums, share, differences)
    uncertain = share * (1 - 2 * ratio * covariance[1, 2] + ratio.square() * covariance[2, 2])
    uncertain = uncertain * (SETTINGS.one_sided_noise - (SETTINGS.one_sided_noise - 1) * sums[4] / n)
    at_best = order * (1 - 2 * covariance[1, 2] + covariance[2, 2])
    doubt = SETTINGS.bending_doubt
    bending = (rest - doubt * uncertain).clamp_min(0) / ((2**order - 1) ** 2 - (doubt - 1) * at_best)
    stretch = (1 / ratio - 1) / (2**order - 1)  # of all slopes, at h

    factors = FACTORS.to(h.device)  # [25, 1]
    floor = SETTINGS.finest * size
    stretched = stretch * factors**order
    error = (share + floor) / factors.square() + bending * factors ** (2 * order)
    error = (error + (SETTINGS.stretch_harm * stretched).square() * size) / (1 + stretched).clamp_min(0.05).square()
    error = torch.where((stretched <= SETTINGS.most_stretched) & (stretched >= -SETTINGS.most_shrunk), error, math.inf)
    factor = torch.where(torch.isfinite(error).any(0), factors[error.argmin(0), 0], factors[0])
    factor = torch.where(share < floor, factor.clamp(max=1), factor)

    relative, farthest, goal = h * factor / spread, spread.new_tensor(SETTINGS.farthest), spread.new_ones(())
    if bool(signal.any()):
        goal = relative[signal].median()
        calm = (stretch.abs() < SETTINGS.calm_stretch) & (sums[4] > SETTINGS.calm_sound * n)
        if bool(calm[signal].float().mean() > 0.5):  # most inputs may go farther than they vary
            farthest = farthest * (h / spread)[signal].median().clamp(
                1, SETTINGS.farthest_when_calm / SETTINGS.farthest
            )
    relative = torch.where(signal, relative, (relative * goal).sqrt())
    return state | {"step": torch.minimum(relative, farthest) * spread, "noise": noise}
