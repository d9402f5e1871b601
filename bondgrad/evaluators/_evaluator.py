"""The seam between a layer and the place where its box is evaluated: a request goes in, an answer comes out."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, NamedTuple

from torch import Tensor

Purpose = Literal["base", "gradient", "trial", "structure", "probe"]


class Request(NamedTuple):
    """Rows to be evaluated."""

    function: Callable[..., Tensor]  # function(points, *context, seed=seed) -> [N, d_out]; counts its evaluations
    points: Tensor  # [N, d]
    context: tuple[Tensor, ...] = ()  # [N, ...] each: what else the function is given
    pairs: bool = False  # rows 2k and 2k + 1 are the two signs of one perturbation: keep them together, in this order
    seed: int | None = None  # for a function that takes one
    purpose: Purpose = "base"  # why these rows are evaluated
    number: int = 0  # of the request, counted by the driver
    whole: bool = False  # whether the box remembers: the function is called once, here, with all rows in their order


class Answer(NamedTuple):
    """What came of a request. Only `y` must be given; the rest describes rows to a journal or a progress display."""

    y: Tensor  # [N, d_out] the outputs in the order of the points; it may be memory that belongs to the function
    ok: Tensor | None = None  # [N] bool, False where no output came for a row; None: all came
    worker: Tensor | None = None  # [N] the number of the worker that evaluated a row
    start: Tensor | None = None  # [N] seconds, when its evaluation began
    duration: Tensor | None = None  # [N] seconds that it took
    attempts: Tensor | None = None  # [N] how often it was tried
    error: tuple[str | None, ...] | None = None  # N texts: why no output came for a row


class Evaluator(ABC):
    """Decides where rows are evaluated: in this process, in others, on other machines.

    An evaluator does one thing, `evaluate`. It may divide the rows of a request among workers and calls of its
    function, but a pair stays with one worker, and a request that is `whole` is a single call in this process.
    Splitting requests into portions that fit into memory, halving them when memory runs out, and numbering them is done
    for every evaluator alike by `Driver`, which never sends more than `max_rows` rows in a request.

    Whether an output that came is of use, finite for a start, is not judged here.
    """

    max_rows: int | None = None  # the most rows in one request; None: as many as `memory` allows
    memory: int | None = None  # bytes that inputs, contexts and outputs of a request may take; None: see `Driver`

    @abstractmethod
    def evaluate(self, request: Request) -> Answer:
        """Evaluate the rows of a request, and answer in their order.

        An exception says that the request as a whole failed. It is raised to the user, except for one that says that
        memory ran out: then the driver asks again for fewer rows at a time.
        """
