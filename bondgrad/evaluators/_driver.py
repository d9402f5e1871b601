"""Requests to an evaluator, in portions that it and the memory can take."""

import math
import warnings
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch import Tensor

from bondgrad.errors import BoxError
from bondgrad.evaluators._evaluator import Evaluator, Purpose, Request

T = TypeVar("T")


class Driver:
    """Sends the requests of one layer, or of one measurement, to an evaluator.

    Args:
        evaluator: Where rows are evaluated.
        requests: The number of the first request, where another driver sent those before.
    """

    cpu_memory = 2 * 2**20  # bytes of one request on a CPU: what caches hold, with room for what the box itself needs
    device_memory = 256 * 2**20  # bytes of one request on an accelerator: enough work to keep it busy

    def __init__(self, evaluator: Evaluator, requests: int = 0) -> None:
        if not isinstance(evaluator, Evaluator):
            raise ValueError(f"evaluator must be an instance from bondgrad.evaluators, or None, got {evaluator!r}")
        self.evaluator = evaluator
        self.requests = requests  # sent so far
        self.max_rows = evaluator.max_rows  # in one request; less once memory has run out; None: no limit
        self._rows: int  # of the last portion, which is to be halved if memory runs out
        self._warned = False

    @property
    def version(self) -> Hashable:
        """A value that differs (`!=`) from an earlier one if requests are divided in another way now."""
        return self.evaluator, self.max_rows, self.evaluator.memory

    def portion(self, row_bytes: int, wanted: int, device: torch.device) -> int:
        """How many of the `wanted` points may exist at a time, `row_bytes` each with their outputs."""
        memory = self.evaluator.memory or (self.cpu_memory if device.type == "cpu" else self.device_memory)
        rows = min(wanted, max(1, memory // row_bytes))
        self._rows = rows if self.max_rows is None else min(rows, self.max_rows)
        return self._rows

    def ask(
        self,
        function: Callable[..., Tensor],
        points: Tensor,
        context: tuple[Tensor, ...] = (),
        pairs: bool = False,
        seed: int | None = None,
        purpose: Purpose = "base",
        whole: bool = False,
    ) -> Tensor:
        """The outputs [N, d_out] at any number of points [N, d], in as many requests as it takes; NaN where none came.

        The arguments are those of `Request`.
        """
        n, most = points.shape[0], self.max_rows
        size = self._rows = n if most is None else min(n, most)
        if size == n:
            return self._answer(Request(function, points, context, pairs, seed, purpose, self.requests, whole))
        if pairs and size > 1:
            size -= size % 2
        y: Tensor | None = None
        for start in range(0, n, size):
            part = slice(start, start + size)
            nearby = tuple(c[part] for c in context)
            answer = self._answer(Request(function, points[part], nearby, pairs, seed, purpose, self.requests, whole))
            # Copied at once: a box may answer every call in the same buffer.
            y = answer.new_empty(n, answer.shape[1]) if y is None else y
            y[part] = answer
        assert y is not None
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

    def _answer(self, request: Request) -> Tensor:
        self.requests += 1  # before the evaluation: one that fails had its number, too
        answer = self.evaluator.evaluate(request)
        y, ok, rows = answer.y, answer.ok, request.points.shape[0]
        if y.ndim != 2 or y.shape[0] != rows or (ok is not None and (ok.shape != (rows,) or ok.dtype != torch.bool)):
            also = "" if ok is None else f" with ok {list(ok.shape)} of {ok.dtype}"
            raise BoxError(
                f"{type(self.evaluator).__name__}.evaluate must answer {rows} rows with y [{rows}, out_features] and "
                f"ok [{rows}] of booleans, or None, got y {list(y.shape)}{also}"
            )
        return y if ok is None else y.masked_fill(~ok[:, None], math.nan)

    def _halve(self, error: Exception) -> None:
        if self._rows <= 1:
            raise BoxError("out of memory on a single row: the box itself needs more than there is") from error
        self.max_rows = self._rows // 2
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"out of memory with {self._rows} rows at a time: going on with at most {self.max_rows}, halved again "
                "if need be. Pass evaluator=Local(max_rows=...) to start there.",
                stacklevel=2,
            )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on the CPU or on an accelerator."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("not enough memory" in text or "out of memory" in text)
