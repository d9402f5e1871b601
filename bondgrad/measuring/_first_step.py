"""A first step for a box of which nothing is known: a ladder of steps is climbed, and slopes are compared.

Slopes of a smooth box agree the better, the shorter the steps are, until noise or rounding begins. A box with jumps is
another matter: the shorter the steps, the fewer rows meet a jump, and the farther off are the slopes of those that do.
Where no row meets one slopes agree again, but they are slopes between jumps and say nothing about moves of the length
that training makes. So agreement is judged from the longest steps down.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bondgrad.measuring._jumps import JumpEvidence
from bondgrad.measuring._spread import Spread
from bondgrad.measuring._step_trial import WEIGHTS


@dataclass(frozen=True)
class LadderSettings:
    """How the ladder of steps is climbed. The values were found on the boxes of `benchmarks/calibrated.py`."""

    rungs: int = 9  # number of steps; each is four times the one before, the last is the longest sensible step
    more_rungs: int = 12  # most shorter steps that are added for inputs that vary much less than their size
    below: float = 256.0  # the first step is at most the standard deviation of the inputs divided by this
    farther: int = 1  # most steps beyond the longest sensible one, where noise hides all slopes up to there
    farther_few: int = 3  # the same where there are fewer rows than `few_rows`, whose spread says little
    hidden: float = 1e-2  # part of the squared slopes that is noise, from which on noise hides them
    few_rows: int = 4  # with fewer rows all inputs are judged together
    agreement: float = 0.2  # squared relative difference of two rungs' slopes, from which on they count as noise
    agreement_weak: float = 0.35  # the same where slopes agree nowhere else
    agreement_few: float = 0.05  # the same with fewer rows than `few_rows`, of which two may agree by chance
    drowned: float = 1e-4  # part of the squared slope that may be noise, where few rows lengthen the step of one input
    near: float = 4.0  # spreads of the rows; longer steps are taken only where no slopes agree up to there
    far: float = 0.4  # part of the largest mean square move of the outputs that is far
    patience: int = 2  # next pairs, or steps, among which there must be another good one for the search to go on
    below_others: int = 2  # rungs by which the step of an input may be shorter than the median of all inputs
    above_others: int = 2  # rungs by which it may be longer
    clearance: float = 16.0  # the step stays below one at which no row has a finite output by this factor
    signal: float = 3.0  # standard errors by which moves of the outputs must exceed the noise to count as a signal


SETTINGS = LadderSettings()


class StartingPoint(NamedTuple):
    """What is measured of a box at some rows of the first training step, to find a first step size."""

    spread: Spread  # spread of the inputs
    reach: Tensor  # [d] the longest sensible step: `spread.reach`, or less between limits
    noise: Tensor  # h² times the variance that noise brings to the slopes, from repeated evaluations
    slopes: Callable[[Tensor], Tensor]  # maps steps [d] to slopes [r, d], scaled as in a `StepTrial`
    room: Tensor | None = None  # [d] the longest step that fits between limits in most places; None: no limits
    together: bool = False  # whether all inputs move at once, so that their steps must have the same length

    @property
    def typical(self) -> Tensor:
        """[d] a typical move: `spread.typical`, or less between limits."""
        return torch.minimum(self.spread.typical, self.reach)


class FirstStep(NamedTuple):
    """The step at which slopes agree best, and what was seen on the way."""

    step: Tensor  # [d] the step of each input
    slope: Tensor  # median size of the slopes over inputs; one if no slope was found
    evidence: JumpEvidence  # whether the box has jumps, or is piecewise constant, on the scale of the longest step

    @property
    def jumps(self) -> Tensor:
        """The inputs [d] along which there are jumps."""
        return self.evidence.jumps()


class Rung(NamedTuple):
    """A step, and the slopes there."""

    step: Tensor  # [d]
    slopes: Tensor  # [r, d]; not finite where nothing is known


def most_slopes() -> int:
    """The largest number of steps at which `climb` measures slopes."""
    return SETTINGS.rungs + SETTINGS.more_rungs + SETTINGS.farther_few


def climb(start: StartingPoint) -> FirstStep:
    """For each input, the step at which slopes of neighbouring rungs agree best, from the longest steps down."""
    usual = SETTINGS.rungs + _more_rungs(start)
    rungs: list[Rung] = []
    scores: list[Tensor] = []  # [d] disagreement of each pair of neighbouring rungs
    number = 0
    while number < usual or (number < usual + SETTINGS.farther_few and _goes_farther(start, rungs, scores, usual)):
        h = start.reach * 4.0 ** (number + 1 - usual)
        slopes = start.slopes(h)
        if not bool(torch.isfinite(slopes).any()) and any(bool((score < _agreement(slopes)).any()) for score in scores):
            return _shortened(_chosen(start, rungs, scores), h)  # the box fails this far out
        rungs.append(Rung(h, slopes))
        if number > 0:
            scores.append(_disagreement(start, rungs[-2], rungs[-1]))
        number += 1
    return _chosen(start, rungs, scores)


def _more_rungs(start: StartingPoint) -> int:
    """The number of shorter steps to add to the usual ones, for inputs that vary much less than their size."""
    deviation = start.spread.deviation
    ratio = torch.where(deviation > 0, start.reach / deviation, 1).amax()
    more = 1 + math.ceil(math.log(SETTINGS.below * float(ratio), 4)) - SETTINGS.rungs
    return min(SETTINGS.more_rungs, max(0, more))


def _goes_farther(start: StartingPoint, rungs: list[Rung], scores: list[Tensor], usual: int) -> bool:
    """Whether noise hides slopes over the longest sensible step, so that longer ones are worth a try."""
    few = len(rungs[-1].slopes) < SETTINGS.few_rows
    if start.room is not None or len(rungs) >= usual + (SETTINGS.farther_few if few else SETTINGS.farther):
        return False
    square = (rungs[-1].slopes * rungs[-1].step).nan_to_num(0, 0, 0).square().mean(0)  # [d] of moves of the outputs
    hidden = float(start.noise) > SETTINGS.hidden * float(square.median())
    return hidden and float(scores[-1].median()) >= _agreement(rungs[-1].slopes)


def _agreement(slopes: Tensor) -> float:
    """The disagreement from which on slopes [r, d] count as noise."""
    return SETTINGS.agreement_few if len(slopes) < SETTINGS.few_rows else SETTINGS.agreement


def _disagreement(start: StartingPoint, one: Rung, four: Rung) -> Tensor:
    """The squared relative difference [d] of the slopes of two rungs, as a mean over rows.

    Rows count alike, unless their slopes are lost in noise. Where there are few rows, all inputs have their mean. It is
    infinite where no slope differs: outputs that are rounded may not have changed yet.
    """
    known = torch.isfinite(one.slopes) & torch.isfinite(four.slopes)
    a, b = torch.where(known, one.slopes, 0), torch.where(known, four.slopes, 0)
    unit, tiny = torch.maximum(a.abs().amax(0), b.abs().amax(0)), torch.finfo(a.dtype).tiny
    unit = torch.where(unit > 0, unit, 1)
    a, b = a / unit, b / unit  # so that squares do not overflow
    total, by_noise = a.square() + b.square(), start.noise * (1 + 1 / 16) / (one.step * unit).square().clamp_min(tiny)
    apart = torch.where(known, torch.maximum((b - a).square(), by_noise), 0)
    weight = 1 / (total + WEIGHTS.noise * by_noise + WEIGHTS.least * total.mean(0)).clamp_min(tiny)
    apart, total = (weight * apart).sum(0), (weight * total).sum(0)
    if len(a) < SETTINGS.few_rows:
        apart, total = apart.sum().expand_as(apart), total.sum().expand_as(total)
    return torch.where((total > 0) & ~(a == b).all(0), apart / total, math.inf)


def _chosen(start: StartingPoint, rungs: list[Rung], scores: list[Tensor]) -> FirstStep:
    """The first step, given all slopes and how well they agree."""
    columns = torch.arange(len(start.reach), device=start.reach.device)
    best, weak = _best_pairs(start, rungs, scores) if scores else (torch.full_like(columns, -1), False)
    found, pair = best >= 0, best.clamp_min(0)
    steps, slopes = (torch.stack(part) for part in zip(*rungs, strict=True))  # [rungs, d], [rungs, r, d]
    if slopes.shape[1] < SETTINGS.few_rows:
        pair = _out_of_noise(start, steps, slopes, pair)
    agreed, other = steps[pair, columns] * 2, _without_agreement(start, steps, slopes)  # `agreed`: between both rungs
    agreed = torch.minimum(agreed, other) if weak else agreed  # slopes over long steps may agree by chance
    some = slopes[pair, :, columns].nan_to_num(0, 0, 0)  # [d, r]
    largest = some.abs().amax(1).clamp_min(torch.finfo(some.dtype).tiny)
    size = largest * (some / largest[:, None]).square().mean(1).sqrt()
    sizes = size[found & torch.isfinite(size) & (size > 0)]
    slope = sizes.median() if len(sizes) else size.new_ones(())
    evidence = JumpEvidence.on_ladder(start.spread.deviation, start.noise, steps, slopes)
    return FirstStep(torch.where(found, agreed, other), slope, evidence)


def _best_pairs(start: StartingPoint, rungs: list[Rung], scores: list[Tensor]) -> tuple[Tensor, bool]:
    """For each input [d] the pair of rungs whose slopes agree best, -1 where there is none; and whether they hardly do.

    Inputs are not far from one another: noise may hide one more than another, and one may agree by chance.
    """
    table, rows = torch.stack(scores), len(rungs[0].slopes)  # [pairs, d]
    agreement, few = _agreement(rungs[0].slopes), rows < SETTINGS.few_rows
    weak = not bool((_median(table, agreement) < agreement).any())
    if weak and few:
        agreement = SETTINGS.agreement
    elif weak:  # of most inputs that have slopes
        alive = torch.isfinite(table).any(0)
        middle = table[:, alive].median(1).values if bool(alive.any()) else table.new_full((1,), math.inf)
        agreement = SETTINGS.agreement_weak if bool((middle < SETTINGS.agreement_weak).any()) else agreement
    complete = torch.stack([torch.isfinite(rung.slopes).all() for rung in rungs])
    table = _among(complete[1:] & complete[:-1], table, agreement)
    if not few:
        near = torch.stack([(rung.step <= SETTINGS.near * start.spread.typical).all() for rung in rungs[1:]])
        table = _among(near, table, agreement)
    typical = int(_best_pair(_median(table, agreement)[:, None], agreement, rows)[0])
    if typical < 0 or start.together:
        return torch.full_like(scores[0], typical, dtype=torch.long), weak and not few
    lowest = max(0, typical - SETTINGS.below_others)
    window = table[lowest : typical + SETTINGS.above_others + 1]
    own, hidden = _best_pair(window, agreement, rows), torch.full_like(scores[0], typical, dtype=torch.long)
    if float(start.noise) > 0:
        hidden = torch.where(window.amin(0) < math.inf, window.argmin(0) + lowest, hidden)
    else:  # the box may round this input alone
        anywhere = _best_pair(table, agreement, rows)
        hidden = torch.where(anywhere < 0, hidden, anywhere)
    return torch.where(own < 0, hidden, own + lowest), weak and not few


def _median(table: Tensor, agreement: float) -> Tensor:
    """The medians [pairs] of disagreements [pairs, d] over inputs with slopes, which agree at one pair at least."""
    alive = (table < agreement).any(0)
    return table[:, alive].median(1).values if bool(alive.any()) else table.new_full((len(table),), math.inf)


def _among(pairs: Tensor, table: Tensor, agreement: float) -> Tensor:
    """The disagreements [pairs, d], infinite but for these pairs (bool), if slopes agree at one of them."""
    agrees = bool((_median(table[pairs], agreement) < agreement).any())
    return torch.where(pairs[:, None], table, math.inf) if agrees else table


def _best_pair(table: Tensor, agreement: float, rows: int) -> Tensor:
    """For each column of disagreements [pairs, n], the pair below which no better one follows soon; -1: none is small.

    With few rows slopes over long steps may agree by chance, and it is the pair above which no better one follows soon.
    """
    best = torch.full((table.shape[1],), -1, device=table.device)
    score = table.new_full((table.shape[1],), agreement)
    pairs = range(len(table))
    for pair in pairs if rows < SETTINGS.few_rows else reversed(pairs):
        better = (table[pair] < score) & ((best < 0) | ((best - pair).abs() <= SETTINGS.patience))
        best, score = torch.where(better, pair, best), torch.where(better, table[pair], score)
    return best


def _out_of_noise(start: StartingPoint, steps: Tensor, slopes: Tensor, pair: Tensor) -> Tensor:
    """The pairs [d] of rungs, later for inputs whose slopes are lost in noise where those of the others are not.

    So it is where an input of a few rows happens to be much closer to zero than the others. It goes no farther than
    these do.
    """
    columns = torch.arange(len(pair), device=pair.device)
    h = steps[pair, columns]
    square = slopes[pair, :, columns].nan_to_num(0, 0, 0).square().mean(1)
    share = (start.noise / (h.square() * square)).nan_to_num(0, 0, 0)  # [d]
    later = (share / share.median().clamp_min(SETTINGS.drowned)).log() / math.log(16)  # a rung takes off so much
    most = (steps <= h.median()).sum(0) - 1
    return torch.maximum(pair, torch.minimum(pair + later.floor().clamp(0, len(steps)).long(), most))


def _without_agreement(start: StartingPoint, steps: Tensor, slopes: Tensor) -> Tensor:
    """The steps [d] where slopes agree nowhere: the shortest that move the outputs far, if that is more than noise.

    It is looked for from the longest such move down, and only as far as most steps on the way move them far.
    """
    reach, noise = start.reach, float(start.noise)
    moves = (slopes * steps[:, None]).nan_to_num(0, 0, 0).square().mean((1, 2)) - noise  # [rungs]
    if noise > 0 and float(moves.amax()) > noise * SETTINGS.signal * math.sqrt(2 / slopes[0].numel()):
        rung = int(moves.argmax())
        for shorter in (moves >= SETTINGS.far * moves.amax()).nonzero().flatten().flip(0).tolist():
            rung = shorter if 0 <= rung - shorter <= SETTINGS.patience else rung  # farther down it is one by chance
        return steps[rung]
    answered = torch.isfinite(slopes).flatten(1).all(1).nonzero()
    return reach if len(answered) == 0 else torch.minimum(reach, steps[answered[-1, 0]])


def _shortened(first: FirstStep, failed: Tensor) -> FirstStep:
    """The first step, kept away from steps [d] at which no row got an output."""
    return first._replace(step=torch.minimum(first.step, failed / SETTINGS.clearance))
