"""Numbers by epoch or step: one line out of several seeds, short enough to be drawn."""

import math
import statistics
from collections.abc import Callable, Iterable

from bondgrad.report._experiment import Run

MOST = 300  # points of a line: more cannot be told apart in a column of a page

Numbers = list[float]


def over_seeds(lines: Iterable[tuple[Numbers, Numbers]]) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Where there is a number at all: x, and the mean, the smallest and the largest y."""
    found: dict[float, list[float]] = {}
    for xs, ys in lines:
        for x, y in zip(xs, ys, strict=True):
            if math.isfinite(y):
                found.setdefault(x, []).append(y)
    xs = sorted(found)
    return xs, [statistics.fmean(found[x]) for x in xs], [min(found[x]) for x in xs], [max(found[x]) for x in xs]


def of_trace(runs: list[Run], key: str) -> list[tuple[Numbers, Numbers]]:
    """By step, of each seed that has it."""
    return [(run.trace["step"], run.trace[key]) for run in runs if key in run.trace]


def thin(numbers: Numbers, join: Callable[[Numbers], float]) -> Numbers:
    """At most `MOST` numbers, each standing for as many neighbours."""
    width = math.ceil(len(numbers) / MOST)
    return [join(numbers[i : i + width]) for i in range(0, len(numbers), width)] if width > 1 else numbers


def positive(runs: list[Run], key: str) -> Numbers:
    """All of a trace that a logarithmic axis can show."""
    return [number for _, ys in of_trace(runs, key) for number in ys if number > 0]
