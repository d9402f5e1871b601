"""Calling a box that may fail: failed calls are repeated, halved to find the failing rows, and limited in size."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bondgrad.errors import BoxError, is_out_of_memory

Send = Callable[[Tensor, Tensor], tuple[Tensor, float]]  # points [n, d] near rows [n] -> outputs [n, d_out], seconds


@dataclass(frozen=True)
class CallSettings:
    """Limits on the rows, the time and the repeats of a call."""

    most_rows: int = 512  # rows in a call at most: more bring little, and a failure among them costs more to locate
    retries: int = 6  # how often a failing call is repeated once some calls were seen to fail by chance
    seconds: float = 1.0  # intended time of a call at most, so that a probe that runs out of time ends soon after


SETTINGS = CallSettings()


class FaultTolerantCaller:
    """Calls a box with as many rows as it accepts, repeats calls that fail, and halves calls that keep failing.

    A call that fails and then succeeds failed by chance. A call that keeps failing while its halves succeed was too
    large. Otherwise single rows are at fault, and their outputs are NaN.

    Args:
        send: Makes one call. It raises `BoxError` where the box fails.
        padding: [n, d] rows that fill up calls that would be too small for the box.
        max_rows: Most rows in any call; None: as many as is sensible.
    """

    def __init__(self, send: Send, padding: Tensor, max_rows: int | None) -> None:
        self._send, self._padding = send, padding
        self.max_rows, self._most_rows = max_rows, min(SETTINGS.most_rows, max_rows or SETTINGS.most_rows)
        self.smallest, self.largest = 1, self._most_rows  # least and most rows of a call, as far as is known
        self.refused: int | None = None  # rows of the smallest call that was too large for the box
        self.random_failures = 0  # calls or rows that failed, and succeeded when they were repeated
        self.divided = 0  # calls that were made in parts, since they failed: rows had other places in them
        self.errors: Counter[str] = Counter()  # rows at which the box raised, by the type of the error
        self.times: dict[int, list[float]] = {}  # seconds of the calls that were timed, by their rows
        self.seconds_per_call, self.seconds_per_row = 0.0, 0.0  # n rows take seconds_per_call + n · seconds_per_row
        self._seconds = 0.0  # duration of the last call
        self.out_features = 0  # outputs per row; zero until a call has succeeded

    @property
    def call_rows(self) -> int:
        """The number of rows to call the box with, so that a call takes no longer than intended, if possible."""
        spare = max(SETTINGS.seconds - self.seconds_per_call, self.seconds_per_call)
        if self.seconds_per_row * self.largest <= spare:
            return self.largest
        return max(self.smallest, int(spare / self.seconds_per_row))

    def ask(self, points: Tensor, rows: Tensor) -> Tensor:
        """Outputs [n, d_out] at points [n, d] near rows [n], from one or several calls; NaN where the box raised."""
        y = self._in_calls(points, rows)
        for _ in range(SETTINGS.retries if self.random_failures else 0):
            bad = (~torch.isfinite(y).all(1)).nonzero().squeeze(1)
            if len(bad) == 0:
                break
            self.divided += self.call_rows > 1
            y[bad] = self._in_calls(points[bad], rows[bad])
        return y

    def time(self, points: Tensor, rows: Tensor) -> bool:
        """Time a call with points [n, d] near rows [n]. Returns False if it failed, also when repeated."""
        answer = self.call(points, rows)
        if isinstance(answer, Exception):
            return False
        self.times.setdefault(len(rows), []).append(self._seconds)
        known = [(n, min(found)) for n, found in sorted(self.times.items())]
        (few, quick), (many, slow) = (known * 2)[-2:]  # the two largest sizes predict larger calls best
        self.seconds_per_row = max(0.0, slow - quick) / max(1, many - few)
        self.seconds_per_call = max(0.0, quick - few * self.seconds_per_row)
        return True

    def call(self, points: Tensor, rows: Tensor, failures: int = 0, once: bool = False) -> Tensor | Exception:
        """Outputs [n, d_out] of one call, which is repeated if it fails; the error, if all attempts fail.

        Args:
            points: [n, d].
            rows: [n] the rows that the points are near.
            failures: How often this call has failed before.
            once: Whether to make one attempt only.
        """
        error: Exception = BoxError("the call was not made")
        for attempt in range(failures, 1 if once else 1 + (SETTINGS.retries if self.random_failures else 1)):
            try:
                y, self._seconds = self._send(points, rows)
            except Exception as raised:
                if not isinstance(raised, BoxError) and not is_out_of_memory(raised):
                    raise
                error = raised
            else:
                self.count_random_failures(attempt)
                self.out_features = y.shape[1]
                return y
        return error

    def count_random_failures(self, times: int) -> None:
        """Count random failures. The first resets the limits on rows, which random failures may have caused."""
        if times > 0 and self.random_failures == 0:
            self.refused, self.largest = None, self._most_rows
        self.random_failures += times

    def _in_calls(self, points: Tensor, rows: Tensor) -> Tensor:
        """Outputs [n, d_out] at points [n, d] near rows [n], from consecutive calls of `call_rows` rows."""
        parts, first = [], 0
        while first < len(points):
            part = slice(first, first + self.call_rows)  # read anew, since a failure may have reduced it
            parts.append(self._bisected(points[part], rows[part]))
            first += len(parts[-1])
        return torch.cat(parts)

    def _bisected(self, points: Tensor, rows: Tensor) -> Tensor:
        """Outputs [n, d_out] of one call, or of its halves if it fails, down to the rows at fault."""
        n = len(points)
        if n < self.smallest:
            extra = torch.arange(self.smallest - n) % len(self._padding)
            return self._bisected(torch.cat((points, self._padding[extra])), torch.cat((rows, extra)))[:n]
        if n == self.smallest or not self._is_refused(n):
            answer = self.call(points, rows, once=n > self.smallest)
            if isinstance(answer, Tensor):
                return answer
            if is_out_of_memory(answer):
                if n == self.smallest:
                    raise answer
                self._refuse(n)
            elif n == self.smallest:
                self.errors["a wrong shape" if answer.__cause__ is None else type(answer.__cause__).__name__] += n
                return torch.full((n, self.out_features), math.nan, dtype=torch.float64)
        self.divided += 1
        failed, half = self.errors.total(), n // 2
        y = torch.cat([self._bisected(points[part], rows[part]) for part in (slice(half), slice(half, None))])
        # No row is at fault: a repeat tells whether the call is too large or failed at random.
        doubtful = self.errors.total() == failed and not self._is_refused(n)
        if doubtful and isinstance(self.call(points, rows, failures=1), Exception):
            self._refuse(n)
        return y

    def _is_refused(self, n: int) -> bool:
        return self.refused is not None and n >= self.refused

    def _refuse(self, n: int) -> None:
        self.refused = n if self.refused is None else min(n, self.refused)
        self.largest = min(self.largest, max(self.smallest, n // 2))
