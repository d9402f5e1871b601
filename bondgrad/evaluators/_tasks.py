"""Tasks: the rows of a request that one worker evaluates, in a form that can travel to other processes."""

import traceback
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bondgrad.errors import BoxError, RemoteError, is_mistake
from bondgrad.evaluators._calls import evaluate_rows
from bondgrad.evaluators._evaluator import Answer, Call, Request

Packed = tuple[np.ndarray, str]  # the bytes of a tensor as an array of its shape, and the name of its dtype


class PackedTask(NamedTuple):
    """Rows for a worker in another process, as numpy arrays: tensors would be sent through shared memory."""

    points: Packed  # [N, d]
    context: tuple[Packed, ...]  # [N, ...] each
    pairs: bool
    seed: int | None
    max_rows: int | None
    time_features: int | None  # inputs per time step, for a function of sequences


class PackedAnswer(NamedTuple):
    """The outputs of a task, and what the worker learnt of the box."""

    y: Packed | None  # [N, d_out]; None: no output came
    ok: np.ndarray | None  # [N]
    calls: tuple[tuple[int, int, float, float, int | None], ...]  # first, rows, start, duration, number of its error
    errors: tuple[tuple[str, str, str], ...]  # message, type and traceback of each
    rounding: float  # relative rounding of the outputs, in the dtype that the box returns
    counted: tuple[int, int, float]  # calls, evaluations and seconds


class FatalError(Exception):
    """An error that a worker reports instead of an answer: a mistake in the code, or memory that ran out."""

    def __init__(self, message: str, kind: str, text: str, memory: bool) -> None:
        super().__init__(message, kind, text, memory)
        self.message, self.kind, self.text, self.memory = message, kind, text, memory

    def unpacked(self) -> Exception:
        """The error to raise in the process of the layer."""
        if self.memory:
            return MemoryError(self.message)
        error = BoxError(self.message)
        error.__cause__ = RemoteError(self.kind, self.text, mistake=True)
        return error


def divide(rows: int, workers: int, max_rows: int | None, pairs: bool) -> list[slice]:
    """Divide the rows of a request into tasks: at least one for each worker, each of about the same size.

    A task has at most `max_rows` rows, but at least one pair. Sizes depend on the arguments alone.
    """
    unit = 2 if pairs else 1
    units = -(-rows // unit)  # of an odd number of rows, the last is alone
    largest = units if max_rows is None else max(1, max_rows // unit)  # units in a task
    count = max(1, -(-units // max(1, largest)), min(workers, units))
    return [slice(units * i // count * unit, min(units * (i + 1) // count * unit, rows)) for i in range(count)]


def part_of(request: Request, rows: slice) -> Request:
    """The request for some of its rows."""
    if rows == slice(0, request.points.shape[0]):
        return request
    return request._replace(points=request.points[rows], context=tuple(c[rows] for c in request.context))


def pack(t: Tensor) -> Packed:
    """A tensor as an array and the name of its dtype."""
    t, name = t.detach().cpu().contiguous(), str(t.dtype).removeprefix("torch.")
    return (t.view(torch.int16).numpy() if t.dtype == torch.bfloat16 else t.numpy()), name


def unpack(packed: Packed) -> Tensor:
    """The tensor of an array and the name of its dtype, in memory of its own."""
    array, name = packed
    return torch.from_numpy(array.copy()).view(getattr(torch, name))


def pack_task(request: Request) -> PackedTask:
    """A request as a task for another process."""
    context = tuple(pack(c) for c in request.context)
    time_features = getattr(request.function, "time_features", None)
    return PackedTask(pack(request.points), context, request.pairs, request.seed, request.max_rows, time_features)


def carry_out(task: PackedTask, function: Any) -> PackedAnswer:  # noqa: ANN401
    """Evaluate the rows of a task with a `RowFunction`, in the process of the worker."""
    before = function.calls, function.evaluations, function.seconds
    context = tuple(unpack(c) for c in task.context)
    request = Request(function, unpack(task.points), context, task.pairs, task.seed, max_rows=task.max_rows)
    try:
        with torch.no_grad():
            answer = evaluate_rows(request)
    except (BoxError, MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
        memory = not (isinstance(error, BoxError) and is_mistake(error))
        kind = type(error.__cause__ or error).__name__
        raise FatalError(str(error), kind, _text(error), memory) from None
    errors: dict[int, tuple[int, tuple[str, str, str]]] = {}  # by identity
    calls = []
    for call in answer.calls:
        which = None
        if call.error is not None:
            said = (str(call.error), type(call.error.__cause__ or call.error).__name__, _text(call.error))
            which, _ = errors.setdefault(id(call.error), (len(errors), said))
        calls.append((call.first, call.rows, call.start, call.duration, which))
    now = function.calls, function.evaluations, function.seconds
    return PackedAnswer(
        y=None if answer.ok is not None and not bool(answer.ok.any()) else pack(answer.y.clone()),
        ok=None if answer.ok is None else answer.ok.numpy(),
        calls=tuple(calls),
        errors=tuple(said for _, said in errors.values()),
        rounding=function.rounding,
        counted=(now[0] - before[0], now[1] - before[1], now[2] - before[2]),
    )


def unpack_answer(packed: PackedAnswer, request: Request, worker: int) -> Answer:
    """The answer to (part of) a request that a worker elsewhere gave; what it learnt of the box is passed on."""
    errors = []
    for message, kind, text in packed.errors:
        error = BoxError(message)
        error.__cause__ = RemoteError(kind, text)
        errors.append(error)
    calls = tuple(
        Call(first, rows, worker, start, duration, None if error is None else errors[error])
        for first, rows, start, duration, error in packed.calls
    )
    function: Any = request.function
    function.count(*packed.counted)
    if packed.y is None:
        n = request.points.shape[0]
        return Answer(request.points.new_empty(n, 0), torch.zeros(n, dtype=torch.bool), calls)
    y = unpack(packed.y).to(request.points.device)
    function.learn(request.points, y, packed.rounding)
    return Answer(y, None if packed.ok is None else torch.from_numpy(packed.ok.copy()), calls)


def _text(error: BaseException) -> str:
    """The traceback of what the box raised, as text."""
    return "".join(traceback.format_exception(error.__cause__ or error)).rstrip()
