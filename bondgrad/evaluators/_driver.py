"""Requests to an evaluator, in portions that it and the memory can take."""

import math
import warnings
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch import Tensor

from bondgrad.errors import BoxError
from bondgrad.evaluators._evaluator import Evaluator, Request

T = TypeVar("T")


class Driver:
    """Sends the requests of one layer, or of one measurement, to an evaluator.

    Args:
        evaluator: Where rows are evaluated.
    """

    cpu_memory = 2 * 2**20  # bytes of one request on a CPU: what caches hold, with room for what the box itself needs
    device_memory = 256 * 2**20  # bytes of one request on an accelerator: enough work to keep it busy

    def __init__(self, evaluator: Evaluator) -> None:
        if not isinstance(evaluator, Evaluator):
            raise ValueError(f"evaluator must be an instance from bondgrad.evaluators, or None, got {evaluator!r}")
        self.evaluator = evaluator
        self.requests = 0  # sent so far
        self._fitting: int | None = None  # the most rows that memory had room for; None: it never ran out
        self._rows = 0  # of the last portion, which is to be halved if memory runs out
        self._warned = False

    @property
    def max_rows(self) -> int | None:
        """The most rows that are sent in one request; None: no limit."""
        limits = [limit for limit in (self.evaluator.max_rows, self._fitting) if limit is not None]
        return min(limits, default=None)

    @property
    def version(self) -> Hashable:
        """Changes, in the sense of ==, when requests are cut in another way."""
        return self.evaluator, self.max_rows, self.evaluator.memory

    def portion(self, row_bytes: int, wanted: int, device: torch.device) -> int:
        """How many of the `wanted` points may exist at a time, `row_bytes` each with their outputs."""
        memory = self.evaluator.memory or (self.cpu_memory if device.type == "cpu" else self.device_memory)
        rows = min(wanted, max(1, memory // row_bytes))
        self._rows = rows if self.max_rows is None else min(rows, self.max_rows)
        return self._rows

    def ask(self, request: Request) -> Tensor:
        """The outputs [N, d_out] of a request of any size; NaN where none came."""
        n, most = request.points.shape[0], self.max_rows
        size = self._rows = n if most is None else min(n, most)
        if size == n:
            return self._sent(request)
        if request.pairs and size > 1:
            size -= size % 2
        first = self._sent(_rows_of(request, slice(size)))
        # Copied at once: a box may answer every call in the same buffer.
        y = first.new_empty(n, first.shape[1])
        y[:size] = first
        for start in range(size, n, size):
            part = slice(start, start + size)
            y[part] = self._sent(_rows_of(request, part))
        return y

    def run(self, work: Callable[[], T]) -> T:
        """Run `work`, which calls `portion` and `ask`; again with half as many rows whenever memory runs out."""
        while True:
            try:
                return work()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._halve(error)

    def _sent(self, request: Request) -> Tensor:
        answer = self.evaluator.evaluate(request._replace(number=self.requests))
        self.requests += 1
        return answer.y if answer.ok is None else answer.y.masked_fill(~answer.ok[:, None], math.nan)

    def _halve(self, error: Exception) -> None:
        if self._rows <= 1:
            raise BoxError("out of memory on a single row: the box itself needs more than there is") from error
        self._fitting = self._rows // 2
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"out of memory with {self._rows} rows at a time: going on with at most {self._fitting}, halved again "
                "if need be. Pass evaluator=Local(max_rows=...) to start there.",
                stacklevel=2,
            )


def _rows_of(request: Request, part: slice) -> Request:
    return request._replace(points=request.points[part], context=tuple(c[part] for c in request.context))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on the CPU or on an accelerator."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("not enough memory" in text or "out of memory" in text)
