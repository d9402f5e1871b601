"""The seam between a layer and the place where its box is evaluated: a request goes in, an answer comes out."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from bondgrad.errors import not_negative_int, positive_float, positive_int

# "step": rows for the gradient, and after them those of the forward pass, in one request (`eager=True`).
Purpose = Literal["base", "gradient", "step", "trial", "structure", "probe"]
RECORDED = -1  # in place of the number of a worker: the outputs were read from a journal
NOT_MADE = -2  # likewise: the call was not made, for the reason that its error gives


class Cancellation(threading.Event):
    """Is set when the answer to a request is not needed any more, and counts the evaluations that were made for it."""

    def __init__(self) -> None:
        super().__init__()
        self.evaluations = torch.zeros(0, dtype=torch.long)  # [N] of each row of the request, in all attempts

    def count(self, calls: "tuple[Call, ...]", rows: Tensor) -> None:
        """Take in the calls of an attempt at the request, at which of its `rows`. The first attempt has all of them."""
        if len(self.evaluations) < len(rows):
            self.evaluations = torch.zeros(len(rows), dtype=torch.long)
        for call in calls:
            if call.worker not in (RECORDED, NOT_MADE):
                self.evaluations[rows[call.first : call.first + call.rows]] += 1


class Request(NamedTuple):
    """Rows to be evaluated."""

    function: Callable[..., Tensor]  # function(points, *context, seed=seed) -> [N, d_out]; counts its evaluations
    points: Tensor  # [N, d]
    context: tuple[Tensor, ...] = ()  # [N, ...] each: what else the function is given
    pairs: bool = False  # rows 2k and 2k + 1 belong together, in this order; of an odd number the last row is alone
    seed: int | None = None  # for a function that takes one; see `evaluate_rows` for pairs
    purpose: Purpose = "base"  # why these rows are evaluated
    number: int = 0  # of the request, counted by the driver
    whole: bool = False  # whether the box remembers: the function is called once, here, with all rows in their order
    max_rows: int | None = None  # the most rows in one call of the function; None: any number
    attempt: int = 0  # of this request: later attempts have those rows for which the earlier ones brought no output
    step: int = 0  # training steps of the layer before this request
    cancelled: Cancellation | None = None  # set when the answer is not needed any more
    begun: Callable[[], None] | None = None  # called when all rows are with workers; only if the evaluator `overlaps`


class Call(NamedTuple):
    """One call of the function: which rows of a request it evaluated, where, when, and how it ended."""

    first: int  # the first of its rows in the request
    rows: int  # how many consecutive rows
    worker: int = 0  # the number of the worker that made it
    start: float = 0.0  # seconds since the epoch, as `time.time` has it
    duration: float = 0.0  # seconds
    error: Exception | None = None  # why it brought no outputs


class Answer(NamedTuple):
    """What came of a request. Only `y` must be given; calls are for statistics and journals."""

    y: Tensor  # [N, d_out] the outputs in the order of the points; it may be memory that belongs to the function
    ok: Tensor | None = None  # [N] bool, False where no output came for a row; None: all came
    calls: tuple[Call, ...] = ()  # in any order


class Description(NamedTuple):
    """What is known of a box that belongs to its evaluator."""

    name: str  # for messages
    takes_seed: bool = False  # whether it has a parameter `seed`
    structure: Any = None  # which outputs depend on which inputs, if the box says so itself


class Evaluator(ABC):
    """Decides where rows are evaluated: in this process, in others, on other machines.

    An evaluator does one thing, `evaluate`. It may divide the rows of a request among workers and calls of its
    function, but a pair stays with one worker, no call has more rows than `request.max_rows`, and a request that is
    `whole` is a single call in this process. `Driver` does the rest for every evaluator alike: requests that fit into
    memory, rows that are asked again because no output came, limits, counts and numbers.

    Whether an output that came is of use, finite for a start, is not judged here.

    Args:
        max_rows: The most rows in one call of the box; 1 for a box that takes one row at a time. None: as many as
            there are.
        memory: Bytes that the inputs, contexts and outputs of a request may take at one time. None: see `Driver`.
        retries: How often a row is asked again for which no output came, or none that is finite. None: as often as it
            takes, for a device that may be away for a while.
        rate: The most evaluations in a second, for a service that counts them. None: no limit.
        max_evaluations: The most evaluations of one layer. The one that would exceed it is not made, and
            `EvaluationLimitError` is raised. None: no limit.
    """

    max_rows: int | None = None
    memory: int | None = None
    retries: int | None = 2
    rate: float | None = None
    max_evaluations: int | None = None
    overlaps = False  # whether several threads may call `evaluate` at the same time
    capturable = False  # whether it does nothing but call the function, so that a CUDA graph can capture it

    def __init__(
        self,
        *,
        max_rows: int | None = None,
        memory: int | None = None,
        retries: int | None = 2,
        rate: float | None = None,
        max_evaluations: int | None = None,
    ) -> None:
        self.max_rows = None if max_rows is None else positive_int("max_rows", max_rows)
        self.memory = self.memory if memory is None else positive_int("memory", memory)
        self.retries = None if retries is None else not_negative_int("retries", retries)
        self.rate = None if rate is None else positive_float("rate", rate)
        self.max_evaluations = None if max_evaluations is None else positive_int("max_evaluations", max_evaluations)

    @abstractmethod
    def evaluate(self, request: Request) -> Answer:
        """Evaluate the rows of a request, and answer in their order.

        An exception says that the request as a whole failed. `BoxError` is handled as if every row had failed; one
        that says that memory ran out lets the driver ask again for fewer rows at a time; all others are raised to the
        user.
        """

    def describe(self) -> Description | None:
        """The box that belongs to this evaluator; None: it evaluates the function of a request."""
        return None

    def close(self) -> None:  # noqa: B027 - most evaluators have nothing to end
        """End what the evaluator has started elsewhere. The next request starts it again."""

    def __enter__(self) -> "Evaluator":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __deepcopy__(self, _memo: dict[int, Any]) -> "Evaluator":
        return self  # a copy of a layer uses the same workers
