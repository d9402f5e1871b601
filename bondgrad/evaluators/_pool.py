"""A pool of workers: tasks are handed to whoever is free, and their answers are put together in order."""

import inspect
import os
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, as_completed
from dataclasses import dataclass
from typing import Any

from bondgrad.errors import BoxError, RemoteError, positive_float, positive_int
from bondgrad.evaluators._calls import evaluate_rows
from bondgrad.evaluators._evaluator import Answer, Description, Evaluator, Request
from bondgrad.evaluators._pace import Pace
from bondgrad.evaluators._run import Run
from bondgrad.evaluators._worker import Source, Worker, WorkerError, takes_number


@dataclass(frozen=True)
class PoolSettings:
    """When a worker that keeps failing is set aside, and for how long."""

    strikes: int = 3  # tasks in a row that must fail
    first_rest: float = 1.0  # seconds; twice as long each time it fails again
    longest_rest: float = 60.0


SETTINGS = PoolSettings()


class WorkerPool(Evaluator):
    """Divides requests into tasks, and hands each to a worker that is free.

    A subclass makes the workers. Requests of several threads share them.

    Args:
        n: How many tasks are evaluated at a time.
        factory: Makes the box of a worker. With a parameter, it is given the number of the worker, from 0 on. None: the
            function of the layer.
        spares: Workers beyond n that stand ready to take the place of one that has to be started again.
        timeout: Seconds that the evaluation of a row may take; a task of k rows may take k times as long.
        options: See `Evaluator`.
    """

    overlaps = True
    any_describes = False  # whether all workers are asked what the box is like: there may be no room for the first
    memory = 256 * 2**20  # rows leave this process, so that its caches do not matter, and every request is waited for

    def __init__(
        self,
        n: int,
        factory: Callable[..., Any] | None,
        *,
        spares: int = 0,
        timeout: float | None = None,
        **options: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(**options)
        self.n = positive_int("n", n)
        if factory is not None and not callable(factory):
            raise ValueError(f"factory must be a function that returns a box, or None, got {factory!r}")
        self.factory, self.spares = factory, spares
        self.timeout = None if timeout is None else positive_float("timeout", timeout)
        self._pace = None if self.rate is None else Pace(self.rate)
        self._changed = threading.Condition()  # of everything below
        self._workers: list[Worker] = []
        self._process = os.getpid()
        self._start_error: BoxError | None = None
        weakref.finalize(self, _finalize, self._workers, os.getpid())  # also at the end of the program

    def __reduce__(self) -> Any:  # noqa: ANN401
        return _remade, (type(self), self.settings())  # workers cannot be copied or saved with a model

    def settings(self) -> dict[str, Any]:
        """The arguments with which this evaluator can be made again."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    @abstractmethod
    def make_worker(self, number: int) -> Worker:
        """A new worker."""

    @abstractmethod
    def source(self, function: Any) -> Source:  # noqa: ANN401
        """What workers make their box of: the factory, or the function of a request."""

    def describe(self) -> Description | None:
        """See `Evaluator.describe`. The first worker is started for it, or all of them, and any may answer."""
        if self.factory is None:
            return None
        source = self.source(None)
        with self._changed:
            self._start_workers()
            asked = self._workers[: self.n if self.any_describes else 1]
        futures = {worker.prepare(source): worker for worker in asked}
        try:
            for future in as_completed(futures):
                if future.exception() is None or not takes_number(self.factory):  # otherwise others may make theirs
                    break
            description = future.result()
        except Exception as error:
            self.close()
            raise self._failed_start(error) from error
        except BaseException:
            self.close()
            raise
        with self._changed:
            futures[future].prepared.add(source.key)
        return description

    def evaluate(self, request: Request) -> Answer:
        """See `Evaluator.evaluate`."""
        if request.whole:
            if self.factory is not None:
                raise BoxError("a box with memory is called in this process: give it as fn, and no factory")
            return evaluate_rows(request, pace=self._pace)
        if self._pace is not None:
            request = request._replace(max_rows=min(request.max_rows or self._pace.call_rows, self._pace.call_rows))
        try:
            return Run(self, request).answer()
        except (KeyboardInterrupt, SystemExit):
            self.close()
            raise

    def close(self) -> None:
        """End all workers. The next request starts them again."""
        with self._changed:
            workers = self._workers[:]
            self._workers.clear()
            self._start_error = None
            self._changed.notify_all()
        _close_all(workers, self._process)

    # ---- for `Run`

    @property
    def changed(self) -> threading.Condition:
        """Notified whenever a task has ended or a worker is ready. The methods below need its lock."""
        return self._changed

    @property
    def pace(self) -> Pace | None:
        """Limits the evaluations in a second."""
        return self._pace

    def try_again(self) -> None:
        """Let workers that could not make their box try it again at once: a request has come."""
        self._start_error = None
        for worker in self._workers:
            if worker.restarting:
                worker.rest_until = 0.0

    def take_worker(self, source: Source, waiting: int) -> Worker | None:
        """A worker for one of the tasks that are waiting; None: none is free at the moment, or has the box."""
        self._start_workers()
        now = time.monotonic()
        for worker in self._workers:
            if worker.restarting and not worker.preparing and worker.rest_until <= now:
                self._prepare(worker, source)
        active = [worker for worker in self._workers if not worker.restarting][: self.n]
        for worker in active:
            if source.key not in worker.prepared and not worker.preparing and worker.tasks == 0:
                self._prepare(worker, source)
        able = [worker for worker in active if source.key in worker.prepared and not worker.preparing]
        rested = [worker for worker in able if worker.rest_until <= now]
        ahead = waiting > self.n  # the last tasks go to those who have nothing else to do
        free = [worker for worker in rested or able if worker.tasks < (worker.most_tasks if ahead else 1)]
        if not free or (not rested and len(able) < len(active)):  # others do the work of those that are set aside
            return None
        worker = min(free, key=lambda w: (w.tasks, w.rest_until, w.strikes, w.number))
        worker.tasks += 1
        return worker

    def give_back(self, worker: Worker, lives: bool, source: Source) -> None:
        """Take back a worker whose task has ended; not `lives`: it has lost its box, and has to make it again."""
        if worker not in self._workers:
            return  # the pool was closed meanwhile
        worker.tasks -= 1
        if not lives:
            worker.prepared.clear()
            worker.restarting = True
            if not worker.preparing:
                self._prepare(worker, source)

    def start_error(self, source: Source) -> BoxError | None:
        """The error because of which no worker has the box; None: some have, or are being prepared."""
        hope = any(worker.preparing or worker.tasks or source.key in worker.prepared for worker in self._workers)
        return None if hope else self._start_error

    def judge(self, worker: Worker, failed: bool) -> None:
        """Note how a task ended. A worker that keeps failing is set aside for a while, or until it answers again."""
        if not failed:
            worker.strikes, worker.rest_until = 0, 0.0
            return
        worker.strikes += 1
        over = min(worker.strikes - SETTINGS.strikes, 20)  # powers of two beyond the longest rest may overflow
        if over >= 0:
            worker.rest_until = time.monotonic() + min(SETTINGS.first_rest * 2.0**over, SETTINGS.longest_rest)

    def _start_workers(self) -> None:
        if self._process != os.getpid():  # a fork: threads, and those that serve processes, are not in it
            self._process = os.getpid()
            self._workers.clear()
        if not self._workers:
            self._workers += [self.make_worker(number) for number in range(self.n + self.spares)]

    def _prepare(self, worker: Worker, source: Source) -> None:
        """Let a worker make its box."""
        worker.preparing = True
        own = weakref.ref(self)  # a future may outlive the pool, which must be free to end its workers

        def prepared(future: "Future[Description]") -> None:
            if (pool := own()) is not None:
                pool.prepared(worker, source, CancelledError() if future.cancelled() else future.exception())

        try:
            future = worker.prepare(source)
        except Exception as error:
            future = Future()
            future.set_exception(error)
        future.add_done_callback(prepared)

    def prepared(self, worker: Worker, source: Source, error: BaseException | None) -> None:
        """Note that a worker has made its box, or the error because of which it could not."""
        with self._changed:
            if worker not in self._workers:
                return
            worker.preparing = False
            if error is None:
                worker.prepared.add(source.key)
                worker.restarting, self._start_error = False, None
            else:
                self._start_error = self._failed_start(error)
                self.judge(worker, failed=True)
                worker.restarting, worker.rest_until = True, max(worker.rest_until, time.monotonic() + 0.1)
            self._changed.notify_all()

    def _failed_start(self, error: BaseException) -> BoxError:
        failed = BoxError(f"a worker of {type(self).__name__} could not make its box: {error}{self.start_advice}")
        failed.__cause__ = (
            error.cause() if isinstance(error, WorkerError) else RemoteError(type(error).__name__, str(error))
        )
        return failed

    start_advice = ". Call the factory yourself to see why."


def _finalize(workers: list[Worker], process: int) -> None:
    """End the workers of a pool that was not closed.

    The garbage collector calls this in whichever thread it happens to run, with whatever locks held: in the loop of
    Dask, or in a thread that belongs to one of the workers. What has to wait for those is done in a thread of its own.
    """
    if process != os.getpid() or not workers:
        return
    if threading.main_thread().is_alive():
        threading.Thread(target=_close_all, args=(workers, process)).start()  # the program waits for it
    else:  # the program is ending, and starts no threads any more
        _close_all(workers, process)


def _close_all(workers: list[Worker], process: int) -> None:
    if process == os.getpid():  # and not a fork of it
        for worker in workers:
            worker.close()


def _remade(kind: type[WorkerPool], settings: dict[str, Any]) -> WorkerPool:
    return kind(**settings)
