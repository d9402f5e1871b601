"""What evaluators have in common whose workers are other processes."""

import importlib
import os
import threading
import uuid
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from bondgrad.errors import positive_int
from bondgrad.evaluators._evaluator import Answer, Request
from bondgrad.evaluators._pool import WorkerPool
from bondgrad.evaluators._tasks import FatalError, unpack_answer
from bondgrad.evaluators._worker import MissingBoxError, Source, Worker, WorkerError, WorkerSettings, fulfil

T = TypeVar("T")


class RemotePool(WorkerPool):
    """A pool whose workers are other processes, here or elsewhere. They are sent the box in a pickled form.

    Args:
        n: How many tasks are evaluated at a time.
        factory: See `WorkerPool`.
        torch_threads: Of each worker.
        options: See `WorkerPool` and `Evaluator`.
    """

    def __init__(
        self,
        n: int,
        factory: Callable[..., Any] | None,
        torch_threads: int,
        **options: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(n, factory, **options)
        self.torch_threads = positive_int("torch_threads", torch_threads)
        self._own: Source | None = None  # of the factory
        self._sources: weakref.WeakKeyDictionary[Any, tuple[Any, Source]] = weakref.WeakKeyDictionary()

    def source(self, function: Any) -> Source:  # noqa: ANN401
        """See `WorkerPool.source`."""
        if self.factory is not None:
            if self._own is None:
                self._own = Source(uuid.uuid4().hex, self.factory, None, pickled_box(self.factory, None))
            return self._own
        version = [(id(t), None if t.is_inference() else t._version) for t in function.tensors.all() if t is not None]
        before, source = self._sources.get(function, (None, None))
        if source is None or before != version:  # another box, or one whose tensors were written to since
            source = Source(uuid.uuid4().hex, None, None, pickled_box(None, function))
            self._sources[function] = (version, source)
        return source


class RemoteWorker(Worker):
    """A worker in another process, whose answers are `PackedAnswer`.

    It must not keep its pool alive, which ends its workers when it is not needed any more.

    Args:
        number: Of the worker.
        threads: Of torch.
    """

    def __init__(self, number: int, threads: int) -> None:
        super().__init__(number)
        self._threads = threads

    def settings(self, source: Source) -> WorkerSettings:
        """What the process is told with every task."""
        return WorkerSettings(source.key, self.number, self._threads, os.getpid())

    def answer(self, result: Any, part: Request) -> Answer:  # noqa: ANN401
        """See `Worker.answer`."""
        return unpack_answer(result, part, self.number)


def pickled_box(factory: Callable[..., Any] | None, function: Any) -> bytes:  # noqa: ANN401
    """The factory and the function for other processes. Closures and functions of notebooks are pickled, too."""
    cloudpickle: Any = needed("cloudpickle", "processes")
    try:
        pickled: bytes = cloudpickle.dumps((factory, function))
    except Exception as error:
        name, remedy = "the factory", "Let it open files, sockets and devices itself when it is called."
        if factory is None:
            name = f"the box {function.name}"
            remedy = "Give a factory= that makes the box there, or use evaluators.Threads."
        raise TypeError(
            f"{name} cannot be sent to other processes ({type(error).__name__}: {error}). {remedy}"
        ) from error
    return pickled


def reported(work: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401
    """What the work of a worker returns, or the error by which it reports.

    The error is a value, since schedulers wrap an error that is raised in classes of their own, and log it.
    """
    try:
        return work(*arguments)
    except (FatalError, MissingBoxError, WorkerError) as error:
        return error


def settle(answer: "Future[Any]", task: "Future[Any]") -> None:
    """Give `answer` the outcome of a task that ended, whose errors may be values."""
    error = CancelledError() if task.cancelled() else task.exception()
    outcome = task.result() if error is None else error
    if isinstance(outcome, BaseException):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)


def in_thread(work: Callable[[], T]) -> "Future[T]":
    """Do something in a thread of its own: what may wait must not be done in a callback, or with the lock of a pool."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # from now on it cannot be cancelled
    threading.Thread(target=fulfil, args=(future, work), daemon=True).start()
    return future


def needed(module: str, extra: str) -> Any:  # noqa: ANN401
    """An optional module, which is imported now; or an error that says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{module} is not installed: pip install 'bondgrad[{extra}]'") from error
