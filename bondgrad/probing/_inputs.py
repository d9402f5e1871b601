"""The effect of every input, moved by itself: over its range, on which outputs, and how much."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bondgrad.errors import counted
from bondgrad.measuring._rounding import ROUNDING_UNITS
from bondgrad.measuring._sampler import BudgetExceeded, MeasurementSkipped, Sampler
from bondgrad.probing._facts import Facts
from bondgrad.probing._number_format import percent, runs, sentences
from bondgrad.probing._one_seed import ask_ends, ask_points
from bondgrad.structure import colour
from bondgrad.structure.discovery._dependencies import find_dependencies
from bondgrad.structure.discovery._search_batch import SETTINGS as SEARCH
from bondgrad.structure.discovery._search_batch import SearchBatch

# Dependencies are not searched for above these sizes, in units of the output spread: standard deviations, and quanta.
MOST_HIDING = {"noise": 0.03, "rounding": 0.03, "steps": 0.4}


@dataclass(frozen=True)
class InputSettings:
    """How inputs are swept and moved, and the thresholds of the findings."""

    rows: int = 2  # rows at which every input is swept
    points: tuple[int, ...] = (17, 9, 5)  # points of a sweep; the first number that the budget allows is used
    beyond: float = 0.1  # a sweep exceeds the range of the typical rows by this part of it on both sides
    share: float = 0.3  # part of the evaluations left that sweeps may take; the search for structure follows
    halvings: int = 10  # bisections between two points to locate where the box begins to fail
    inside: float = 0.01  # distance of recommended limits from where the box begins to fail, in spreads
    cut: float = 0.5  # largest part of the typical rows beyond such limits that may work there
    reserve: int = 1000  # bisection needs more than so many evaluations left, for the measurements that follow
    hardly: float = 1e-3  # changes below this part of the largest one count as none
    saturated: float = 0.6  # the box is saturated if outputs do not change over more than this part of the range
    answered: float = 0.5  # least part of the pattern of dependencies that must have been measured
    moved_rows: int = 4  # most rows at which every input is moved by its spread
    visible: float = 0.1  # no input is called dead if noise could hide changes of this part of the output spread


SETTINGS = InputSettings()


@dataclass(frozen=True)
class Failure:
    """A range of an input in which the box failed at all values that were tried, the other inputs being typical."""

    input: int  # number of the input
    low: float | None  # lower end of the range. None: the lower end of the sweep
    high: float | None  # upper end of the range. None: the upper end of the sweep
    how: str  # "NaN", "infinite", or the error that is raised

    @property
    def words(self) -> str:
        """A phrase for the list of failures, which says where and how the box fails."""
        low, high = (None if end is None else f"{end:.3g}" for end in (self.low, self.high))
        inside = f"from {low} to {high}" if low else "anywhere"
        where = inside if (low is None) == (high is None) else f"above {low}" if low else f"below {high}"
        return f"input {self.input} {where}: {self.how}"


@dataclass(frozen=True)
class Ranges:
    """The results of sweeps over the inputs."""

    failures: list[Failure]  # ranges of inputs in which the box fails
    failing_rows: float  # fraction of the typical rows at which the box fails
    flat: float  # fraction of the range over which outputs hardly change, median over inputs that change them
    inputs: int  # number of inputs that were swept
    moving: list[int]  # inputs that changed an output
    points: int = SETTINGS.points[0]  # values of each input that were tried
    limits: tuple[list[float], list[float]] | None = None  # within which the box works. None: no limits say where

    @property
    def saturated(self) -> bool:
        """Whether most of the range is flat."""
        return self.flat > SETTINGS.saturated

    @property
    def words(self) -> str:
        """The finding, in sentences."""
        places = "; ".join(f.words for f in self.failures[:8]) + "; ..." * (len(self.failures) > 8)
        return sentences(
            self.failing_rows > 0 and f"It fails at {percent(self.failing_rows)} of the typical rows.",
            bool(places) and f"Of {self.points} values tried of each input, it fails at those of {places}.",
            bool(places) and "Between them it was not tried.",
            not places and f"It answered at {self.points} values of each input, over their whole range.",
            self.saturated and f"Saturated: over {percent(self.flat)} of the range its outputs hardly change.",
        )


def measure_ranges(sampler: Sampler, facts: Facts, generator: torch.Generator) -> Ranges:
    """Sweep every input by itself, from a little below to a little above the range of the typical rows."""
    d, allowed, divided = sampler.x.shape[1], int(SETTINGS.share * sampler.affordable), sampler.caller.divided
    points = next((p for p in SETTINGS.points if p * d * SETTINGS.rows <= allowed), SETTINGS.points[-1])
    count = sampler.affordable_count(d, points * SETTINGS.rows, SETTINGS.share)
    inputs = torch.randperm(d, generator=generator)[:count].sort().values
    rows = facts.choose(SETTINGS.rows, generator)
    low, high = sampler.lowest, sampler.highest
    room = torch.where(high > low, SETTINGS.beyond * (high - low), sampler.spread)
    low, high = torch.maximum(low - room, sampler.low)[inputs], torch.minimum(high + room, sampler.high)[inputs]
    values = torch.lerp(low[:, None], high[:, None], torch.linspace(0, 1, points, dtype=torch.float64))  # [n, points]
    y = _sweep(sampler, rows, inputs, values)  # [n, rows, points, d_out]
    facts = facts.under_one_seed(sampler.caller.divided > divided)
    broken = ~torch.isfinite(y).all((1, 3))  # [n, points]
    failing = broken.any(1).nonzero().squeeze(1)
    failures = [f for n in failing for f in _failures(sampler, rows, inputs[n, None], values[n], broken[n], y[n])]
    noise = torch.maximum(6 * math.sqrt(2) * facts.noise, facts.tolerance) / facts.output_spread  # [d_out]
    change = y.diff(dim=2).abs() / facts.output_spread
    change = torch.where(torch.isfinite(change), change, math.nan).flatten(1, 2)  # [n, changes, d_out]
    # A single outlier makes two large changes, which are skipped.
    largest = change.nan_to_num(0).sort(1, descending=True).values[:, 2 if facts.noisy else 0]  # [n, d_out]
    failing_rows, moving = 1 - len(facts.usable) / len(facts.y), inputs[(largest > noise).any(1)].tolist()
    limits = _working_limits(sampler, facts, failures)
    return Ranges(failures, failing_rows, _flat(change, largest, noise), count, moving, points, limits)


def _working_limits(sampler: Sampler, facts: Facts, failures: list[Failure]) -> tuple[list[float], list[float]] | None:
    """Limits of every input that keep failing ranges out; None: there are none that say where the box fails.

    They do not, if many rows beyond them work, or if rows that fail would still do so when clamped to them.
    """
    low, high = sampler.low.clone(), sampler.high.clone()
    for failure in failures:
        room = SETTINGS.inside * float(sampler.spread[failure.input])
        if failure.low is not None and failure.high is None:
            high[failure.input] = min(float(high[failure.input]), _rounded(failure.low - room, math.floor))
        elif failure.high is not None and failure.low is None:
            low[failure.input] = max(float(low[failure.input]), _rounded(failure.high + room, math.ceil))
        else:
            return None
    if not failures or not bool((low < high).all()):
        return None
    x, works = sampler.x[: len(facts.y)], torch.isfinite(facts.y).all(1)
    beyond = ((x < low) | (x > high)).any(1)
    if float((beyond & works).sum()) > SETTINGS.cut * float(beyond.sum()):
        return None
    failing = (~works).nonzero().squeeze(1)
    with contextlib.suppress(BudgetExceeded):
        if len(failing) and not bool(torch.isfinite(sampler.ask(x[failing].clamp(low, high), failing)).all()):
            return None
    return low.tolist(), high.tolist()


def _rounded(value: float, direction: Callable[[float], int], digits: int = 4) -> float:
    """The value with so many digits, rounded up or down."""
    unit = 10.0 ** (math.floor(math.log10(abs(value) or 1.0)) + 1 - digits)
    return float(f"{direction(value / unit) * unit:.{digits}g}")


def _sweep(sampler: Sampler, rows: Tensor, inputs: Tensor, values: Tensor) -> Tensor:
    """Outputs [n, rows, points, d_out] with each of inputs [n] by itself at each of its values [n, points]."""
    n, r = len(inputs), len(rows)
    y = ask_ends(sampler, rows.repeat(n), inputs.repeat_interleave(r), values.repeat_interleave(r, 0))
    return y.view(n, r, *y.shape[1:])


def _flat(change: Tensor, largest: Tensor, noise: Tensor) -> float:
    """The share of changes [n, changes, d_out] that are small beside the largest [n, d_out].

    It is the median over the inputs of the mean over the outputs that each of them changes.
    """
    small = (change <= torch.maximum(SETTINGS.hardly * largest, noise)[:, None]).double().sum(1)
    still = small / torch.isfinite(change).sum(1).clamp_min(1)  # [n, d_out]
    matter = (largest > SETTINGS.hardly * largest.amax(0)) & (largest > 10 * noise)  # and well above noise
    moves = matter.any(1)
    by_input = (still * matter).sum(1)[moves] / matter.sum(1)[moves]
    return float(by_input.median()) if len(by_input) else 0.0


def _failures(sampler: Sampler, rows: Tensor, one: Tensor, values: Tensor, broken: Tensor, y: Tensor) -> list[Failure]:
    """Ranges of input `one` [1] in which the box fails, given outputs y [rows, points, d_out] at values [points]."""
    errors = sampler.caller.errors
    errors.clear()
    with contextlib.suppress(BudgetExceeded):  # evaluated again to record the errors
        y = _sweep(sampler, rows, one, values[broken][None])
    how = "NaN" if bool(torch.isnan(y).any()) else "infinite"
    how = f"raises {errors.most_common(1)[0][0]}" if errors else how
    found = []
    for first, last in runs(broken.tolist()):
        low = None if first == 0 else _edge(sampler, rows, one, values[first - 1], values[first])
        high = None if last == len(values) - 1 else _edge(sampler, rows, one, values[last + 1], values[last])
        found.append(Failure(int(one), low, high, how))
    return found


def _edge(sampler: Sampler, rows: Tensor, one: Tensor, fine: Tensor, broken: Tensor) -> float:
    """The last value that works, by bisection, between one at which the box works and one at which it fails."""
    for _ in range(SETTINGS.halvings if sampler.affordable > SETTINGS.reserve else 0):
        middle = (fine + broken) / 2
        works = bool(torch.isfinite(_sweep(sampler, rows, one, middle.view(1, 1))).all())
        fine, broken = (middle, broken) if works else (fine, middle)
    return float(fine)


@dataclass(frozen=True)
class Dependence:
    """Statistics of the pattern of dependencies between outputs and inputs."""

    groups: int  # number of groups of inputs that can be moved together
    inputs: int  # number of inputs
    filled: float  # fraction of the pairs of an output and an input that depend on each other
    blocks: tuple[int, int] | None  # (inputs, outputs) of each block, if the pattern is block-diagonal; else None
    idle: list[int]  # inputs on which no output depends

    @property
    def words(self) -> str:
        """The finding, in sentences."""
        if self.groups == self.inputs:
            return "No structure to be used: every input shares an output with every other."
        saving = f"{2 * self.groups:,} evaluations a row for a central gradient instead of {2 * self.inputs:,}"
        if self.blocks is not None:
            inputs = "one input" if self.blocks[0] == 1 else f"{self.blocks[0]} inputs"
            return f"{self.inputs // self.blocks[0]:,} blocks of {inputs}: {saving}."
        return f"Outputs depend on {percent(self.filled)} of the inputs; {self.groups} groups move together: {saving}."


def measure_pattern(sampler: Sampler, facts: Facts, generator: torch.Generator) -> Dependence:
    """Find dependencies by moving every input by itself at some rows, as `structure.detect` does."""
    seeded, divided = sampler.function.seed_position is not None, sampler.caller.divided
    given, facts = facts, facts.under_one_seed()
    if facts.found.company is not None and facts.found.company.matters:
        raise MeasurementSkipped("rows influence one another, so it cannot be seen")
    quantised = facts.found.rounding is not None and facts.found.rounding.quantised
    if facts.found.steps is not None and facts.found.steps.constant and not quantised:
        raise MeasurementSkipped("a few rows do not show it for a piecewise constant function")
    rounding = (2 * facts.floor or 64 * facts.unit) * facts.scale  # [d_out] of a difference
    rounding = facts.repeat_tolerance if facts.noisy else rounding  # the search measures noise by itself
    lattice = [0.0] if facts.found.rounding is None else [quantum or 0.0 for quantum in facts.found.rounding.quantum]
    steps = float((facts.y.new_tensor(lattice) / facts.output_spread).max())
    sizes = {"noise": facts.relative(facts.noise), "rounding": facts.relative(rounding), "steps": steps}
    for what, size in sizes.items():
        if size > MOST_HIDING[what]:
            raise MeasurementSkipped(f"{what} of {percent(size)} of the spread would hide it")
    rows, d = facts.usable, sampler.x.shape[1]
    sampler.require(SEARCH.rows * (d * (2 if facts.noisy or seeded else 1) + SEARCH.repeats + 1))
    eps = float((rounding / facts.positive_scale).max()) / ROUNDING_UNITS
    x, y, at_once = sampler.x[rows], facts.y[rows], sampler.caller.largest

    def ask(points: Tensor, which: Tensor) -> Tensor:
        return ask_points(sampler, rows[which], points)

    batch = SearchBatch(x, y, ask, at_once, max(eps, 1e-12), eps, sampler.low, sampler.high, seeded=seeded)
    found = find_dependencies(batch, generator)
    if given.under_one_seed(sampler.caller.divided > divided).noisy != facts.noisy:
        raise MeasurementSkipped("calls failed, so that rows had other random numbers, which would hide it")
    if found.answered < SETTINGS.answered:
        raise MeasurementSkipped("too many points failed")
    depends = found.depends  # [d_out, d]
    if not bool(depends.any()):
        raise MeasurementSkipped("no output reacted to any input")
    groups = int(colour(depends).max()) + 1
    idle = (~depends.any(0)).nonzero().squeeze(1).tolist()
    return Dependence(groups, d, float(depends.double().mean()), _blocks(depends, groups), idle)


def _blocks(depends: Tensor, groups: int) -> tuple[int, int] | None:
    """(inputs, outputs) of each block, if the pattern [d_out, d] is block-diagonal with blocks of `groups` inputs."""
    d_out, d = depends.shape
    count = d // groups
    if groups == d or d % groups != 0 or d_out % count != 0:
        return None
    mask = torch.kron(torch.eye(count), torch.ones(d_out // count, groups)).bool()
    return None if bool((depends & ~mask).any()) else (groups, d_out // count)


@dataclass(frozen=True)
class Sensitivity:
    """How much the outputs change when an input is moved by its spread."""

    change: list[float]  # by input: root mean square change of the outputs, in units of their spread. NaN: it failed
    dead: list[int] | None  # inputs that change no output. None: noise or coarse outputs hide it

    @property
    def words(self) -> str:
        """The finding, in sentences."""
        known = [i for i, change in enumerate(self.change) if not math.isnan(change)]
        order = sorted(known, key=lambda i: -self.change[i])
        strongest = ", ".join(f"{i} ({self.change[i]:.2g})" for i in order[:3])
        least = f"; least: {order[-1]} ({self.change[order[-1]]:.2g})" if len(order) > 3 else ""
        dead = self.dead or []
        names = ", ".join(map(str, dead[:12])) + ", ..." * (len(dead) > 12)
        return sentences(
            bool(known)
            and f"Moved by their spread, these change the outputs most (in spreads of theirs): {strongest}{least}.",
            len(known) < len(self.change)
            and f"The box failed wherever {counted(len(self.change) - len(known), 'input')} moved by so much.",
            self.dead is None and "Too noisy or too coarse to say whether any is dead.",
            bool(dead) and f"Dead: input{'s' * (len(dead) > 1)} {names}.",
        )


def measure_effects(sampler: Sampler, facts: Facts, generator: torch.Generator) -> Sensitivity:
    """Measure the change of the outputs when every input is moved by its spread, at a few rows."""
    facts, d = facts.under_one_seed(), sampler.x.shape[1]
    count = sampler.affordable_count(SETTINGS.moved_rows, 2 * d)
    rows, inputs = facts.choose(count, generator).repeat_interleave(d), torch.arange(d).repeat(count)
    spread = sampler.spread[inputs, None]
    ends = sampler.either_side(rows, inputs, spread / 2)[0].squeeze(1)  # [rows * d, 2]
    change = ask_ends(sampler, rows, inputs, ends).diff(dim=1).abs().view(count, d, -1)
    part = (ends.diff(dim=1) / spread).clamp_min(1e-300).view(count, d, 1)  # move in units of the spread
    own = (change.square() - 2 * facts.noise.square()) / (facts.output_spread * part).square()  # less noise
    by_input = own.nanmean((0, 2)).clamp_min(0).sqrt()
    certain = facts.certain(1)
    still = ~(change > certain).any((0, 2)) & torch.isfinite(change).all(2).any(0)
    visible = bool((certain < SETTINGS.visible * facts.output_spread).all())
    return Sensitivity(by_input.tolist(), dead_inputs(facts, still.nonzero().squeeze(1).tolist()) if visible else None)


def dead_inputs(facts: Facts, still: list[int]) -> list[int] | None:
    """Those of the inputs `still` that no other finding shows to have an effect. None: coarse outputs may hide it."""
    ranges, rounding, smoothness = facts.found.ranges, facts.found.rounding, facts.found.smoothness
    jumps = smoothness is not None and smoothness.kind == "jumps"
    coarse = jumps or (rounding is not None and rounding.quantised) or (ranges is not None and ranges.saturated)
    idle = still if facts.found.dependence is None else facts.found.dependence.idle
    moving = [] if ranges is None else ranges.moving
    return None if still and coarse else [i for i in still if i in idle and i not in moving]
