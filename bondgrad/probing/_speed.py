"""The time of calls, and whether large calls are faster per row."""

import itertools
import statistics
from dataclasses import dataclass

import torch

from bondgrad.measuring._sampler import BudgetExceeded, Sampler
from bondgrad.probing._facts import Facts
from bondgrad.probing._number_format import duration


@dataclass(frozen=True)
class SpeedSettings:
    """The calls that are timed, and the thresholds of the findings."""

    sizes: tuple[int, ...] = (1, 8, 64, 512, 4096)  # rows of the calls, up to what training needs
    repeats: int = 3  # calls of each size, of which the median counts
    share: float = 0.1  # part of the evaluations and of the time left that this measurement may take
    linear: float = 0.7  # part of proportional growth from which on the time counts as growing with the rows
    gain: float = 3.0  # large calls help if they are so many times faster per row, even if time grows with the rows


SETTINGS = SpeedSettings()


@dataclass(frozen=True)
class Speed:
    """The time of calls by their number of rows, and the most rows that the box takes in a call."""

    latency: float  # seconds of a call with one row, or with as few rows as the box takes
    batches: dict[int, float]  # seconds of a call by its number of rows, small calls first
    max_rows: int | None  # most rows that the box takes in a call. None: no call was too large

    @property
    def vectorised(self) -> bool | None:
        """Whether the rows of a call are computed together. None: unknown, or partly so."""
        if self.max_rows == 1:
            return False
        if len(self.batches) == 1 or max(self.batches) < 8:
            return None
        (few, quick), (many, slow) = list(self.batches.items())[-2:]
        if slow / max(quick, 1e-9) < SETTINGS.linear * many / few:
            return True
        per_row = [seconds / rows for rows, seconds in self.batches.items()]
        return False if per_row[0] < SETTINGS.gain * min(per_row) else None

    @property
    def unit(self) -> str:
        """What the time of a call with one row is that of: "call" or "row"."""
        return "call" if self.vectorised else "row"

    def seconds(self, rows: int) -> float:
        """Estimated seconds for `rows` rows, in as few calls as possible; extrapolated beyond the calls timed."""
        if self.max_rows is not None and rows > self.max_rows:
            whole, rest = divmod(rows, self.max_rows)
            return whole * self.seconds(self.max_rows) + (self.seconds(rest) if rest else 0.0)
        known = list(self.batches.items())
        pairs = list(itertools.pairwise(known if len(known) > 1 else [(0, 0.0), *known]))
        (n0, t0), (n1, t1) = next((pair for pair in pairs if rows <= pair[1][0]), pairs[-1])
        return max(t0, t0 + (t1 - t0) * (rows - n0) / (n1 - n0))

    def extrapolated(self, rows: int) -> bool:
        """Whether an estimate for `rows` rows needs calls with more rows than any that was timed."""
        return min(rows, self.max_rows or rows) > max(self.batches)

    @property
    def words(self) -> str:
        """The finding, in sentences."""
        smallest, largest = min(self.batches), max(self.batches)
        alone = "One row takes" if smallest == 1 else f"It does not take one row alone; {smallest} take"
        text = f"{alone} {duration(self.latency)}"
        if self.max_rows == 1:
            return text + ". It takes one row at a time: a call with two failed."
        if largest > 1:
            slow = self.batches[largest]
            text += f", {largest:,} at once {duration(slow)} ({largest / slow:,.0f} rows a second)"
        growing = "large calls help, but in them" if self.vectorised is None else "not vectorised,"
        kind = "vectorised" if self.vectorised else f"{growing} the time grows with the rows"
        text += f": {kind}." if largest >= 8 else "."
        refused = f"It takes no more than about {self.max_rows} rows in a call: a larger one failed."
        return text if self.max_rows is None else f"{text} {refused}"


def measure_speed(sampler: Sampler, facts: Facts, generator: torch.Generator) -> Speed:
    """Time calls of growing size, within a share of the budget."""
    caller = sampler.caller
    allowed = sampler.evaluations + int(SETTINGS.share * sampler.affordable)
    end = sampler.elapsed + SETTINGS.share * sampler.time_left
    most = caller.max_rows or max(SETTINGS.sizes)
    sizes = [n for n in sorted({caller.smallest, most, *SETTINGS.sizes}) if caller.smallest <= n <= most]
    for n in sizes * SETTINGS.repeats:
        in_time = sampler.elapsed + caller.seconds_per_call + n * caller.seconds_per_row <= end
        fits = in_time and sampler.evaluations + n <= allowed and (caller.refused is None or n < caller.refused)
        if fits and not sampler.time_rows(facts.choose(n, generator)):  # usable rows: the call was too large
            caller.refused = n
    if not caller.times:
        raise BudgetExceeded("the time left does not reach")
    batches = {n: statistics.median(t) if n > 1 else min(t) for n, t in sorted(caller.times.items())}
    if caller.refused is not None:
        known = caller.largest if caller.largest < caller.refused else 1
        caller.largest = min(caller.refused - 1, max(known, *batches))
    return Speed(batches[min(batches)], batches, None if caller.refused is None else caller.largest)
