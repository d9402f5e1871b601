"""How fast the box answers, and whether many rows at once help."""

import itertools
import statistics
import time
from dataclasses import dataclass

import torch

from bondgrad.probing._asker import Asker, LeftOut
from bondgrad.probing._meeting import timed
from bondgrad.probing._words import duration

SIZES = (1, 8, 64, 512, 4096)  # rows of a call
REPEATS = 3
SHARE, TIME_SHARE = 0.1, 0.1  # of the evaluations, and of the time, that may go into this
LINEAR = 0.7  # of the growth of a call is that of its time: it works on its rows one after the other
GAIN = 3.0  # times faster, per row, in a large call: even so, large calls are worth their while


@dataclass(frozen=True)
class Speed:
    """Times of calls."""

    latency: float  # seconds of a call with one row (or with as few as it takes)
    batches: dict[str, float]  # rows of a call: its seconds
    max_rows: int | None  # that it takes in a call. None: no call was too large
    takes_single_rows: bool

    @property
    def sizes(self) -> list[tuple[int, float]]:
        """Rows of a call, and its seconds."""
        return [(int(rows), seconds) for rows, seconds in self.batches.items()]

    @property
    def gain(self) -> float:
        """How many times faster a row is answered in a large call than in the smallest."""
        few, slow = self.sizes[0]
        return max((slow / few) / (fast / many) for many, fast in self.sizes)

    @property
    def vectorised(self) -> bool | None:
        """None: not to be told, or something between."""
        if not self.takes_many_rows:
            return False
        if len(self.sizes) == 1 or self.sizes[-1][0] < 8:
            return None
        if self.growth < LINEAR:
            return True
        return False if self.gain < GAIN else None

    @property
    def growth(self) -> float:
        """By how much the time of a call grows from the second largest size to the largest, over that of its rows."""
        (few, quick), (many, slow) = self.sizes[-2:]
        return slow / max(quick, 1e-9) / (many / few)

    @property
    def takes_many_rows(self) -> bool:
        """More than one in a call."""
        return self.max_rows != 1

    def seconds(self, rows: int) -> float:
        """Estimate for that many rows, in one call, or in as few as it takes; beyond what was tried, extrapolated."""
        if self.max_rows is not None and rows > self.max_rows:
            whole, rest = divmod(rows, self.max_rows)
            return whole * self.seconds(self.max_rows) + (self.seconds(rest) if rest else 0.0)
        if len(self.sizes) == 1:
            n, seconds = self.sizes[0]
            return rows / n * seconds
        pairs = list(itertools.pairwise(self.sizes))
        (n0, t0), (n1, t1) = next((pair for pair in pairs if rows <= pair[1][0]), pairs[-1])
        return max(t0, t0 + (t1 - t0) * (rows - n0) / (n1 - n0))

    def extrapolated(self, rows: int) -> bool:
        """Whether an estimate for that many rows goes beyond what was tried."""
        return min(rows, self.max_rows or rows) > self.sizes[-1][0]

    @property
    def words(self) -> str:
        """What a person wants to know."""
        text = f"One row takes {duration(self.latency)}"
        if not self.takes_single_rows:
            text = f"It does not take one row alone; {self.sizes[0][0]} take {duration(self.latency)}"
        if not self.takes_many_rows:
            return text + ". It takes one row at a time: a call with two failed."
        largest, slow = self.sizes[-1]
        if largest > 1:
            text += f", {largest:,} at once {duration(slow)} ({largest / slow:,.0f} rows a second)"
        kinds = {
            True: "vectorised",
            False: "not vectorised, the time grows with the rows",
            None: "large calls help, but in them the time grows with the rows",
        }
        text += f": {kinds[self.vectorised]}." if largest >= 8 else "."
        if self.max_rows is not None:
            text += f" It takes no more than about {self.max_rows} rows in a call: a larger one failed."
        return text


def measure_speed(asker: Asker) -> Speed:
    """Time calls of growing size, as long as that takes a modest part of the budget."""
    allowed = asker.function.evaluations + int(SHARE * asker.affordable())
    end = time.perf_counter() + TIME_SHARE * asker.time_left()
    usable = asker.usable  # a call that fails must fail for its size
    for attempt in range(REPEATS):
        for n in sorted({asker.least, *SIZES}):
            if n < asker.least or (asker.refused is not None and n >= asker.refused):
                continue
            if len(asker.times.get(n, [])) > attempt:
                continue
            # The next size once, if there is time for what the last one took and for its rows.
            seconds = asker.seconds_per_call + n * asker.seconds_per_row
            late = time.perf_counter() + seconds > end or asker.function.evaluations + n > allowed
            if late or (attempt > 0 and n not in asker.times):
                break
            if not timed(asker, usable[torch.arange(n) % len(usable)]):
                asker.refused = n
                break
    if not asker.times:
        raise LeftOut
    batches = {n: statistics.median(t) if n > 1 else min(t) for n, t in sorted(asker.times.items())}
    if asker.refused is not None:
        asker.most = min(asker.refused - 1, max(asker.most if asker.most < asker.refused else 1, *batches))
    return Speed(
        latency=next(iter(batches.values())),
        batches={str(n): seconds for n, seconds in batches.items()},
        max_rows=None if asker.refused is None else asker.most,
        takes_single_rows=asker.least == 1,
    )
