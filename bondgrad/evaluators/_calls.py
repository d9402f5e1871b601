"""Calling the function of a request: the one place where rows go to the box."""

import itertools
import math
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from bondgrad.errors import BoxError, EvaluationLimitError, RowsFailed, is_mistake, note_calls, noted_calls
from bondgrad.evaluators._evaluator import Answer, Call, Request
from bondgrad.evaluators._pace import Pace


def evaluate_rows(request: Request, worker: int = 0, pace: Pace | None = None) -> Answer:
    """Call the function with the rows of a request, as many at once as it may be given, one call after the other.

    A call that raises `BoxError` costs its own rows, unless the error is a mistake in the code, which is raised; of a
    function of one sample (`per_row`) only the rows at which it raised. With a
    seed, the two ends of pairs are evaluated in a call each, at the same place: what a function draws for a row may
    depend on its place among the rows of a call.

    Args:
        request: The rows.
        worker: The number of the worker, for the records of the calls.
        pace: Limits the evaluations in a second.
    """
    n = request.points.shape[0]
    size = n if request.max_rows is None else min(n, request.max_rows)
    if pace is not None:
        size = min(size, pace.call_rows)
    if size == n or request.whole:
        y, made = _call(request, request.points, request.context, 0, worker, pace)
        return Answer(nothing(request) if y is None else y, answered(n, made), tuple(made))
    joined: Tensor | None = None
    calls: list[Call] = []
    for rows in pieces(n, size, request.pairs):
        context = tuple(c[rows] for c in request.context)
        try:
            y, made = _call(request, request.points[rows], context, rows.start, worker, pace)
        except BaseException as error:
            note_calls(error, (*calls, *(noted_calls(error) or ())))
            raise
        calls += made
        if y is not None:  # copied at once: a box may answer every call in the same memory
            joined = y.new_full((n, y.shape[1]), math.nan) if joined is None else joined
            joined[rows] = y
    return Answer(nothing(request) if joined is None else joined, answered(n, calls), tuple(calls))


def pieces(n: int, size: int, pairs: bool) -> Iterator[slice]:
    """Slices of at most `size` rows that divide n rows; pairs are not divided, unless `size` is one."""
    size -= size % 2 if pairs and size > 1 else 0
    return (slice(first, min(first + size, n)) for first in range(0, n, size))


def answered(n: int, calls: list[Call]) -> Tensor | None:
    """Which of n rows [n] got outputs, given all calls; None: all of them."""
    failed = [call for call in calls if call.error is not None]
    if not failed:
        return None
    ok = torch.ones(n, dtype=torch.bool)
    for call in failed:
        ok[call.first : call.first + call.rows] = False
    return ok


def nothing(request: Request) -> Tensor:
    """The outputs [N, d_out] of a request to which none came; d_out is zero, if it is not known."""
    function, points = request.function, request.points
    width, time_features = getattr(function, "out_features", None) or 0, getattr(function, "time_features", None)
    if time_features is not None:  # of sequences, it is the width of a time step
        width *= points.shape[1] // time_features
    dtype = torch.promote_types(getattr(function, "dtype", points.dtype), points.dtype)
    return points.new_full((points.shape[0], width), math.nan, dtype=dtype)


def _call(
    request: Request, points: Tensor, context: tuple[Tensor, ...], first: int, worker: int, pace: Pace | None
) -> tuple[Tensor | None, list[Call]]:
    """The outputs of one call with some rows of a request, from `first` on, and its record; None: it failed.

    If it failed at some of the rows only, there is a record for each of these, and for those between them.
    """
    n = points.shape[0]
    if pace is not None:
        pace.wait(n)
    # Copies, since the function may write into its arguments, and the rows may be asked again.
    points, context = points.clone(), tuple([c.clone() for c in context]) if context else ()
    start, clock = time.time(), time.perf_counter()
    try:
        if request.pairs and request.seed is not None:
            y, errors = _both_ends(request, points, context)
        else:
            y, errors = _outputs(request, points, context)
    except BaseException as raised:
        error = raised if isinstance(raised, Exception) and not isinstance(raised, EvaluationLimitError) else None
        call = Call(first, n, worker, start, time.perf_counter() - clock, error)
        if not isinstance(raised, BoxError) or is_mistake(raised):
            note_calls(raised, (call,))
            raise
        return None, [call]
    seconds = time.perf_counter() - clock
    if not errors:
        return y, [Call(first, n, worker, start, seconds)]
    ends = sorted({0, n, *errors, *(row + 1 for row in errors)})
    parts = itertools.pairwise(ends)
    return y, [Call(first + a, b - a, worker, start, seconds * (b - a) / n, errors.get(a)) for a, b in parts]


def _outputs(
    request: Request, points: Tensor, context: tuple[Tensor, ...]
) -> tuple[Tensor | None, dict[int, BoxError]]:
    """The outputs at some points, None if there are none, and the errors of those rows at which it failed alone."""
    try:
        return request.function(points, *context, seed=request.seed), {}
    except RowsFailed as some:
        return some.y, some.errors


def _both_ends(
    request: Request, points: Tensor, context: tuple[Tensor, ...]
) -> tuple[Tensor | None, dict[int, BoxError]]:
    """As `_outputs`, at pairs of rows: the first ends are evaluated in one call, and the second ends in another."""
    y: Tensor | None = None
    errors: dict[int, BoxError] = {}
    for end in range(min(2, points.shape[0])):
        part, failed = _outputs(request, *_every_second(end, points, context))
        errors.update({end + 2 * row: error for row, error in failed.items()})
        if part is not None:  # copied at once: they may be in the same memory
            y = part.new_full((points.shape[0], part.shape[1]), math.nan) if y is None else y
            y[end::2] = part
    return y, errors


def _every_second(end: int, points: Tensor, context: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    return points[end::2].contiguous(), tuple(c[end::2].contiguous() for c in context)
