"""What happens over the whole range of every input: where the box fails, and where it hardly changes."""

import contextlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bondgrad.measuring._sampler import BudgetExceeded, Sampler
from bondgrad.probing._facts import Facts
from bondgrad.probing._number_format import percent, runs, sentences


@dataclass(frozen=True)
class RangeSettings:
    """How inputs are swept, and what is concluded from that."""

    rows: int = 2  # at which every input is swept
    points: tuple[int, ...] = (17, 9, 5)  # of a sweep, as the budget allows
    beyond: float = 0.1  # of the range of the typical rows, on both sides, within the limits
    share: float = 0.3  # of the evaluations left: the search for structure comes after it
    halvings: int = 10  # of the distance between two points, to find where it begins to fail: a thousandth of it
    reserve: int = 1000  # evaluations for what comes after it, without which that distance is not halved
    hardly: float = 1e-3  # of the largest change: smaller ones count as none
    saturated: float = 0.6  # of the range without change: then the box is saturated


SETTINGS = RangeSettings()


@dataclass(frozen=True)
class Failure:
    """A range of an input in which the box fails, the other inputs being typical."""

    input: int
    low: float | None  # None: from the end of what was looked at
    high: float | None
    how: str

    @property
    def words(self) -> str:
        """For the list of failures."""
        low, high = (None if end is None else f"{end:.3g}" for end in (self.low, self.high))
        inside = f"from {low} to {high}" if low else "anywhere"
        where = inside if (low is None) == (high is None) else f"above {low}" if low else f"below {high}"
        return f"input {self.input} {where}: {self.how}"


@dataclass(frozen=True)
class Ranges:
    """What sweeps over the inputs have shown."""

    failures: list[Failure]
    failing_rows: float  # fraction of the typical rows
    flat: float  # fraction of the range over which outputs hardly change, median over inputs that matter
    inputs: int  # that were looked at
    moving: list[int]  # those that changed an output

    @property
    def saturated(self) -> bool:
        """Whether most of the range is flat."""
        return self.flat > SETTINGS.saturated

    @property
    def words(self) -> str:
        """What a person wants to know."""
        places = "; ".join(f.words for f in self.failures[:8]) + "; ..." * (len(self.failures) > 8)
        return sentences(
            self.failing_rows > 0 and f"It fails at {percent(self.failing_rows)} of the typical rows.",
            f"It fails at {places}." if places else "It answered over the whole range of the inputs.",
            self.saturated and f"Saturated: over {percent(self.flat)} of the range its outputs hardly change.",
        )


def measure_ranges(sampler: Sampler, facts: Facts, generator: torch.Generator) -> Ranges:
    """Sweep every input by itself, from a little below to a little above what is typical of it."""
    d, allowed = sampler.x.shape[1], int(SETTINGS.share * sampler.affordable)
    points = next((p for p in SETTINGS.points if p * d * SETTINGS.rows <= allowed), SETTINGS.points[-1])
    count = sampler.affordable_count(d, points * SETTINGS.rows, SETTINGS.share)
    inputs = torch.randperm(d, generator=generator)[:count].sort().values
    rows = facts.choose(SETTINGS.rows, generator)
    low, high = sampler.lowest, sampler.highest
    room = torch.where(high > low, SETTINGS.beyond * (high - low), sampler.spread)
    low, high = torch.maximum(low - room, sampler.low)[inputs], torch.minimum(high + room, sampler.high)[inputs]
    values = torch.lerp(low[:, None], high[:, None], torch.linspace(0, 1, points, dtype=torch.float64))  # [n, points]
    y = _sweep(sampler, rows, inputs, values)  # [n, rows, points, d_out]
    broken = ~torch.isfinite(y).all(3).all(1)  # [n, points]
    failures = []
    for n in broken.any(1).nonzero().squeeze(1).tolist():
        failures += _failures(sampler, rows, inputs[n : n + 1], values[n], broken[n], y[n])
    noise = torch.maximum(6 * math.sqrt(2) * facts.noise, facts.tolerance) / facts.output_spread  # [d_out]
    change = y.diff(dim=2).abs() / facts.output_spread
    change = torch.where(torch.isfinite(change), change, math.nan).flatten(1, 2)  # [n, changes, d_out]
    # A bad answer makes two large changes.
    largest = change.nan_to_num(0).sort(1, descending=True).values[:, 2 if facts.noisy else 0]  # [n, d_out]
    failing_rows, moving = 1 - len(facts.usable) / len(facts.y), inputs[(largest > noise).any(1)].tolist()
    return Ranges(failures, failing_rows, _flat(change, largest, noise), count, moving)


def _sweep(sampler: Sampler, rows: Tensor, inputs: Tensor, values: Tensor) -> Tensor:
    """[n, rows, points, d_out] with each of inputs [n] by itself at each of its values [n, points]."""
    n, r = len(inputs), len(rows)
    y = sampler.ask_moved(rows.repeat(n), inputs.repeat_interleave(r), values.repeat_interleave(r, 0))
    return y.view(n, r, *y.shape[1:])


def _flat(change: Tensor, largest: Tensor, noise: Tensor) -> float:
    """The share of changes [n, changes, d_out] that are small beside the largest [n, d_out].

    It is the median over the inputs of the mean over the outputs that each of them moves.
    """
    small = (change <= torch.maximum(SETTINGS.hardly * largest, noise)[:, None]).double().sum(1)
    still = small / torch.isfinite(change).sum(1).clamp_min(1)  # [n, d_out]
    matter = (largest > SETTINGS.hardly * largest.amax(0)) & (largest > 10 * noise)  # among noise, nothing can be said
    moves = matter.any(1)
    by_input = (still * matter).sum(1)[moves] / matter.sum(1)[moves]
    return float(by_input.median()) if len(by_input) else 0.0


def _failures(sampler: Sampler, rows: Tensor, one: Tensor, values: Tensor, broken: Tensor, y: Tensor) -> list[Failure]:
    """The ranges of input `one` [1] in which it fails, given answers y [rows, points, d_out] at values [points]."""
    errors = sampler.caller.errors
    errors.clear()
    with contextlib.suppress(BudgetExceeded):  # once more, to see what it raises
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
    """Between a value at which it works and one at which it does not, the border."""
    for _ in range(SETTINGS.halvings if sampler.affordable > SETTINGS.reserve else 0):
        middle = (fine + broken) / 2
        works = bool(torch.isfinite(_sweep(sampler, rows, one, middle.view(1, 1))).all())
        fine, broken = (middle, broken) if works else (fine, middle)
    return float(fine + broken) / 2
