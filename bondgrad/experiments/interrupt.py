"""Ctrl-C, without losing anything."""

import contextlib
import signal
from collections.abc import Iterator
from typing import Protocol


class Stoppable(Protocol):
    """Work that looks at `stopped` now and then."""

    stopped: bool


@contextlib.contextmanager
def interrupts(work: Stoppable) -> Iterator[None]:
    """Ctrl-C ends the work after the batch at hand, lest it is counted twice or half; pressed again, at once."""

    def stop(*_: object) -> None:
        if work.stopped:
            raise KeyboardInterrupt
        work.stopped = True

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
