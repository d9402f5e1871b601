"""One request on its way through a pool of workers."""

import math
import time
import weakref
from collections import deque
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from bondgrad.errors import BoxError, RequestCancelled, counted, is_mistake, is_out_of_memory, note_calls
from bondgrad.evaluators._calls import answered, nothing
from bondgrad.evaluators._evaluator import NOT_MADE, Answer, Call, Request
from bondgrad.evaluators._tasks import FatalError, divide, part_of
from bondgrad.evaluators._worker import MissingBoxError, Worker, WorkerError

if TYPE_CHECKING:
    from bondgrad.evaluators._pool import WorkerPool


class _Task(NamedTuple):
    """A task that a worker has."""

    rows: slice  # of the request
    part: Request
    worker: Worker
    start: float  # seconds since the epoch
    deadline: float  # monotonic time


class Run:
    """The tasks of one request on their way through the pool."""

    def __init__(self, pool: "WorkerPool", request: Request) -> None:
        self.pool, self.request = pool, request
        self.source = pool.source(request.function)
        rows = request.points.shape[0]
        self.waiting = deque(divide(rows, pool.n, request.max_rows, request.pairs))
        self.running: dict[Future[Any], _Task] = {}
        self.done: deque[Future[Any]] = deque()
        self.calls: list[Call] = []
        self.y: Tensor | None = None  # [N, d_out]
        self.fatal: BaseException | None = None  # an error that ends the request

    def answer(self) -> Answer:
        """The answer to the request, when all tasks have ended."""
        try:
            return self._answer()
        except BaseException as error:  # what workers are still at counts, too
            note_calls(error, (*self.calls, *[self._spent(task) for task in self.running.values()]))
            raise

    def _answer(self) -> Answer:
        pool, cancelled = self.pool, self.request.cancelled
        with pool.changed:
            pool.try_again()
        while self.waiting or self.running:
            if cancelled is not None and cancelled.is_set():
                self.waiting.clear()
            with pool.changed:
                worker = self._next_worker()
                ended = [(future, self.running.pop(future)) for future in self.done if future in self.running]
                self.done.clear()
            if worker is not None:
                self._start(worker)
                if not self.waiting and self.request.begun is not None:
                    begun, self.request = self.request.begun, self.request._replace(begun=None)  # once only
                    begun()
            for future, task in ended:
                self._collect(future, task)
            if self.fatal is not None:
                raise self.fatal
            self._expire()
        if cancelled is not None and cancelled.is_set():
            raise RequestCancelled(sum(call.rows for call in self.calls), tuple(self.calls))
        y = nothing(self.request) if self.y is None else self.y
        return Answer(y, answered(y.shape[0], self.calls), tuple(self.calls))

    def _next_worker(self) -> Worker | None:
        """Wait until a worker is free, a task has ended, or one has taken too long."""
        pool = self.pool
        while not self.done and (self.waiting or self.running):
            worker = pool.take_worker(self.source, len(self.waiting)) if self.waiting else None
            if worker is not None:
                return worker
            if self.waiting and not self.running and (error := pool.start_error(self.source)) is not None:
                self._give_up(error)
                return None
            now, deadline = time.monotonic(), min((t.deadline for t in self.running.values()), default=math.inf)
            if deadline <= now:
                return None
            pool.changed.wait(min(deadline - now, 1.0))  # a second at most, for those that are set aside
        return None

    def _start(self, worker: Worker) -> None:
        rows = self.waiting.popleft()
        n = rows.stop - rows.start
        if self.pool.pace is not None:
            self.pool.pace.wait(n)
        part, seconds = part_of(self.request, rows), None if self.pool.timeout is None else n * self.pool.timeout
        deadline = math.inf if seconds is None or worker.ends_tasks else time.monotonic() + seconds
        task = _Task(rows, part, worker, time.time(), deadline)
        try:
            future = worker.submit(self.source, part, seconds)
        except BaseException:
            with self.pool.changed:
                self.pool.give_back(worker, lives=True, source=self.source)
            raise
        self.running[future] = task
        # A future may outlive the pool, which must be free to end its workers.
        own, source, running, done = weakref.ref(self.pool), self.source, self.running, self.done

        def ended(future: "Future[Any]") -> None:
            if (pool := own()) is None:
                return
            with pool.changed:
                done.append(future)
                if future in running:  # otherwise it took too long, and the worker has been given back
                    pool.give_back(worker, not future.cancelled() and _worker_lives(future.exception()), source)
                pool.changed.notify_all()

        future.add_done_callback(ended)

    def _collect(self, future: "Future[Any]", task: _Task) -> None:
        error = CancelledError() if future.cancelled() else future.exception()
        if isinstance(error, MissingBoxError):  # nothing was evaluated
            self.waiting.appendleft(task.rows)
            return
        if isinstance(error, FatalError):
            error = error.unpacked()
        if error is not None and (
            isinstance(error, BoxError) or is_out_of_memory(error) or not isinstance(error, Exception)
        ):
            self.fatal = self.fatal or error
            self.calls.append(self._spent(task, error if isinstance(error, Exception) else None))
            return
        if error is not None:
            self._lose(task, error)
            return
        answer = task.worker.answer(future.result(), task.part)
        calls = [call._replace(first=call.first + task.rows.start) for call in answer.calls]
        self.calls += calls
        with self.pool.changed:
            self.pool.judge(task.worker, failed=any(call.error is not None for call in calls))
        if answer.ok is None or bool(answer.ok.any()):  # otherwise y need not have the dtype of the outputs
            if self.y is None:
                self.y = answer.y.new_full((self.request.points.shape[0], answer.y.shape[1]), math.nan)
            self.y[task.rows] = answer.y

    def _expire(self) -> None:
        """Give up tasks that have taken too long."""
        now = time.monotonic()
        for future, task in [(f, t) for f, t in self.running.items() if t.deadline <= now]:
            with self.pool.changed:
                if future in self.done or self.running.pop(future, None) is None:
                    continue
                try:
                    task.worker.expire()
                except BoxError as error:  # too many hang: what was answered is kept, and the driver raises the error
                    self._give_up(error)
                self.pool.give_back(task.worker, lives=False, source=self.source)
            self._lose(task, TimeoutError())

    def _lose(self, task: _Task, error: BaseException) -> None:
        """Record a task that was evaluated, and brought no answer."""
        rows, number = task.rows.stop - task.rows.start, task.worker.number
        if isinstance(error, TimeoutError):
            failed = BoxError(
                f"worker {number} did not answer {counted(rows)} within timeout={self.pool.timeout:g} s a row. Give a "
                "longer timeout=, if the box needs it."
            )
        else:
            said = str(error) if isinstance(error, WorkerError) else f"{type(error).__name__}: {error}"
            failed = BoxError(f"worker {number} ended while it evaluated {counted(rows)}: {said.rstrip('.')}.")
        failed.__cause__ = error.cause() if isinstance(error, WorkerError) else error
        self.calls.append(self._spent(task, failed))
        with self.pool.changed:
            self.pool.judge(task.worker, failed=True)

    def _spent(self, task: _Task, error: Exception | None = None) -> Call:
        """The record of a task without an answer, all rows of which count as evaluated."""
        rows, duration = task.rows.stop - task.rows.start, time.time() - task.start
        if not task.worker.calls_function:  # otherwise the function counts, when it ends
            function: Any = self.request.function
            function.count(1, rows, duration)
        return Call(task.rows.start, rows, task.worker.number, task.start, duration, error)

    def _give_up(self, error: BoxError) -> None:
        """Hand out no more tasks: the rows that are left get no output."""
        if not self.waiting and not is_mistake(error):
            return
        left = list(self.waiting) or [slice(0, 0)]  # an error that must be raised is told in any case
        self.calls += [Call(rows.start, rows.stop - rows.start, NOT_MADE, time.time(), 0.0, error) for rows in left]
        self.waiting.clear()


def _worker_lives(error: BaseException | None) -> bool:
    """Whether a worker is as it was, after a task that ended with this error."""
    return error is None or isinstance(error, (FatalError, BoxError))
