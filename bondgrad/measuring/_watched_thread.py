"""Evaluation in a thread of this process, whose answer is not waited for without end."""

from collections.abc import Callable
from concurrent.futures import TimeoutError as Late

from bondgrad.evaluators import Answer, Evaluator, Request
from bondgrad.evaluators._threads import ThreadWorker
from bondgrad.evaluators._worker import Abandoned, Source


class CallAbandoned(Exception):  # noqa: N818 - it is no error of the box
    """A call did not come back in time; its thread may still be at it."""

    def __init__(self, rows: int, seconds: float) -> None:
        super().__init__(rows, seconds)
        self.rows, self.seconds = rows, seconds


class WatchedThread(Evaluator):
    """Evaluates each request in one thread, and gives it up after some time, with `CallAbandoned`.

    Args:
        patience: How many seconds a call with so many rows may take.
    """

    def __init__(self, patience: Callable[[int], float]) -> None:
        super().__init__()
        self._patience = patience
        self._worker = ThreadWorker(0, Abandoned(1, "calls", ""))

    def evaluate(self, request: Request) -> Answer:
        """See `Evaluator.evaluate`."""
        rows = len(request.points)
        seconds = self._patience(rows)
        future = self._worker.submit(Source("this process", None, request.function), request, None)
        try:
            result = future.result(seconds)
        except Late:
            if future.done():  # the error is that of the box
                raise
            self._worker.expire()
            raise CallAbandoned(rows, seconds) from None
        return self._worker.answer(result, request)

    def close(self) -> None:
        """Let the thread end."""
        self._worker.close()
