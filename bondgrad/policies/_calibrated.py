"""Steps from measured noise and curvature: nothing to be told."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bondgrad.policies._policy import Batch, Policy, State, Steps
from bondgrad.policies._trial import First, Trial, noise_covariance, spread_of, sums_of

if TYPE_CHECKING:
    from bondgrad.estimators import Estimator

RUNGS = 9  # of the ladder at the start, each step four times the one before, the last as long as the spread
BELOW, MORE = 256.0, 12  # the first is this much shorter than the inputs vary, for which there may be more rungs
FAR_FROM = 16  # from a step at which no row had an answer
AGREE = 0.2  # relative disagreement of two rungs from which on they say nothing
ENOUGH = 1e-7  # and below which no better one is looked for
TRIAL, FEW = 16, 4  # rows; of smaller batches that many trials
ROUNDS = (1, 1, 2, 2, 3, 4, 6, 8)  # trials before a step changes: few at first, then more
SIGNAL = 3.0  # standard deviations by which slopes must exceed noise to say anything
FINEST = 1e-10  # of the square of the slopes: less noise is worth no longer step, less bending no shorter one
DOUBT = 2.0  # times the noise that bending must exceed: that of rounded outputs does not fall as fast as it should
CAUTION = 2.0  # times the noise that slopes must exceed before they are believed to be stretched
ONE_SIDED = 4.0  # times the noise, where one of two ends failed
LONGER, SHORTER = 0.25, 0.1  # by which all slopes of an input may be stretched; a box that saturates tells too little
HARM = 0.1  # of a stretch, compared with an error that differs from row to row
FARTHEST, FARTHEST_OF_ALL = 1.5, 4.0  # steps, in units of the spread; the latter where most inputs go and all is calm:
CALM, SOUND = 0.03, 0.8  # hardly any stretching, few failures
FACTORS = torch.logspace(-2, 1, 25, base=2, dtype=torch.float32, device="cpu")[:, None]  # [25, 1] for one change
PAST = 0.5  # its weight when noise or spread are measured again
ANOTHER = 4.0  # times the noise, as a variance: then the past has no weight
SHRUNK, ENOUGH_ROWS = 8.0, 8  # times smaller may the spread of a batch be, before steps shrink with it
LOST = 100.0  # times the noise, as a variance: then all begins anew, if it is a good part of the slopes' square
CERTAIN, DROWNED = 4, 0.1  # rows that must agree; that part
SUMS = 6  # see `_sums`


class Calibrated(Policy):
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
        return sums_of(x)

    def start(self, state: State, first: First) -> State:
        """See `Policy.start`: climb the ladder."""
        spread = first.spread
        best = torch.full_like(spread, math.inf)
        step, size = spread, torch.zeros_like(spread)
        answered = torch.zeros_like(spread)  # the longest step at which all rows had an answer
        before: Tensor | None = None
        rungs = RUNGS + _more_rungs(first)
        for rung in range(rungs):
            h = spread * 4.0 ** (rung + 1 - rungs)
            slopes = first.slopes(h)  # [r, d]
            if before is not None:
                known = torch.isfinite(slopes) & torch.isfinite(before)
                if not bool(known.any()) and bool((best < math.inf).any()):
                    step = torch.minimum(step, h / FAR_FROM)  # so far out it does not answer, or raises an error
                    break
                apart = torch.where(known, slopes - before, 0).square().sum(0)
                apart = torch.maximum(apart, first.noise * (1 + 16) / h.square() * known.sum(0))  # or by chance
                total = torch.where(known, torch.hypot(slopes, before), 0).square().sum(0)
                score = apart / total
                # Two equal slopes say nothing: a box that rounds its answers has not moved yet.
                score = torch.where((score > 0) & (total > 0), score, math.inf)
                step = torch.where((score < best) & (score < AGREE), h / 2, step)
                size = torch.where(score < best, (total / known.sum(0)).sqrt(), size)
                best = torch.minimum(best, score)
                if bool((best < ENOUGH).all()):
                    break
            answered = torch.where(torch.isfinite(slopes).all(0), h, answered)
            before = slopes
        nothing = (best >= AGREE) & (answered > 0)
        step = torch.where(nothing, torch.minimum(step, answered), step)
        sizes = size[(size > 0) & torch.isfinite(size)]
        unit = sizes.median() if len(sizes) else size.new_ones(())
        return state | {"step": step.float(), "spread": spread.float(), "unit": unit.clamp(1e-30, 1e30).float()}

    def lost(self, state: State) -> bool:
        """See `Policy.lost`."""
        return not float(state["step"].amin()) > 0

    def steps(self, state: State, batch: Batch, n: int, noise: float) -> Steps:
        """See `Policy.steps`."""
        h = state["step"].to(batch.x.dtype)
        size = h
        if batch.rows >= ENOUGH_ROWS:
            size = h * _shrinking(state, spread_of(batch.x, batch.sums, batch.rows)[0]).to(h.dtype)
        return Steps(size.expand(n, *batch.x.shape), batch.uniform(n), h, h)

    def standard_error(self, state: State, size: Tensor) -> Tensor:
        """See `Policy.standard_error`."""
        error = torch.where(state["round"] > 0, state["noise"].sqrt() * state["unit"], math.nan)
        return error.to(size.dtype) / size

    def summarize(self, state: State, g: Tensor, steps: Steps, trial: Trial | None, estimator: "Estimator") -> Tensor:
        """See `Policy.summarize`: [SUMS + 5, d].

        The last five rows tell other processes where this one stands: the spread and its weight, if there was a trial,
        step and unit and their weight, if there is a step.
        """
        rows, d = g.shape
        summary = torch.zeros(SUMS + 5, d, dtype=torch.float32, device=g.device)
        if trial is not None:
            summary[:SUMS] = _sums(state, trial, estimator)
            summary[SUMS : SUMS + 2] = torch.stack((trial.spread, torch.ones_like(trial.spread)))
        known = steps.lower > 0
        here = torch.stack((steps.lower.log(), state["unit"].log().expand(d), torch.ones_like(steps.lower)))
        summary[SUMS + 2 :] = torch.where(known, here, 0)
        summary[SUMS:] *= rows
        return summary

    def observe(self, state: State, summary: Tensor, rows: int, estimator: "Estimator") -> State:
        """See `Policy.observe`."""
        summary = summary.float()
        spread, tried, step, unit, weight = summary[SUMS:]
        if self.lost(state) and float(weight.amin()) > 0:  # several processes: each has started by itself
            state = state | {"step": (step / weight).exp(), "unit": (unit / weight).exp().mean()}
        if self.lost(state) or not float(summary[0].amax()) > 0:  # no trial
            return state
        spread = spread / tried
        if _is_another_box(state, summary):
            return {name: value.to(spread.device) for name, value in self.init(len(spread)).items()}
        shrinking = _shrinking(state, spread) if rows >= ENOUGH_ROWS else torch.ones_like(spread)  # as `steps` had it
        new = (shrinking < 1) | (state["spread"] == 0)
        state = state | {
            "step": state["step"] * shrinking,
            "sums": torch.where(new, 0, state["sums"]) + summary[:SUMS],
            "spread": torch.where(new, spread, torch.lerp(spread, state["spread"], PAST)),
        }
        a_trial = min(TRIAL, FEW * float(summary[0].amax()))
        wanted = a_trial * ROUNDS[min(int(state["round"]), len(ROUNDS) - 1)]
        if float(state["sums"][0].amax()) < wanted:
            return state
        return _moved(state, estimator) | {"sums": torch.zeros_like(state["sums"]), "round": state["round"] + 1}


def _more_rungs(first: First) -> int:
    """Than usual, for inputs that vary much less than their size."""
    range_ = torch.where(first.deviation > 0, first.spread / first.deviation, 1).amax()
    return min(MORE, max(0, 1 + math.ceil(math.log(BELOW * float(range_), 4)) - RUNGS))


def _shrinking(state: State, spread: Tensor) -> Tensor:
    """By what steps are to be multiplied, [d], where inputs vary much less than at the last trial; else 1."""
    return (SHRUNK * spread / state["spread"]).clamp(max=1)


def _is_another_box(state: State, summary: Tensor) -> bool:
    """Whether there is so much more noise than there was that the steps have nothing to do with it."""
    rows, _, square, _, sound, noise = summary[:SUMS]
    share = (noise / sound).nanmedian()
    before = (state["noise"] / state["step"].square()).median()
    lost = (share > LOST * before) & (share > DROWNED * (square / rows).median())
    return bool(lost & (rows.amax() >= CERTAIN) & (state["round"] > 0))


def _sums(state: State, trial: Trial, estimator: "Estimator") -> Tensor:
    """Over the rows, [SUMS, d]: their number, D(h)·D(2h), D(2h)², and the square of what D(2h) does not tell of D(h).

    Then, of those rows where nothing failed, their number and their noise.
    """
    slopes = trial.slopes / state["unit"]
    known = torch.isfinite(slopes).all(0)  # [r, d]
    slopes = torch.where(known, slopes, 0)
    _, one, two = slopes
    sound = known & trial.sound
    noise = torch.where(sound, trial._replace(slopes=slopes).noise(estimator.order, estimator.shared), 0)
    sums = torch.stack((known, one * two, two.square(), torch.zeros_like(one), sound, noise)).sum(1).float()
    ratio = _ratio(state["sums"] + sums, state["noise"] / state["step"].square(), estimator)
    sums[3] = (one - ratio.to(one.dtype) * two).square().sum(0)
    return sums


def _ratio(sums: Tensor, noise: Tensor, estimator: "Estimator") -> Tensor:
    """Of D(h) to D(2h), [d], from sums over rows and the variance of the noise in D(h)."""
    covariance = noise_covariance(estimator.shared).to(sums)
    product, square = sums[1:3] / sums[0].clamp_min(1)
    product = product - noise * covariance[1, 2]
    square = (square - noise * covariance[2, 2]).clamp_min(0)
    # Where there is more noise than slope nothing is known of their ratio, and it is one.
    product, square = product + CAUTION * noise, square + CAUTION * noise
    return torch.where(square > 0, product / square, 1).clamp(0.25, 4)


def _moved(state: State, estimator: "Estimator") -> State:
    """Longer or shorter steps, after a round of trials."""
    h, spread, sums = state["step"], state["spread"], state["sums"]
    order, covariance = estimator.order, noise_covariance(estimator.shared).to(sums)
    n = sums[0].clamp_min(1)
    _, product, square, rest, *_ = sums / n
    # All inputs are seen through the same outputs. One whose noise looks different bends in some other way.
    heard = sums[4] > 0
    noise = state["noise"]
    if bool(heard.any()):
        measured = (sums[5] / sums[4] * h.square())[heard].median()
        alike = 1 / ANOTHER < float(measured / noise) < ANOTHER
        noise = torch.lerp(measured, noise, PAST if alike else 0.0)
    share = noise / h.square()  # [d] of the square of D(h)
    signal = product - share * covariance[1, 2] > SIGNAL * share / 2 / n.sqrt()
    size = (square - share / 4).clamp_min(0)  # of slopes, squared

    # What is left of D(h) - ratio·D(2h) is bending, and noise of known size. At the best step noise is `order` times
    # the bending: that much of it is to be counted twice without consequences.
    ratio = _ratio(sums, share, estimator)
    uncertain = share * (1 - 2 * ratio * covariance[1, 2] + ratio.square() * covariance[2, 2])
    uncertain = uncertain * (ONE_SIDED - (ONE_SIDED - 1) * sums[4] / n)
    at_best = order * (1 - 2 * covariance[1, 2] + covariance[2, 2])
    bending = (rest - DOUBT * uncertain).clamp_min(0) / ((2**order - 1) ** 2 - (DOUBT - 1) * at_best)
    stretch = (1 / ratio - 1) / (2**order - 1)  # of all slopes, at h

    factors = FACTORS.to(h.device)  # [25, 1]
    floor = FINEST * size
    stretched = stretch * factors**order
    error = (share + floor) / factors.square() + bending * factors ** (2 * order)
    error = (error + (HARM * stretched).square() * size) / (1 + stretched).clamp_min(0.05).square()
    error = torch.where((stretched <= LONGER) & (stretched >= -SHORTER), error, math.inf)
    factor = torch.where(torch.isfinite(error).any(0), factors[error.argmin(0), 0], factors[0])
    factor = torch.where(share < floor, factor.clamp(max=1), factor)

    relative, farthest, goal = h * factor / spread, spread.new_tensor(FARTHEST), spread.new_ones(())
    if bool(signal.any()):
        goal = relative[signal].median()
        calm = (stretch.abs() < CALM) & (sums[4] > SOUND * n)
        if bool(calm[signal].float().mean() > 0.5):  # most inputs may go farther than they vary
            farthest = farthest * (h / spread)[signal].median().clamp(1, FARTHEST_OF_ALL / FARTHEST)
    relative = torch.where(signal, relative, (relative * goal).sqrt())
    return state | {"step": torch.minimum(relative, farthest) * spread, "noise": noise}
