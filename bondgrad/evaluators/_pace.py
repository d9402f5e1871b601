"""A limit on the evaluations in a second."""

import threading
import time


class Pace:
    """Lets evaluations start no faster than a given rate, whichever threads ask.

    In any interval of T seconds at most rate · T evaluations start, and those of one call more.

    Args:
        rate: Evaluations in a second.
    """

    share = 0.1  # of the evaluations of a second that one call may have

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.call_rows = max(1, int(rate * self.share))
        self._lock = threading.Lock()
        self._next = 0.0  # when the next call may start, by the monotonic clock

    def delay(self, rows: int) -> float:
        """Reserve the time of that many evaluations. Returns the seconds to wait before they may start."""
        with self._lock:
            now = time.monotonic()
            start = max(now, self._next)
            self._next = start + rows / self.rate
            return start - now

    def wait(self, rows: int) -> None:
        """Wait until that many evaluations may start."""
        if (seconds := self.delay(rows)) > 0:
            time.sleep(seconds)
