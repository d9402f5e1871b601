"""Ctrl-C, without losing anything."""

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Protocol


class Stoppable(Protocol):
    """Work that looks at `stopped` now and then."""

    stopped: bool


@contextlib.contextmanager
def interrupts(work: Stoppable) -> Iterator[None]:
    """Ctrl-C ends the work after the batch at hand, lest it is counted twice or half; pressed again, at once.

    So does SIGTERM, by which containers and clusters ask for an end.
    """

    def stop(*_: object) -> None:
        if work.stopped:
            raise KeyboardInterrupt
        work.stopped = True
        # Not by print, which the signal may have come in the middle of.
        with contextlib.suppress(OSError):  # nobody may be there to read it
            os.write(2, b"\nStopping after this step. Ctrl-C again: at once, without what is not saved yet.\n")

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
