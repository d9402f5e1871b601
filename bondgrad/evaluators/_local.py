"""Evaluation in this process, many rows per call."""

import functools
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from bondgrad.calling._arguments import positive_int
from bondgrad.calling._function import is_out_of_memory
from bondgrad.errors import BoxError
from bondgrad.evaluators._evaluator import Answer, Evaluator, Function

T = TypeVar("T")

CPU_MEMORY = 2 * 2**20  # what caches hold, with room for what the box itself needs
DEVICE_MEMORY = 256 * 2**20  # enough work per call to keep a GPU busy


class Local(Evaluator):
    """Calls the box here, on as many rows at once as it may be given.

    Sizes depend on these arguments only, never on free memory. The exception: when memory does run out, the portion is
    halved for good, once with a warning, and the step goes on.

    Args:
        max_rows: Most rows in one call; 1 for a box that takes one row at a time. None: the whole batch in the forward
            pass, and what `memory` allows in the backward pass.
        memory: Bytes that the inputs, contexts and outputs of the perturbed rows may take at one time. What the box
            needs for itself comes on top. None: 2 MiB on the CPU, 256 MiB on an accelerator.
    """

    def __init__(self, max_rows: int | None = None, memory: int | None = None) -> None:
        self.max_rows = None if max_rows is None else positive_int("max_rows", max_rows)
        self.memory = None if memory is None else positive_int("memory", memory)
        self._rows = 0  # in play when memory runs out
        self._warned = False
        _keep_freed_memory()

    def __repr__(self) -> str:
        return f"Local(max_rows={self.max_rows}, memory={self.memory})"

    def portion(self, row_bytes: int, wanted: int, device: torch.device) -> int:
        """See `Evaluator.portion`."""
        memory = self.memory or (CPU_MEMORY if device.type == "cpu" else DEVICE_MEMORY)
        rows = min(wanted, max(1, memory // row_bytes))
        self._rows = rows if self.max_rows is None else min(rows, self.max_rows)
        return self._rows

    def evaluate(self, function: Function, points: Tensor, context: tuple[Tensor, ...]) -> Answer:
        """See `Evaluator.evaluate`."""
        n = points.shape[0]
        size = self._rows = n if self.max_rows is None else min(n, self.max_rows)
        if size == n:
            y = function(points, *context)
        else:
            first = function(points[:size], *(c[:size] for c in context))
            # Copied at once: a box may answer every call in the same buffer.
            y = first.new_empty(n, first.shape[1])
            y[:size] = first
            for start in range(size, n, size):
                part = slice(start, start + size)
                y[part] = function(points[part], *(c[part] for c in context))
        return y, None

    def run(self, work: Callable[[], T]) -> T:
        """See `Evaluator.run`."""
        while True:
            try:
                return work()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._halve(error)

    def _halve(self, error: Exception) -> None:
        if self._rows <= 1:
            raise BoxError("out of memory on a single row: the box itself needs more than there is") from error
        self.max_rows = self._rows // 2
        self.version += 1
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"out of memory with {self._rows} rows at a time: going on with at most {self.max_rows}, halved again "
                "if need be. Pass evaluator=Local(max_rows=...) to start there.",
                stacklevel=2,
            )


@functools.cache
def _keep_freed_memory() -> None:
    """Let the C library keep the pages of large temporary arrays, once per process.

    Evaluating many rows at once makes temporaries of megabytes. glibc hands those back to the system when they are
    freed, and the next step pays for every page again, which can cost as much as the evaluation itself. To have freed
    one block just below its limit of 32 MiB teaches glibc to keep such memory; the block itself is never touched.
    """
    torch.empty(32 * 2**20 - 2**16, dtype=torch.uint8)
