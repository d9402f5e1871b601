"""Requests to an evaluator: of a size that the memory can take, and asked again where no output came."""

import math
import random
import time
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from bondgrad.calling._inputs import NOT_FINITE_REMEDY, Limits, seen_to_be_finite
from bondgrad.errors import BoxError, EvaluationLimitError, is_mistake, is_out_of_memory, noted_calls
from bondgrad.evaluators._calls import nothing
from bondgrad.evaluators._evaluator import Answer, Call, Cancellation, Evaluator, Purpose, Request
from bondgrad.evaluators._readings import in_turns, mean_in_turns, mean_of_readings, reading_seed
from bondgrad.evaluators._record import CallRecord
from bondgrad.evaluators._retries import RetrySearch
from bondgrad.torch_support import _device as device

T = TypeVar("T")
JITTER = random.Random()  # of pauses, so that several processes do not ask at the same moment; not of the results


class Outcome(NamedTuple):
    """What came of a question to the box, after all retries."""

    y: Tensor  # [N, d_out] the outputs; not finite where none came
    ok: Tensor | None = None  # [N] which rows are finite; None: all, or not known, on an accelerator


def checked(y: Tensor) -> Outcome:
    """Outputs y [N, d_out], and which rows of them are finite."""
    ok = torch.isfinite(y).all(1)
    return Outcome(y, None if bool(ok.all()) else ok)


@dataclass
class Progress:
    """How far a layer has come, as it is saved with a model."""

    requests: int = 0  # sent so far, those of measurements included
    steps: int = 0  # backward passes in training
    batches: int = 0  # over which `output_mean` goes
    output_mean: Tensor | None = None  # [d_out] the mean of the box's outputs in training of late
    learnt: dict[str, Any] | None = None  # what calls in training have shown of the outputs: `RowFunction.learnt`


class Driver:
    """Sends the requests of one layer, or of one measurement, to an evaluator.

    Args:
        evaluator: Where rows are evaluated.
        progress: Counts requests and steps, also those of other drivers of the same layer.
        once: Whether no row is asked again: the first error of a request is raised.
        limits: Within which points are admissible; rows that are not finite are not sent then. None: all are sent.
        repeats: How many readings are taken at every point. Answers are their means.
        record: Counts calls and errors; None: a new one.
    """

    cpu_memory = 2 * 2**20  # bytes of one request on a CPU: what caches hold, with room for what the box itself needs
    device_memory = 256 * 2**20  # bytes of one request on an accelerator: enough work to keep it busy

    def __init__(
        self,
        evaluator: Evaluator,
        progress: Progress | None = None,
        once: bool = False,
        limits: Limits | None = None,
        repeats: int = 1,
        record: CallRecord | None = None,
    ) -> None:
        if not isinstance(evaluator, Evaluator):
            raise ValueError(f"evaluator must be an instance from bondgrad.evaluators, or None, got {evaluator!r}")
        self.evaluator = evaluator
        self.once, self.limits, self.repeats = once, limits, repeats
        self.progress = progress or Progress()
        self.record = record or CallRecord()
        self.most: int | None = None  # rows at a time, once memory has run out
        self._rows: int  # of the last portion, which is to be halved if memory runs out
        self._warned = False

    @property
    def max_rows(self) -> int | None:
        """The most rows in one call; None: no limit."""
        most = self.evaluator.max_rows
        return self.most if most is None else most if self.most is None else min(most, self.most)

    @property
    def version(self) -> Hashable:
        """A value that differs (`!=`) from an earlier one if requests are divided in another way now."""
        return self.evaluator, self.max_rows, self.evaluator.memory, self.repeats

    def portion(self, row_bytes: int, wanted: int, device: torch.device) -> int:
        """How many of the `wanted` points may exist at a time, `row_bytes` each with their outputs."""
        memory = self.evaluator.memory or (self.cpu_memory if device.type == "cpu" else self.device_memory)
        rows = min(wanted * self.repeats, max(1, memory // row_bytes))
        self._rows = rows if self.most is None else min(rows, self.most)
        return max(1, self._rows // self.repeats)

    def ask(
        self,
        function: Callable[..., Tensor],
        points: Tensor,
        context: tuple[Tensor, ...] = (),
        pairs: bool = False,
        seed: int | None = None,
        purpose: Purpose = "base",
        whole: bool = False,
        number: int | None = None,
        cancelled: Cancellation | None = None,
        begun: Callable[[], None] | None = None,
        repeats: int | None = None,
    ) -> Outcome:
        """The outputs at points [N, d], in one request, and in more for rows that are asked again.

        The arguments are those of `Request`; a number, if given, is one that `reserve` returned. With `repeats` (None:
        those of this driver) the outputs are means of so many readings. Raises `BoxError` if no row got an output
        because of errors.
        """
        number = self.reserve() if number is None else number  # one that fails has its number, too
        rest = (number, whole, self.max_rows, 0, self.progress.steps, cancelled, begun)
        request = Request(function, points, context, pairs, seed, purpose, *rest)
        readings = self.repeats if repeats is None else repeats
        if self.limits is None or seen_to_be_finite(points):
            return self._mean_outcome(request, readings)
        return self._outcome_where_finite(request, self.limits, readings)

    def _mean_outcome(self, request: Request, readings: int) -> Outcome:
        """The means over readings of a request."""
        if readings == 1:
            return self._outcome(request)
        if request.seed is not None or request.whole:
            return self._ask_one_by_one(request, readings)
        pairs = request.pairs
        rows, *beside = (in_turns(t, readings, pairs) for t in (request.points, *request.context))
        y, ok = self._outcome(request._replace(points=rows, context=tuple(beside)))
        mean = mean_in_turns(y, readings, pairs, finite=ok is None and device.reading_is_free(y.device))
        return Outcome(mean) if ok is None else checked(mean)

    def _ask_one_by_one(self, request: Request, readings: int) -> Outcome:
        """The means over readings that are requests of their own: each has a seed, or all rows of a box with memory."""
        outcomes, errors = [], []
        for reading in range(readings):
            number = request.number if reading == 0 else self.reserve()
            try:
                seed = reading_seed(request.seed, reading)
                y, ok = self._outcome(request._replace(number=number, seed=seed))
                outcomes.append(Outcome(y.clone(), ok))  # a box may answer in the same memory
            except BoxError as error:
                # A box with memory goes on from its last reading, which must not be one that failed.
                if is_mistake(error) or request.whole:
                    raise
                errors.append(error)
        if not outcomes:
            raise errors[0]
        y = torch.stack([outcome.y for outcome in outcomes], 1)  # [N, readings, d_out]
        unit = 2 if request.pairs and len(y) % 2 == 0 else 1
        ends = y.view(-1, unit, *y.shape[1:]).transpose(1, 2)  # [units, readings, unit, d_out]
        mean, known = mean_of_readings(ends).flatten(0, 1), all(outcome.ok is None for outcome in outcomes)
        return Outcome(mean) if known else checked(mean)

    def _outcome(self, request: Request) -> Outcome:
        """What comes of a request, after all retries."""
        rows, max_rows = request.points.shape[0], request.max_rows
        self._rows = rows if max_rows is None else min(rows, max_rows)
        answer = self._send(request)
        y = answer.y
        # A sum is finite only if all its terms are. On an accelerator nothing is read.
        if answer.ok is None and (not device.reading_is_free(y.device) or math.isfinite(y.sum())):
            return Outcome(y)
        return self._first_error_or(answer) if self.once else self._ask_again(request, answer)

    def _outcome_where_finite(self, request: Request, limits: Limits, readings: int) -> Outcome:
        """What comes of those rows of a request that are finite; the others are not evaluated, and have no output.

        On an accelerator nothing is read: there a row that is not finite is sent with admissible inputs in place of
        its own, and its output is not used.
        """
        points = request.points
        finite = torch.isfinite(points).all(1)  # [N]
        if not device.reading_is_free(points.device):
            y, ok = self._mean_outcome(request._replace(points=limits.admissible(points)), readings)
            return Outcome(y.masked_fill(~finite[:, None], math.nan), None if ok is None else ok & finite)
        if request.pairs:  # which are not divided
            ends = finite.unfold(0, 2, 2).all(1).repeat_interleave(2)
            finite = torch.cat((ends, finite[len(ends) :]))
        kept = finite.nonzero().squeeze(1)
        n = len(finite)
        if len(kept) == n:  # only their sum is not
            return self._mean_outcome(request, readings)
        if len(kept) == 0 and request.purpose == "base":
            raise BoxError(
                f"x must be finite to be sent to a box with limits or a resolution, but none of its {n} rows is: they "
                f"all have NaN or infinite entries. {NOT_FINITE_REMEDY}"
            )
        if request.whole:
            raise BoxError(
                f"x must be finite to be sent to a box with limits or a resolution, but {n - len(kept)} of its {n} "
                "rows are not (NaN or infinite), and a box that keeps its own state is called with all rows of a "
                f"batch, so that none can be left out. {NOT_FINITE_REMEDY}"
            )
        if len(kept) == 0:
            return Outcome(nothing(request), finite)
        context = tuple(c[kept] for c in request.context)
        y, ok = self._mean_outcome(request._replace(points=points[kept], context=context), readings)
        everywhere = y.new_full((n, y.shape[1]), math.nan)
        everywhere[kept] = y
        finite[kept] = True if ok is None else ok
        return Outcome(everywhere, finite)

    def reserve(self) -> int:
        """The number of the next request."""
        self.progress.requests += 1
        return self.progress.requests - 1

    def run(self, work: Callable[[], T]) -> T:
        """Run `work`, which calls `portion` and `ask`; again with half as many rows whenever memory runs out."""
        while True:
            try:
                return work()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._halve(error)

    def _send(self, request: Request, numbers: Tensor | None = None) -> Answer:
        """The answer to one attempt at a request, which is checked and counted.

        Args:
            request: The attempt.
            numbers: [N] of its rows in the first attempt; None: it is the first.
        """
        rows, record = request.points.shape[0], self.record
        self._reserve(rows)
        start, clock = time.time(), time.perf_counter()
        calls: tuple[Call, ...] = ()

        def one_call(error: BaseException | None = None) -> tuple[Call, ...]:
            told = error if isinstance(error, Exception) else None
            return (Call(0, rows, 0, start, time.perf_counter() - clock, told),)

        try:
            answer = self.evaluator.evaluate(request)
            calls = answer.calls or one_call()
            self._check(answer, rows)
        except BaseException as error:
            failed, known = isinstance(error, BoxError), noted_calls(error)
            if failed and not is_mistake(error):
                calls = one_call(error)
                answer = Answer(nothing(request), torch.zeros(rows, dtype=torch.bool), calls)
            else:  # an evaluator that refuses a request raises a BoxError, too
                calls = calls or (known if known is not None else () if failed else one_call(error))
                raise
        finally:
            record.add(calls, again=request.attempt > 0, reserved=rows)
            if request.cancelled is not None:
                request.cancelled.count(calls, torch.arange(rows) if numbers is None else numbers)
        for call in calls if answer.ok is not None else ():
            if call.error is not None and is_mistake(call.error):
                raise call.error
        return answer

    def _reserve(self, rows: int) -> None:
        """Raise `EvaluationLimitError` if so many evaluations are more than are left; they are under way otherwise."""
        limit, record = self.evaluator.max_evaluations, self.record
        if not record.reserve(rows, limit):
            begun = record.evaluations + record.under_way
            raise EvaluationLimitError(
                f"the next request has {rows:,} rows, and {begun:,} of max_evaluations={limit:,} evaluations are made: "
                "save the model, or give the evaluator a larger max_evaluations"
            )

    def count_again(self, rows: int) -> None:
        """Count rows that the function of a request is about to evaluate again, or raise `EvaluationLimitError`."""
        self._reserve(rows)
        self.record.add_again(rows)

    def _check(self, answer: Answer, rows: int) -> None:
        y, ok = answer.y, answer.ok
        if y.ndim != 2 or y.shape[0] != rows or (ok is not None and (ok.shape != (rows,) or ok.dtype != torch.bool)):
            also = "" if ok is None else f" with ok {list(ok.shape)} of {ok.dtype}"
            raise BoxError(
                f"{type(self.evaluator).__name__}.evaluate must answer {rows} rows with y [{rows}, out_features] and "
                f"ok [{rows}] of booleans, or None, got y {list(y.shape)}{also}"
            )

    @staticmethod
    def _first_error_or(answer: Answer) -> Outcome:
        for call in answer.calls:
            if call.error is not None:
                raise call.error
        y, ok = answer.y, answer.ok
        y = y if ok is None else y.masked_fill(~ok.to(y.device)[:, None], math.nan)
        return Outcome(y, torch.isfinite(y).all(1))

    def _ask_again(self, request: Request, answer: Answer) -> Outcome:
        """The outputs at all points of a request of which some rows have none so far, or none that are finite."""
        search = RetrySearch(request, answer, self.evaluator.retries)
        asked = int((~search.ok).sum())
        while (attempt := search.next_attempt()) is not None:
            if search.pause > 0:
                if search.pause >= 1 and search.first_error is not None:
                    self.record.tell_waiting(search.first_error)
                time.sleep(search.pause * JITTER.uniform(0.5, 1.5))
            search.add(self._send(attempt, search.rows))
        error, y, ok = search.first_error, search.y, search.ok
        if error is not None and not search.answered:
            error.add_note(f"None of {len(ok)} rows got an output in {search.attempts} attempts.")
            raise error
        if error is not None:
            again = asked if search.attempts > 1 else 0
            self.record.tell(error, again, int((~ok).sum()), search.single_rows_work)
        return Outcome(y, None if bool(ok.all()) else ok.to(y.device))

    def _halve(self, error: Exception) -> None:
        if self._rows <= 1:
            raise BoxError(
                "out of memory on a single row, so that the box itself needs more than there is: run it on a device "
                "with more memory"
            ) from error
        self.most = self._rows // 2
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"out of memory with {self._rows} rows at a time: going on with at most {self.most}, halved again "
                "if need be. Pass evaluator=Local(max_rows=...) to start there.",
                stacklevel=2,
            )
