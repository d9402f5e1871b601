"""A table in the terminal that shows what the workers of a box are doing, while it trains."""

import contextlib
import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from bondgrad.errors import positive_float
from bondgrad.evaluators._record import WorkerStats
from bondgrad.evaluators._remote import needed

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table

    from bondgrad.box import BlackBox

LOG = logging.getLogger("bondgrad")
WINDOW = 10.0  # seconds over which rows per second are counted
COLUMNS = ("worker", "rows", "rows/s", "busy", "median, ms", "0.9, ms", "0.99, ms", "failures")


class LiveTable:
    """Shows, around a training loop, what each worker of one or several boxes does and what failed so far.

    The table is drawn by a thread of its own, and reads counters that wait for no accelerator. An error while drawing
    is logged, and ends the table, not the training. Where the output is no terminal, such as in a log file, the
    table is printed once, at the end. Times are those of a row, over the last calls of a worker: the median, and the
    quantiles 0.9 and 0.99.

    Args:
        boxes: The layers, each of which has a table.
        every: Seconds from one picture to the next.
        console: Where to draw, a `rich.console.Console`. None: the standard output.

    Example:
        >>> with bondgrad.LiveTable(box):  # doctest: +SKIP
        ...     train(model)
    """

    def __init__(self, *boxes: "BlackBox", every: float = 0.25, console: "Console | None" = None) -> None:
        from bondgrad.box import BlackBox  # which itself needs evaluators

        for box in boxes:
            if not isinstance(box, BlackBox):
                raise TypeError(f"boxes must be BlackBox layers, got {type(box).__name__}: give the layer itself")
        needed("rich", "cli")
        from rich.console import Console

        self.boxes, self.every = boxes, positive_float("every", every)
        self._own = console is None
        self._console = Console() if console is None else console
        self._looks: deque[_Look] = deque(maxlen=max(2, round(WINDOW / self.every)))
        self._end = threading.Event()
        self._live: Any = None  # while the table is drawn
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "LiveTable":
        from rich.live import Live

        self._end.clear()
        self._looks.clear()
        self._looks.append(_Look(self.boxes))
        if self._console.is_terminal:
            # What the program prints appears above the table, if both go to the same place.
            options: Any = {"redirect_stdout": self._own, "redirect_stderr": self._own}
            live = Live(console=self._console, auto_refresh=False, **options)
            try:
                live.start()
            except Exception as error:
                _report(error)
            else:
                self._live, self._thread = live, threading.Thread(target=self._draw, daemon=True)
                self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        thread, self._thread = self._thread, None
        try:
            if thread is not None:
                thread.join()
            if self._live is not None:
                self._live.update(self.picture(), refresh=True)
            elif thread is None:
                self._console.print(self.picture())
        except Exception as error:
            _report(error)
        finally:
            self._stop()

    def picture(self) -> "Group":
        """The tables as they are now, for a console of rich."""
        from rich.console import Group

        self._looks.append(_Look(self.boxes))
        return Group(*(self._table(number, box) for number, box in enumerate(self.boxes)))

    def _draw(self) -> None:
        while not self._end.wait(self.every):
            try:
                self._live.update(self.picture(), refresh=True)
            except Exception as error:
                self._stop()
                _report(error)
                return

    def _stop(self) -> None:
        """Give the terminal back."""
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(Exception):
                live.stop()

    def _table(self, number: int, box: "BlackBox") -> "Table":
        from rich.table import Table
        from rich.text import Text  # in which brackets are brackets

        first, last = self._looks[0], self._looks[-1]
        elapsed, workers = max(last.time - first.time, 1e-9), last.workers[number]
        before = {worker.worker: worker.rows for worker in first.workers[number]}
        title, caption = Text(f"{box.function.name}, {box.evaluator!r}"), Text(summary(box, workers))
        table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
        for name in COLUMNS:
            table.add_column(name, justify="right")
        for worker in workers:
            new = max(0, worker.rows - before.get(worker.worker, 0))
            counts = f"{worker.rows:,}", f"{new / elapsed:,.1f}", f"{worker.busy:.0%}"
            table.add_row(str(worker.worker), *counts, *map(_milliseconds, worker.latency), f"{worker.failures:,}")
        return table


class _Look:
    """What the workers of all boxes have done at one moment."""

    def __init__(self, boxes: "tuple[BlackBox, ...]") -> None:
        self.time = time.perf_counter()
        self.workers: list[tuple[WorkerStats, ...]] = [box.driver.record.workers() for box in boxes]


def summary(box: "BlackBox", workers: tuple[WorkerStats, ...]) -> str:
    """What the evaluations of a box came to so far, in one line. Reading it waits for no accelerator."""
    record, abandoned = box.driver.record, getattr(box.evaluator, "abandoned", None)
    counts = {"evaluations": record.evaluations, "retried": record.retried}
    counts |= {"without an output": sum(worker.failures for worker in workers), "wasted": record.wasted}
    counts |= {"from the journal": record.recorded} if record.recorded else {}
    counts |= {} if abandoned is None else {"abandoned threads": abandoned}
    kinds = [f"{kind}: {rows:,}" for kind, rows in tuple(record.errors.items())]  # copied: workers add to it
    return "; ".join([", ".join(f"{count:,} {name}" for name, count in counts.items()), *kinds])


def _milliseconds(seconds: float) -> str:
    """A time in milliseconds, with three digits or more."""
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def _report(error: Exception) -> None:
    """Say that the table ended. A warning could be an error, and would end the training."""
    LOG.warning("The live table ended with %s: %s. Read box.stats instead.", type(error).__name__, error)
