"""Evaluation in this process."""

import functools

import torch

from bondgrad.evaluators._calls import evaluate_rows
from bondgrad.evaluators._evaluator import Answer, Evaluator, Request
from bondgrad.evaluators._pace import Pace


class Local(Evaluator):
    """Calls the box here, on as many rows at once as it may be given.

    Sizes of calls depend on these arguments only, never on free memory. The exceptions: when memory does run out, the
    layer halves its calls for good, once with a warning, and the step goes on; and when a call raises an error, its
    rows are asked again in smaller calls, until the rows at fault are found.

    Args:
        max_rows: Most rows in one call; 1 for a box that takes one row at a time. None: the whole batch in the forward
            pass, and what `memory` allows in the backward pass.
        memory: Bytes that the inputs, contexts and outputs of the perturbed rows may take at one time. What the box
            needs for itself comes on top. None: 2 MiB on the CPU, 256 MiB on an accelerator.
        retries: How often a row is asked again for which no finite output came; None: as often as it takes.
        rate: The most evaluations in a second; None: no limit.
        max_evaluations: The most evaluations of one layer; None: no limit.
    """

    def __init__(
        self,
        max_rows: int | None = None,
        memory: int | None = None,
        *,
        retries: int | None = 2,
        rate: float | None = None,
        max_evaluations: int | None = None,
    ) -> None:
        super().__init__(max_rows=max_rows, memory=memory, retries=retries, rate=rate, max_evaluations=max_evaluations)
        self.capturable = rate is None and max_evaluations is None  # which a graph could not keep
        self._pace = None if self.rate is None else Pace(self.rate)
        _keep_freed_memory()

    def __repr__(self) -> str:
        return f"Local(max_rows={self.max_rows}, memory={self.memory})"

    def evaluate(self, request: Request) -> Answer:
        """See `Evaluator.evaluate`."""
        return evaluate_rows(request, pace=self._pace)


@functools.cache
def _keep_freed_memory() -> None:
    """Let the C library keep the pages of large temporary arrays, once per process.

    Evaluating many rows at once makes temporaries of megabytes. glibc hands those back to the system when they are
    freed, and the next step pays for every page again, which can cost as much as the evaluation itself. To have freed
    one block just below its limit of 32 MiB teaches glibc to keep such memory; the block itself is never touched.
    """
    torch.empty(32 * 2**20 - 2**16, dtype=torch.uint8)
