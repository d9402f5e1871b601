"""Measurements by differences along lines: the steps over which they give the slope, and whether the box is smooth."""

import itertools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bondgrad.measuring._sampler import MeasurementSkipped, Sampler
from bondgrad.probing._facts import NEGLIGIBLE, Facts
from bondgrad.probing._float_types import output_unit
from bondgrad.probing._number_format import percent, runs
from bondgrad.probing._one_seed import ask_ends, ask_points


@dataclass(frozen=True)
class DifferenceSettings:
    """The ladder of steps for slopes, the lines for second differences ("bends"), and the thresholds of both."""

    slopes: int = 32  # number of slopes, each at a random row and input
    per_decade: int = 2  # steps of the ladder per factor of ten
    decades: int = 6  # length of the ladder below an input's spread, in float32; twice as long in float64
    agreement: float = 0.5  # relative difference of neighbouring slopes from which on they count as noise
    short: float = 2e-4  # steps below, in spreads, at which a piecewise constant function shows no slope,
    still: float = 0.9  # at so many places at least
    wide: float = 2.0**-6  # a move of more than this part of an input changes it in any floating-point format
    plateaus: float = 0.1  # least share of places at which a function without steps of that width does not change
    units: float = 8.0  # rounding units of the outputs by which such a move should have changed one
    lines: int = 6  # number of lines between typical rows, along which bends are measured
    points: int = 17  # points of a line
    zooms: int = 4  # zooms into the largest bend of a line; with the factor below, down to 1/4096 of the line
    factor: float = 8.0  # magnification of a zoom: two neighbouring gaps become the whole line
    smooth: float = 1.5  # least order of the bends of a smooth function: it is 2 in theory, and 1 at kinks
    kinked: float = 0.4  # least order of the bends of a function with kinks: it is 1 in theory, and 0 at jumps
    pole: float = -0.4  # least order of the bends at a jump, as a mean over zooms: at a pole it is -1 in theory
    visible: float = 0.02  # if noise hides bends of this part of the output spread, the result is "unclear"


SETTINGS = DifferenceSettings()


@dataclass(frozen=True)
class StepLadder:
    """Slopes by central differences, for a ladder of steps."""

    ladder: list[float]  # steps, in units of each input's spread, ascending
    disagreement: list[float | None]  # relative, of slopes at each step and at the next. None: no slopes
    low_5: float | None  # shortest step of the range in which neighbouring slopes agree to 5 %. None: there is none
    high_5: float | None  # longest step of that range
    low_1: float | None  # shortest step of the range in which neighbouring slopes agree to 1 %. None: there is none
    high_1: float | None  # longest step of that range
    best: float | None  # step at which the slopes agree best with those at its neighbours. None: nowhere to 50 %
    error: float | None  # relative disagreement at the best step
    spread: float  # median spread of the inputs, which converts relative steps into absolute ones
    changes: bool  # whether the outputs changed at all
    constant: bool = False  # whether the function is piecewise constant: flat between jumps, as trees are

    @property
    def words(self) -> str:
        """The finding, in sentences."""
        if not self.changes:
            return "No slope anywhere: the outputs did not change at any step."
        if self.constant:
            return "Piecewise constant, as trees are: flat between jumps, so that short steps see nothing."
        if self.best is None or self.error is None:
            return "Noise or roughness drowns the slopes: no two steps agree on them to better than 50 %."
        at = f"the best step is about {self.best:.1g} of an input's spread ({self.best * self.spread:.1g})"
        if self.low_5 is None:
            return f"No plateau: slopes agree to {percent(self.error)} at best; {at}."
        text = f"Slopes agree to 5 % for steps from {self.low_5:.0e} to {self.high_5:.0e} of the spread"
        finer = "" if self.low_1 is None else f", to 1 % from {self.low_1:.0e} to {self.high_1:.0e}"
        return f"{text}{finer}; {at}."


def measure_steps(sampler: Sampler, facts: Facts, generator: torch.Generator) -> StepLadder:
    """Measure slopes of random combinations of the outputs along single inputs, over many decades of steps."""
    decades = SETTINGS.decades * (2 if sampler.dtype == torch.float64 else 1)
    ladder = torch.logspace(-decades, 0, decades * SETTINGS.per_decade + 1, dtype=torch.float64)
    count, d = sampler.affordable_count(SETTINGS.slopes, 2 * len(ladder), share=1 / 3), sampler.x.shape[1]
    rows, inputs = facts.choose(count, generator), torch.randperm(max(d, count), generator=generator)[:count] % d
    spread = sampler.spread[inputs, None]
    ends, whole = sampler.either_side(rows, inputs, ladder * spread)  # [slopes, steps, 2], [slopes, steps]
    span = ends.diff(dim=2)  # [slopes, steps, 1] after rounding
    change = ask_ends(sampler, rows, inputs, ends).diff(dim=2).squeeze(2)
    slopes = (change / span).where(whole[:, :, None] & (span > 0), math.nan)  # [slopes, steps, d_out]
    if bool(torch.isnan(slopes).all()):
        raise MeasurementSkipped("limits or failures are in the way everywhere")
    gy = torch.randn(count, 1, slopes.shape[2], dtype=torch.float64, generator=generator)
    gy = gy / gy.norm(dim=2, keepdim=True) / facts.output_spread
    found = judge_slopes(ladder, ((slopes * gy).sum(2) * spread).T, float(sampler.spread.median()))
    return replace(found, constant=_piecewise_constant(ladder, ends, change, whole, output_unit(facts) * facts.scale))


def _piecewise_constant(ladder: Tensor, ends: Tensor, change: Tensor, whole: Tensor, unit: Tensor) -> bool:
    """Whether outputs stay the same over short steps everywhere, and in places over moves that no rounding explains.

    Args:
        ladder: [steps] in spreads of the inputs.
        ends: [slopes, steps, 2] values of the input that is moved.
        change: [slopes, steps, d_out] of the outputs.
        whole: [slopes, steps] whether the limits left a step as it is.
        unit: [d_out] of the rounding of the outputs.
    """
    known = whole & torch.isfinite(change).all(2)
    same, last = (change == 0).all(2), change[:, -1:].abs()
    moves = (known & ~same)[:, -1]
    wide = ends.diff(dim=2).squeeze(2) > SETTINGS.wide * ends.abs().amax(2)
    visible = (last * (ladder / ladder[-1])[:, None] > SETTINGS.units * unit).any(2)  # [slopes, steps]
    plateau = (known & same & wide & visible).any(1)[moves]
    short = known & moves[:, None] & (ladder < SETTINGS.short)
    if len(plateau) == 0 or not bool(short.any()):
        return False
    return float(same[short].double().mean()) >= SETTINGS.still and float(plateau.double().mean()) >= SETTINGS.plateaus


def judge_slopes(ladder: Tensor, slopes: Tensor, spread: float) -> StepLadder:
    """The steps of the ladder [steps] at which slopes [steps, n] agree with those at the next step."""
    pairs = slopes.unfold(0, 2, 1)  # [steps - 1, n, 2]
    pairs = pairs.where(torch.isfinite(pairs).all(2, keepdim=True), 0)
    sizes = pairs.norm(dim=1)  # [steps - 1, 2]
    # Steps too short to change any output give slopes of zero, which do not count as agreement.
    differences = (pairs.diff(dim=2).norm(dim=1).squeeze(1) / sizes.amax(1)).where(sizes.amin(1) > 0, math.inf).tolist()
    # The best step has two neighbours, so it is neither the first nor the last.
    error, i = min((max(pair), i) for i, pair in enumerate(itertools.pairwise(differences), 1))
    best, least = (float(ladder[i]), error) if error < SETTINGS.agreement else (None, None)
    disagreement = [None if math.isinf(difference) else difference for difference in differences]
    changes = bool((slopes.nan_to_num(0) != 0).any())
    (low_5, high_5), (low_1, high_1) = (_plateau(ladder, differences, tolerance) for tolerance in (0.05, 0.01))
    return StepLadder(ladder.tolist(), disagreement, low_5, high_5, low_1, high_1, best, least, spread, changes)


def _plateau(ladder: Tensor, differences: list[float], tolerance: float) -> tuple[float | None, float | None]:
    """The first and the last step of the longest run of neighbouring slopes that agree within the tolerance."""
    agreeing = runs([difference <= tolerance for difference in differences])
    if not agreeing:
        return None, None
    first, last = max(agreeing, key=lambda run: run[1] - run[0])
    return float(ladder[first]), float(ladder[last + 1])


@dataclass(frozen=True)
class Smoothness:
    """How fast second differences fall with the step, at the places where they are largest."""

    kind: str  # "smooth", "kinks", "poles", "jumps" or "unclear"
    order: float | None  # power of the step with which they fall on the roughest line; None: they are lost in noise
    jump: float  # the largest jump, in units of the spread of the outputs

    @property
    def words(self) -> str:
        """The finding, in sentences."""
        return {
            "smooth": "Smooth, as far as one can look into it.",
            "kinks": "It has kinks, like ReLU: slopes change at once in some places. Long steps reach across them.",
            "jumps": f"It jumps, by up to {percent(self.jump)} of the spread: short steps see nothing, or a cliff.",
            "poles": "It has poles, next to which its outputs grow without bound, so that a few rows may have enormous "
            "slopes. Keep inputs away from there with limits=, or clip the gradients of rows.",
            "unclear": "Whether it is smooth drowns in its noise.",
        }[self.kind]


def measure_smoothness(sampler: Sampler, facts: Facts, generator: torch.Generator) -> Smoothness:
    """Measure second differences on lines between typical rows, zooming in on the largest of each line."""
    if len(facts.usable) < 2:
        raise MeasurementSkipped("there is one row at which it works, and lines go from one to another")
    n, divided = SETTINGS.points, sampler.caller.divided
    if sampler.function.seed_position is not None:  # all points of a line are calls of their own
        sampler.require(0, 2 * n * (SETTINGS.zooms + 1))
    lines = sampler.affordable_count(SETTINGS.lines, (n + 3) * (SETTINGS.zooms + 1), share=1 / 2)
    rows = facts.choose(2 * lines, generator)
    near, far = sampler.x[rows].chunk(2)  # [lines, d]

    def along(t: Tensor) -> Tensor:
        """Outputs [lines, points, d_out] at fractions t [lines, points] of each line, in units of their spread."""
        points = torch.lerp(near[:, None], far[:, None], t[:, :, None])  # [lines, points, d]
        return ask_points(sampler, rows[:lines], points) / facts.output_spread

    # The rounding of points matters where they are close together and the box is steep.
    rounded = torch.finfo(sampler.dtype).eps * (torch.maximum(near.abs(), far.abs()) / sampler.spread).norm(dim=1)
    length = ((far - near) / sampler.spread).norm(dim=1).clamp_min(1e-300)
    middle, half = torch.full((lines,), 0.5, dtype=torch.float64), 0.5
    bends, least = [], []  # for each zoom [lines]: the largest second difference, and what noise may cause
    for _ in range(SETTINGS.zooms + 1):
        t = middle[:, None] + half * torch.linspace(-1, 1, n, dtype=torch.float64)  # [lines, points]
        y = along(t)
        worst, where = y.diff(2, dim=1).abs().nan_to_num(0).amax(2).max(1)  # [lines]
        now = facts.under_one_seed(sampler.caller.divided > divided)
        if now.noisy:  # the largest of many may be due to noise: measure it again
            around = along(t.gather(1, where[:, None] + torch.arange(3)))
            worst = torch.minimum(worst, around.diff(2, dim=1).abs().amax((1, 2)))
        bends.append(worst.nan_to_num(0))
        steepest = y.diff(dim=1).abs().nan_to_num(0).amax((1, 2))
        least.append(torch.maximum(8 * (n - 1) / half * rounded / length * steepest, _least_bend(now)))
        half /= SETTINGS.factor
        middle = t[torch.arange(lines), where + 1].clamp(half, 1 - half)
    return judge_bends(torch.stack(bends), torch.stack(least))


def _least_bend(facts: Facts) -> Tensor:
    """The largest second difference that noise and rounding cause, in units of the spread of the outputs.

    Rounding may exceed the floor, measured on short lines, as that of a solver does whose number of iterations changes
    from one of them to the next.
    """
    most = torch.maximum(1.5 * facts.certain(1), 64 * facts.unit * facts.scale)
    return most.div(facts.output_spread).max().clamp_min(NEGLIGIBLE)


def judge_bends(bends: Tensor, least: Tensor) -> Smoothness:
    """Smoothness from the largest second differences [zooms, lines]; those below `least` [zooms, lines] are noise."""
    floor, wide, close = least[1:], bends[:-1], bends[1:]
    orders = (wide / torch.maximum(close, floor).clamp_min(1e-300)).log() / math.log(SETTINGS.factor)  # [zooms, lines]
    # The order of a bend that has fallen below the noise is a lower bound, which is enough to call it smooth.
    known = ((close > floor) | (orders >= SETTINGS.smooth)) & (wide > least[:-1]).cumprod(0).bool()
    seen = {n: orders[known[:, n], n].tolist() for n in range(bends.shape[1]) if bool(known[:, n].any())}  # by line
    if not seen:
        return Smoothness("unclear" if bool((least[0] > SETTINGS.visible).any()) else "smooth", None, 0.0)
    # Single looks tell a pole badly: bends stay the same while the closest point to it does.
    poles = {n for n, order in seen.items() if sum(order) / len(order) < SETTINGS.pole}
    jumps = [float(bends[-1, n]) for n, order in seen.items() if order[-1] < SETTINGS.kinked and n not in poles]
    roughest = min(order[-1] for order in seen.values())
    kind = "smooth" if roughest >= SETTINGS.smooth else "kinks" if roughest >= SETTINGS.kinked else "poles"
    return Smoothness("jumps" if jumps else kind, roughest, max(jumps, default=0.0))
