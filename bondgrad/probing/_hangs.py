"""An evaluator that ends calls which hang, asked so that each of them costs a small part of the time."""

import time
from concurrent.futures import TimeoutError as Late

from bondgrad.errors import counted
from bondgrad.evaluators import Answer, Evaluator, Request
from bondgrad.probing._number_format import duration

SHARE = 0.05  # part of the time of a probe that a call which hangs may take, unless a row alone may take longer


class HangCounter(Evaluator):
    """Passes requests on to an evaluator with a timeout, and counts the calls that it ended.

    The timeout is that of a row, and a call of n rows is ended after n times as long. So requests are kept small.

    Args:
        evaluator: Evaluates the rows.
        timeout: Its timeout, in seconds.
        seconds: The time of the probe.
    """

    def __init__(self, evaluator: Evaluator, timeout: float, seconds: float) -> None:
        workers: int = getattr(evaluator, "n", 1)
        most = workers * max(1, int(SHARE * seconds / timeout))
        super().__init__(
            max_rows=min(most, evaluator.max_rows or most),
            memory=evaluator.memory,
            retries=evaluator.retries,
            rate=evaluator.rate,
            max_evaluations=evaluator.max_evaluations,
        )
        self._evaluator, self._timeout = evaluator, timeout
        self.calls, self.seconds = 0, 0.0  # that were ended, and those of their requests

    def evaluate(self, request: Request) -> Answer:
        """See `Evaluator.evaluate`."""
        start = time.perf_counter()
        answer = self._evaluator.evaluate(request)
        ended = [call for call in answer.calls if call.error is not None and isinstance(call.error.__cause__, Late)]
        self.calls += len(ended)
        self.seconds += time.perf_counter() - start if ended else 0.0
        return answer

    @property
    def finding(self) -> str:
        """What was seen of calls that hang; empty: none did."""
        late = f"{counted(self.calls, 'call')} did not answer within the timeout of {self._timeout:g} s a row"
        return f"{late}; ending them took {duration(self.seconds)}" if self.calls else ""


def count_hangs(evaluator: Evaluator | None, seconds: float) -> HangCounter | None:
    """An evaluator with a timeout, with a count of the calls that it ends; None: it has no timeout."""
    timeout: float | None = getattr(evaluator, "timeout", None)
    return None if evaluator is None or timeout is None else HangCounter(evaluator, timeout, seconds)
