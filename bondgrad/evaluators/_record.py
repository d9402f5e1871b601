"""What the calls of a box have cost, by worker, and which errors they ended with."""

import threading
import time
import traceback
import warnings
from collections import Counter, deque
from typing import Any, NamedTuple

import numpy as np

from bondgrad.errors import counted, kind_of
from bondgrad.evaluators._evaluator import NOT_MADE, RECORDED, Call

LATENCIES = 1000  # of the last calls of a worker, from which quantiles are computed


class WorkerStats(NamedTuple):
    """What one worker has done."""

    worker: int  # its number
    rows: int  # sent to it
    failures: int  # of them, without an output
    busy: float  # share of the time since its first call that it was working
    latency: tuple[float, float, float]  # seconds for a row: the median, and the quantiles 0.9 and 0.99, of late


class CallRecord:
    """Counts rows, failures and seconds by worker, and errors by kind. It is not saved with a model."""

    def __init__(self) -> None:
        self.evaluations = 0  # rows sent to the box; those that a journal answered do not count
        self.retried = 0  # of them, those that were asked again
        self.wasted = 0  # of them, those that were evaluated ahead, and then not needed
        self.recorded = 0  # rows that a journal answered
        self.errors: Counter[str] = Counter()  # rows without an output, by the type of the error
        self.tracebacks: dict[str, str] = {}  # the first error of each type in full
        self._workers: dict[int, _Worker] = {}
        self._told: set[str] = set()
        self.under_way = 0  # rows of requests that were not answered yet
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """The state of a new record, with which copies of a layer begin."""
        return {}

    def __setstate__(self, _: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    def reserve(self, rows: int, limit: int | None) -> bool:
        """Whether a request of that many rows may be made. Rows of requests that are under way count, until `add`."""
        with self._lock:
            if limit is not None and self.evaluations + self.under_way + rows > limit:
                return False
            self.under_way += rows
            return True

    def add_again(self, rows: int) -> None:
        """Count reserved evaluations of rows that a call asks again by itself; its record has them once."""
        with self._lock:
            self.under_way -= rows
            self.evaluations += rows
            self.retried += rows

    def add(self, calls: tuple[Call, ...], again: bool, reserved: int = 0) -> None:
        """Take in the calls of one attempt at a request; `again`: of rows that were asked before."""
        with self._lock:
            self.under_way -= reserved
            for call in calls:
                if call.error is not None:
                    kind = kind_of(call.error)
                    self.errors[kind] += call.rows
                    if kind not in self.tracebacks:
                        self.tracebacks[kind] = "".join(traceback.format_exception(call.error))
                if call.worker in (RECORDED, NOT_MADE):
                    self.recorded += call.rows if call.worker == RECORDED else 0
                    continue
                self.evaluations += call.rows
                self.retried += call.rows if again else 0
                worker = self._workers.get(call.worker)
                if worker is None:
                    worker = self._workers[call.worker] = _Worker(call.start)
                worker.add(call)

    def workers(self) -> tuple[WorkerStats, ...]:
        """The statistics of every worker so far, by number."""
        with self._lock:
            return tuple(worker.stats(number) for number, worker in sorted(self._workers.items()))

    def forget_workers(self) -> None:
        """Begin the statistics by worker anew: those of another evaluator have the same numbers."""
        with self._lock:
            self._workers.clear()

    def tell(self, error: Exception, rows: int, lost: int, alone: bool = False) -> None:
        """Warn of an error, once for each type.

        Args:
            error: The first error of a request.
            rows: How many rows of the request were asked again; zero where the evaluator has no retries.
            lost: How many rows remained without an output.
            alone: Whether they got one when they were asked one by one.
        """
        kind = kind_of(error)
        if kind not in self._told:
            self._told.add(kind)
            hint = " If the box takes one row at a time, give the evaluator max_rows=1." if alone else ""
            were = "was" if rows == 1 else "were"
            again = f"{counted(rows)} {were} asked again, and {lost} remained without an output"
            what = again if rows > 0 else f"{counted(lost)} got no output"
            warnings.warn(
                f"{what}, since {error} Further errors of this kind are counted in box.stats.errors. retries= of the "
                f"evaluator says how often rows are asked again.{hint}",
                stacklevel=4,
            )

    def tell_waiting(self, error: Exception) -> None:
        """Warn, once, that a box without an answer is waited for."""
        if "waiting" not in self._told:
            self._told.add("waiting")
            warnings.warn(
                f"the box does not answer, and is waited for (retries=None). Stop with Ctrl-C. {error}", stacklevel=4
            )


class _Worker:
    """The sums of one worker."""

    def __init__(self, start: float) -> None:
        self.rows, self.failures, self.seconds, self.start = 0, 0, 0.0, start
        self.latencies: deque[float] = deque(maxlen=LATENCIES)

    def add(self, call: Call) -> None:
        self.rows += call.rows
        self.failures += call.rows if call.error is not None else 0
        self.seconds += call.duration
        self.latencies.append(call.duration / call.rows if call.rows else 0.0)

    def stats(self, number: int) -> WorkerStats:
        middle, high, highest = np.quantile(self.latencies, (0.5, 0.9, 0.99)).tolist()
        elapsed = max(time.time() - self.start, self.seconds, 1e-9)
        return WorkerStats(number, self.rows, self.failures, self.seconds / elapsed, (middle, high, highest))
