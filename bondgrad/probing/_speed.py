"""How fast the box answers, and whether many rows at once help."""

import statistics
import time
from dataclasses import dataclass

import torch

from bondgrad._function import is_out_of_memory
from bondgrad.errors import BoxError
from bondgrad.probing._asker import Asker, LeftOut
from bondgrad.probing._words import duration

SIZES = (1, 8, 64, 512, 4096)  # rows of a call
REPEATS = 3
SHARE, TIME_SHARE = 0.25, 0.1  # of the evaluations, and of the time, that may go into this
GAIN = 4.0  # times faster, per row, in the largest call: vectorised
LOSS = 2.0  # less than this: it goes through its rows one by one


@dataclass(frozen=True)
class Speed:
    """Times of calls."""

    latency: float  # seconds of a call with one row (or with two, if it takes no fewer)
    batches: dict[str, float]  # rows of a call: its seconds
    takes_many_rows: bool
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
        if self.sizes[-1][0] < 8:
            return None
        return True if self.gain >= GAIN else False if self.gain < LOSS else None

    def seconds(self, rows: int) -> float:
        """Estimate for that many rows, in calls of the largest size that was tried."""
        largest, slow = self.sizes[-1]
        if rows >= largest or len(self.sizes) == 1:
            return rows / largest * slow
        (n0, t0), (n1, t1) = next(pair for pair in zip(self.sizes, self.sizes[1:], strict=False) if rows <= pair[1][0])
        return t0 + (t1 - t0) * (rows - n0) / (n1 - n0)

    @property
    def words(self) -> str:
        """What a person wants to know."""
        text = f"One row takes {duration(self.latency)}"
        if not self.takes_single_rows:
            text = f"It does not take one row alone; two take {duration(self.latency)}"
        if not self.takes_many_rows:
            return text + ". It takes one row at a time: a call with two failed."
        largest, slow = self.sizes[-1]
        if largest > 1:
            text += f", {largest:,} at once {duration(slow)} ({largest / slow:,.0f} rows a second)"
        kinds = {True: "vectorised", False: "not vectorised, the time grows with the rows", None: "partly vectorised"}
        return text + (f": {kinds[self.vectorised]}." if largest >= 8 else ".")


def measure_speed(asker: Asker) -> Speed:
    """Time calls of growing size, as long as that takes a modest part of the budget."""
    allowed = int(SHARE * asker.affordable())
    end = time.perf_counter() + TIME_SHARE * asker.time_left()
    sizes = [1] if asker.most == 1 else [n for n in SIZES if n >= asker.least]
    if asker.least > 1:
        sizes.insert(0, asker.least)
    batches: dict[str, float] = {}
    spent = 0
    for n in sizes:
        if batches and (spent + n > allowed or time.perf_counter() + n * asker.seconds_per_row > end):
            break
        rows = torch.arange(n) % asker.rows
        times: list[float] = []
        for _ in range(REPEATS):
            if times and (spent + n > allowed or time.perf_counter() + times[-1] > end):
                break
            asker.synchronise()
            start = time.perf_counter()
            try:
                asker.call(asker.x[rows], rows)
            except Exception as error:
                if isinstance(error, (BoxError, LeftOut)) or is_out_of_memory(error):
                    break
                raise
            asker.synchronise()
            times.append(time.perf_counter() - start)
            spent += n
        if not times:
            break
        batches[str(n)] = statistics.median(times) if n > 1 else min(times)
        asker.seconds_per_row = batches[str(n)] / n
    if not batches:
        raise LeftOut
    return Speed(next(iter(batches.values())), batches, asker.most > 1, asker.least == 1)
