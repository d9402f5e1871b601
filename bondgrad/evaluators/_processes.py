"""Evaluation in other processes of this machine."""

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from bondgrad.evaluators._evaluator import Description, Request
from bondgrad.evaluators._remote import RemotePool, RemoteWorker, needed
from bondgrad.evaluators._spawning import CONTEXT
from bondgrad.evaluators._tasks import pack_task
from bondgrad.evaluators._worker import MissingBoxError, Source, Worker, prepare_here, takes_number, work_here


class Processes(RemotePool):
    """Evaluates rows in n processes, each of which has a box of its own.

    A process that exceeds `timeout`, crashes or is killed costs the rows that it was evaluating, which are asked again,
    and is replaced. Processes are started when they are first needed, as new Python interpreters that do not run the
    main module again. They end with this evaluator or with the program; `close` ends them earlier.

    Args:
        n: The number of processes that evaluate at a time.
        factory: Makes the box in each process. With a parameter, it is given the number of the process, from 0 on.
            None: the function of the layer is sent to the processes, as it is at the first request.
        max_rows: The most rows in one call; 1 for a box that takes one row at a time. None: each process gets an equal
            share of the rows of a request.
        timeout: Seconds that the evaluation of one row may take, after which the process is ended; None: any time.
        retries: How often a row is asked again for which no finite output came; None: as often as it takes.
        rate: The most evaluations in a second; None: no limit.
        max_evaluations: The most evaluations of one layer; None: no limit.
        torch_threads: Threads of torch in each process.
        spares: Processes beyond n that stand ready to take the place of one that has to be started again, which takes
            seconds. They make their box when they do so. None: one; or none, if the factory is given numbers.

    Example:
        >>> evaluator = Processes(4, make_simulator, timeout=10.0)  # doctest: +SKIP
        >>> box = bondgrad.BlackBox(None, in_features=3, evaluator=evaluator)  # doctest: +SKIP
    """

    def __init__(
        self,
        n: int,
        factory: Callable[..., Any] | None = None,
        *,
        max_rows: int | None = None,
        timeout: float | None = None,
        retries: int | None = 2,
        rate: float | None = None,
        max_evaluations: int | None = None,
        torch_threads: int = 1,
        spares: int | None = None,
    ) -> None:
        options: Any = {"max_rows": max_rows, "retries": retries, "rate": rate, "max_evaluations": max_evaluations}
        ready = (0 if takes_number(factory) else 1) if spares is None else spares
        super().__init__(n, factory, torch_threads, timeout=timeout, spares=ready, **options)
        needed("pebble", "processes")

    def __repr__(self) -> str:
        return f"Processes({self.n}, max_rows={self.max_rows}, timeout={self.timeout})"

    def make_worker(self, number: int) -> Worker:
        """See `WorkerPool.make_worker`."""
        return ProcessWorker(number, self.torch_threads)


class ProcessWorker(RemoteWorker):
    """A process, by a pool of pebble's with a single worker: it ends tasks and replaces processes that died."""

    ends_tasks = True
    most_tasks = 2

    def __init__(self, number: int, threads: int) -> None:
        super().__init__(number, threads)
        self._pool: Any = None
        self._futures: weakref.WeakSet[Future[Any]] = weakref.WeakSet()  # pebble forgets them when it is stopped
        self._start()

    def _start(self) -> None:
        pebble = needed("pebble", "processes")
        self._pool = pebble.ProcessPool(max_workers=1, context=CONTEXT)
        self._pool.schedule(int)  # which starts the process, so that it is ready when it is needed

    def prepare(self, source: Source) -> "Future[Description]":
        """See `Worker.prepare`."""
        if not self._pool.active:  # it gives up when its process dies without a task
            self._start()
        future: Future[Description] = self._pool.schedule(prepare_here, args=(self.settings(source), source.pickled))
        self._futures.add(future)
        return future

    def submit(self, source: Source, part: Request, seconds: float | None) -> "Future[Any]":
        """See `Worker.submit`."""
        future: Future[Any]
        if self._pool.active:
            arguments = (self.settings(source), None, pack_task(part))
            future = self._pool.schedule(work_here, args=arguments, timeout=seconds)
            self._futures.add(future)
        else:
            future = Future()
            future.set_exception(MissingBoxError())
        return future

    def expire(self) -> None:
        """Never called: pebble ends tasks that take too long."""

    def close(self) -> None:
        """End the process."""
        self._pool.stop()
        self._pool.join()
        for future in tuple(self._futures):
            future.cancel()
