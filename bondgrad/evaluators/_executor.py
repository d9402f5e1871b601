"""Evaluation by an executor: Dask, MPI, Slurm, Parsl, loky, or one of the standard library."""

import concurrent.futures
import contextlib
import itertools
import os
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future
from typing import Any

from bondgrad.errors import BoxError
from bondgrad.evaluators._evaluator import Answer, Description, Request
from bondgrad.evaluators._remote import RemotePool, RemoteWorker, in_thread, reported, settle
from bondgrad.evaluators._tasks import pack_task
from bondgrad.evaluators._worker import (
    Abandoned,
    MissingBoxError,
    Source,
    Worker,
    fulfil,
    prepare_here,
    takes_number,
    work_here,
)


class Executor(RemotePool):
    """Evaluates rows by an executor of `concurrent.futures`, on whichever machines it has.

    ============ ===============================================================
    Dask         ``Executor(client)``, or ``Executor(client.get_executor(...))``
    MPI          ``Executor(mpi4py.futures.MPIPoolExecutor())``
    Parsl        ``Executor(parsl.concurrent.ParslPoolExecutor(config), n=16)``
    Slurm        ``Executor(submitit.AutoExecutor(folder), n=16)``
    loky         ``Executor(loky.get_reusable_executor(8))``
    ============ ===============================================================

    The executor is the user's: it is neither started nor shut down here. Each of its threads or processes makes a box
    for itself when it first needs one, and bondgrad must be installed where they run. With submitit every task is a
    job, which makes the box anew: let tasks have many rows.

    A task cannot be ended. One that exceeds `timeout` is left to itself, its late answer is dropped, and while it is at
    work, fewer others are sent; with more than n such tasks, `BoxError` is raised. The time begins when a task is sent,
    so that n should not be more than the executor can do at a time. An executor that is broken, as those of the
    standard library and of loky are when one of their processes dies, raises `BoxError`; Dask and Parsl go on by
    themselves, a job of submitit that died is sent again if Slurm keeps accounts, and MPI ends the whole program.

    Args:
        executor: Has a method ``submit(function, *arguments)`` that returns a future, or a job with a method `result`;
            or a client of Dask.
        factory: Makes the boxes. It has no parameters. None: the function of the layer is sent to the workers, as it is
            at the first request.
        n: How many tasks are sent at a time. None: the number of workers of the executor, or that of the CPUs here if
            the executor does not tell.
        max_rows: The most rows in one call; 1 for a box that takes one row at a time. None: the rows of a request are
            divided into n tasks.
        timeout: Seconds that the evaluation of one row may take; None: any time.
        retries: How often a row is asked again for which no finite output came; None: as often as it takes.
        rate: The most evaluations in a second; None: no limit.
        max_evaluations: The most evaluations of one layer; None: no limit.
        torch_threads: Threads of torch in each worker that is another process.

    Example:
        >>> client = dask.distributed.Client("tcp://scheduler:8786")  # doctest: +SKIP
        >>> evaluator = Executor(client, make_simulator, timeout=10.0)  # doctest: +SKIP
        >>> box = bondgrad.BlackBox(None, in_features=3, evaluator=evaluator)  # doctest: +SKIP
    """

    def __init__(
        self,
        executor: Any,  # noqa: ANN401
        factory: Callable[..., Any] | None = None,
        *,
        n: int | None = None,
        max_rows: int | None = None,
        timeout: float | None = None,
        retries: int | None = 2,
        rate: float | None = None,
        max_evaluations: int | None = None,
        torch_threads: int = 1,
    ) -> None:
        if not callable(getattr(executor, "submit", None)):
            raise ValueError(
                f"executor must have a method submit, got {executor!r}: give an instance, such as ThreadPoolExecutor(4)"
            )
        if takes_number(factory):
            raise ValueError(
                f"factory must have no parameters, since the workers of an executor have no numbers, got {factory!r}: "
                "use evaluators.Ray or evaluators.Processes, whose workers have"
            )
        options: Any = {"max_rows": max_rows, "retries": retries, "rate": rate, "max_evaluations": max_evaluations}
        super().__init__(_size(executor) if n is None else n, factory, torch_threads, timeout=timeout, **options)
        self.executor = executor
        self._submitter = Submitter(executor, self.n)

    def __repr__(self) -> str:
        return f"Executor({type(self.executor).__name__}, n={self.n}, max_rows={self.max_rows}, timeout={self.timeout})"

    def __reduce__(self) -> Any:  # noqa: ANN401
        raise TypeError(
            "evaluators.Executor cannot be saved or sent, since its executor cannot: save model.state_dict(), or set "
            "box.evaluator = bondgrad.evaluators.Local() before"
        )

    @property
    def abandoned(self) -> int:
        """The number of tasks that took too long, and are still at it."""
        return len(self._submitter.abandoned)

    def make_worker(self, number: int) -> Worker:
        """See `WorkerPool.make_worker`."""
        return ExecutorWorker(number, self._submitter, self.torch_threads)

    def evaluate(self, request: Request) -> Answer:
        """See `Evaluator.evaluate`."""
        answer = super().evaluate(request)
        if self._submitter.broken is not None:
            raise BoxError(
                f"the executor does not work any more: {self._submitter.broken}. Set box.evaluator to an Executor with "
                "a new one, or use evaluators.Processes, which replaces processes that die"
            )
        return answer


class Submitter:
    """Submits tasks to the executor, and takes note when it is broken.

    Args:
        executor: See `Executor`.
        n: How many tasks may hang.
    """

    def __init__(self, executor: Any, n: int) -> None:  # noqa: ANN401
        client = getattr(executor, "get_executor", None)
        self._executor = executor if client is None else client(pure=False)
        self._numbers = itertools.count()
        self.makes_jobs = not isinstance(self._executor, concurrent.futures.Executor)  # in a process of its own each
        self.broken: BaseException | None = None
        self.abandoned = Abandoned(n, "tasks", "Restart the workers of the executor, or give a longer timeout=")

    def submit(self, work: Callable[..., Any], *arguments: Any) -> "Future[Any]":  # noqa: ANN401
        """The future of a task, which may bring errors as values. It is never called in a callback of the executor."""
        try:
            task = self._executor.submit(_numbered, next(self._numbers), work, *arguments)
        except Exception as error:
            task = Future()
            task.set_exception(error)
            if isinstance(error, RuntimeError):  # it was shut down
                self.broken = error
        future: Future[Any] = task if isinstance(task, Future) else JobFuture(task)
        future.add_done_callback(self._watch)
        return future

    def _watch(self, task: "Future[Any]") -> None:
        if not task.cancelled() and isinstance(error := task.exception(), BrokenExecutor):
            self.broken = error


class JobFuture(Future[Any]):
    """The outcome of a job, for which a thread waits.

    Args:
        job: Has a method `result`, and perhaps a method `cancel`, which ends it.
    """

    def __init__(self, job: Any) -> None:  # noqa: ANN401
        super().__init__()
        self._job = job
        in_thread(lambda: fulfil(self, job.result))

    def cancel(self) -> bool:
        """End the job, also if it has begun. Its outcome, an error, comes when the executor has seen that."""
        if not self.done():
            self._job.cancel()
        return False


class ExecutorWorker(RemoteWorker):
    """One of n tasks at a time. Which worker of the executor does it is not known.

    Args:
        number: Of the worker.
        submitter: To the executor.
        threads: Of torch.
    """

    def __init__(self, number: int, submitter: Submitter, threads: int) -> None:
        super().__init__(number, threads)
        self._submitter = submitter
        self._task: Future[Any] | None = None  # while it runs: its callbacks would keep the whole evaluator alive
        self._late: Future[Any] | None = None  # one that took too long
        self._left: list[Future[Any]] = []  # jobs that took too long, and may still be at it

    def prepare(self, source: Source) -> "Future[Description]":
        """Let one of the executor's workers make its box, so that the time which it needs is not that of a task."""
        ready: Future[Description] = Future()
        late, self._late = self._late, None
        if late is not None and len(self._submitter.abandoned) < self._submitter.abandoned.n:
            late.add_done_callback(lambda _: ready.set_result(Description("")))  # the executor has no room before
        elif late is not None or (self._submitter.makes_jobs and (source.factory is None or self.number > 0)):
            ready.set_result(Description(""))
        else:
            settings = self.settings(source)
            in_thread(lambda: self._submit(lambda task: settle(ready, task), prepare_here, settings, source.pickled))
        return ready

    def submit(self, source: Source, part: Request, seconds: float | None) -> "Future[Any]":
        """See `Worker.submit`. Where the box is missing, the task is sent once more, together with the box."""
        answer: Future[Any] = Future()
        settings, packed = self.settings(source), pack_task(part)

        def collect(task: "Future[Any]") -> None:
            came = not task.cancelled() and task.exception() is None
            if came and isinstance(task.result(), MissingBoxError):
                in_thread(lambda: self._submit(collect, work_here, settings, source.pickled, packed))
            else:
                settle(answer, task)

        pickled = source.pickled if self._submitter.makes_jobs else None
        self._submit(collect, work_here, settings, pickled, packed)
        return answer

    def expire(self) -> None:
        """Leave the task to itself.

        It is not cancelled: Dask would believe that its thread is free, and send others there, and Slurm may start
        nothing on the node of a job that is being ended.
        """
        task = self._late = self._task
        if task is not None:  # otherwise it has just ended
            self._left = [left for left in (*self._left, task) if isinstance(left, JobFuture) and not left.done()]
            self._submitter.abandoned.add(task.done)

    def close(self) -> None:
        """Cancel the task, if it has not begun. Jobs are ended, also those that took too long."""
        left, self._left = self._left, []
        for task in {self._task, *left}:  # the task may be one that was left: a job must not be interrupted twice
            if task is not None:
                _cancel(task)

    def _submit(self, ended: Callable[["Future[Any]"], None], work: Callable[..., Any], *arguments: Any) -> None:  # noqa: ANN401
        task = self._task = self._submitter.submit(work, *arguments)

        def forget(task: "Future[Any]") -> None:
            if self._task is task:  # otherwise it took too long, and there is another one
                self._task = None

        task.add_done_callback(forget)
        task.add_done_callback(ended)


def _cancel(task: "Future[Any]") -> None:
    with contextlib.suppress(Exception):  # Parsl cannot, and a job may have ended
        task.cancel()


def _numbered(_: int, work: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401
    """See `reported`. The number makes every task different: Dask would answer a second one like the first."""
    return reported(work, *arguments)


def _size(executor: Any) -> int:  # noqa: ANN401
    """How many tasks an executor does at a time; the number of CPUs, if it does not tell."""
    if callable(threads := getattr(executor, "nthreads", None)):  # a client of Dask
        return max(1, int(sum(threads().values())))
    known: int | None = getattr(executor, "_max_workers", None) or getattr(executor, "num_workers", None)  # of MPI
    return known or os.cpu_count() or 1
