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

    Without a limit on time and without a callback, requests for outputs are as large as the box can take. Otherwise
    they begin with one evaluation and are doubled while they take less time than intended, or while larger ones make an
    evaluation cheaper. Requests for gradients are always whole: see `require`.

    Args:
        seconds: The most time, > 0; None: no limit.
        callback: Called with a `CheckProgress` after every request.
    """

    def __init__(self, seconds: float | None, callback: Callable[[CheckProgress], None] | None) -> None:
        self._start, self._seconds, self._callback = time.perf_counter(), seconds, callback
        self._longest = LONGEST_REQUEST if seconds is None else min(LONGEST_REQUEST, seconds / LONGEST_PART)
        self.stage = "outputs and gradients at typical rows"
        self._at_once: int | None = None if seconds is None and callback is None else 1
        self._each = float("inf")  # seconds of an evaluation, in the last request for outputs of at least that size
        self._rate = float("inf")  # the same in the last request of any kind

    def rows(self, most: int, evaluations: int) -> int:
        """Rows of the next request, up to `most`, each of which takes so many evaluations."""
        if self._at_once is None:
            return most
        return int(max(1, min(most, min(self._at_once, self.affordable) // max(1, evaluations))))

    @property
    def affordable(self) -> float:
        """Evaluations for which there is time left; infinite without a limit, or before the first request."""
        if self._seconds is None or self._rate == float("inf"):
            return float("inf")
        return max(0.0, self._seconds - self._elapsed) / max(self._rate, 1e-9)

    def require(self, evaluations: int, rows: int) -> None:
        """Raise `BudgetExceeded` unless there is time for gradients at so many rows, which take so many evaluations.

        What a layer's gradient is depends on the batch: it is not taken in parts, and looked at before it begins.
        """
        if self._seconds is not None and evaluations > self.affordable:
            left, needed = max(0.0, self._seconds - self._elapsed), evaluations * self._rate
            raise BudgetExceeded(
                f"gradients at {rows} rows, which are taken in one batch, may take {needed:.3g} s, of which "
                f"{left:.3g} s are left"
            )

    def begin(self) -> float:
        """The time at which a request begins. Raises `BudgetExceeded` if the time is over."""
        if self._seconds is not None and self._elapsed >= self._seconds:
            raise BudgetExceeded(f"the {self._seconds:g} seconds are over")
        return time.perf_counter()

    def end(self, begun: float, evaluations: int, total: int, budget: int, *, whole: bool) -> None:
        """Learn from a request that has made so many evaluations, and report the total.

        The size of the next ones does not depend on a request that was `whole`, whatever its size.
        """
        seconds = time.perf_counter() - begun
        each = seconds / max(1, evaluations)
        if self._at_once is not None and evaluations >= self._at_once:
            self._rate = each
            if not whole:
                if seconds < self._longest / 2 or each < GAIN * self._each:
                    self._at_once = 2 * evaluations
                self._each = each
        if self._callback is not None:
            self._callback(CheckProgress(self.stage, total, budget, self._elapsed))

    @property
    def _elapsed(self) -> float:
        return time.perf_counter() - self._start
