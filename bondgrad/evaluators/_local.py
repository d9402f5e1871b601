"""Evaluation in this process, one call per request."""

import functools

import torch

from bondgrad.errors import positive_int
from bondgrad.evaluators._evaluator import Answer, Evaluator, Request


class Local(Evaluator):
    """Calls the box here, on as many rows at once as it may be given.

    Sizes of calls depend on these arguments only, never on free memory. The exception: when memory does run out, the
    layer halves its calls for good, once with a warning, and the step goes on.

    Args:
        max_rows: Most rows in one call; 1 for a box that takes one row at a time. None: the whole batch in the forward
            pass, and what `memory` allows in the backward pass.
        memory: Bytes that the inputs, contexts and outputs of the perturbed rows may take at one time. What the box
            needs for itself comes on top. None: 2 MiB on the CPU, 256 MiB on an accelerator.
    """

    def __init__(self, max_rows: int | None = None, memory: int | None = None) -> None:
        self.max_rows = None if max_rows is None else positive_int("max_rows", max_rows)
        self.memory = None if memory is None else positive_int("memory", memory)
        _keep_freed_memory()

    def __repr__(self) -> str:
        return f"Local(max_rows={self.max_rows}, memory={self.memory})"

    def evaluate(self, request: Request) -> Answer:
        """See `Evaluator.evaluate`."""
        return Answer(request.function(request.points, *request.context, seed=request.seed))


@functools.cache
def _keep_freed_memory() -> None:
    """Let the C library keep the pages of large temporary arrays, once per process.

    Evaluating many rows at once makes temporaries of megabytes. glibc hands those back to the system when they are
    freed, and the next step pays for every page again, which can cost as much as the evaluation itself. To have freed
    one block just below its limit of 32 MiB teaches glibc to keep such memory; the block itself is never touched.
    """
    torch.empty(32 * 2**20 - 2**16, dtype=torch.uint8)
