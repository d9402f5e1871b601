"""How far a check has come, and how many evaluations to ask for at once so that it can be stopped in time."""

import time
from collections.abc import Callable
from typing import NamedTuple

from bondgrad.measuring._sampler import BudgetExceeded

LONGEST_REQUEST = 1.0  # intended seconds of a request at most
LONGEST_PART = 20  # of the time allowed; a request is intended to take no more than one part in so many
GAIN = (
    0.75  # a larger request is worth its time if an evaluation in it takes less than this part of what it took before
)


class CheckProgress(NamedTuple):
    """How far a check has come. As a string it is a line to print."""

    stage: str  # what is being measured
    evaluations: int  # made so far
    budget: int  # the most that will be made
    seconds: float  # since the check began

    def __str__(self) -> str:
        return f"{self.stage}: {self.evaluations:,} of at most {self.budget:,} evaluations, {self.seconds:.0f} s"


class RequestPace:
    """Limits the time of a check, which is looked at between requests, and reports progress after each of them.

    Without a limit on time and without a callback, requests are as large as the box can take. Otherwise they begin
    with one evaluation and are doubled while they take less time than intended, or while larger ones make an evaluation
    cheaper.

    Args:
        seconds: The most time, > 0; None: no limit.
        callback: Called with a `CheckProgress` after every request.
    """

    def __init__(self, seconds: float | None, callback: Callable[[CheckProgress], None] | None) -> None:
        self._start, self._seconds, self._callback = time.perf_counter(), seconds, callback
        self._longest = LONGEST_REQUEST if seconds is None else min(LONGEST_REQUEST, seconds / LONGEST_PART)
        self.stage = "outputs and gradients at typical rows"
        self._at_once: int | None = None if seconds is None and callback is None else 1
        self._each = float("inf")  # seconds of an evaluation, in the last request that was large enough to tell

    def rows(self, most: int, evaluations: int) -> int:
        """Rows of the next request, up to `most`, each of which takes so many evaluations."""
        return most if self._at_once is None else max(1, min(most, self._at_once // max(1, evaluations)))

    @property
    def affordable(self) -> float:
        """Evaluations for which there is time left; infinite without a limit, or before the first request."""
        if self._seconds is None or self._each == float("inf"):
            return float("inf")
        return max(0.0, self._seconds - self._elapsed) / max(self._each, 1e-9)

    def begin(self) -> float:
        """The time at which a request begins. Raises `BudgetExceeded` if the time is over."""
        if self._seconds is not None and self._elapsed >= self._seconds:
            raise BudgetExceeded(f"the {self._seconds:g} seconds are over")
        return time.perf_counter()

    def end(self, begun: float, evaluations: int, total: int, budget: int) -> None:
        """Learn from a request that has made so many evaluations, and report the total."""
        seconds = time.perf_counter() - begun
        each = seconds / max(1, evaluations)
        if self._at_once is not None and evaluations >= self._at_once:
            if seconds < self._longest / 2 or each < GAIN * self._each:
                self._at_once = 2 * evaluations
            self._each = each
        if self._callback is not None:
            self._callback(CheckProgress(self.stage, total, budget, self._elapsed))

    @property
    def _elapsed(self) -> float:
        return time.perf_counter() - self._start
