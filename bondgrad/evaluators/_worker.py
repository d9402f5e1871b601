"""Workers: places that evaluate one task at a time. What runs in the process of a worker is here, too."""

import contextlib
import inspect
import os
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch

from bondgrad.calling._function import RowFunction
from bondgrad.errors import BoxError, RemoteError
from bondgrad.evaluators._evaluator import Answer, Description, Request
from bondgrad.evaluators._tasks import PackedAnswer, PackedTask, carry_out

MOST_BOXES = 4  # that a worker keeps, for layers that share an evaluator


class Source(NamedTuple):
    """What a worker makes its box of."""

    key: str  # the same for the same box
    factory: Callable[..., Any] | None  # makes the box; with a parameter, it is given the number of the worker
    function: Any  # a `RowFunction`, if there is no factory and the worker is in this process
    pickled: bytes = b""  # the two of them, for other processes


class Worker(ABC):
    """A place that evaluates one task at a time. The pool keeps its attributes."""

    ends_tasks = False  # whether a task that takes too long is ended by the worker itself
    calls_function = False  # whether it calls the function of the layer itself, in this process
    most_tasks = 1  # that it is given at a time: with two, it need not wait for the next one

    def __init__(self, number: int) -> None:
        self.number = number
        self.prepared: set[str] = set()  # the keys of the boxes that it has
        self.preparing = False  # whether it is making one
        self.restarting = False  # whether it has lost its boxes, and has not made one since
        self.tasks = 0  # that it has at the moment
        self.strikes = 0  # tasks in a row that failed
        self.rest_until = 0.0  # monotonic time before which it gets no task, since it kept failing

    @abstractmethod
    def prepare(self, source: Source) -> "Future[Description]":
        """Start the worker, if need be, and let it make its box."""

    @abstractmethod
    def submit(self, source: Source, part: Request, seconds: float | None) -> "Future[Any]":
        """Begin to evaluate the rows of a request; a worker that can end tasks ends it after that many seconds."""

    @abstractmethod
    def answer(self, result: Any, part: Request) -> Answer:  # noqa: ANN401
        """The answer that the result of `submit` stands for."""

    @abstractmethod
    def expire(self) -> None:
        """Give up the task of this worker, which has taken too long, and be ready for another one."""

    def close(self) -> None:  # noqa: B027 - there may be nothing to end
        """End what the worker has started."""


class Abandoned:
    """Tasks that took too long and cannot be ended, as long as they are still at it.

    Args:
        n: How many of them there may be.
        kind: What they are called in the message.
        remedy: What to do when there are more.
    """

    def __init__(self, n: int, kind: str, remedy: str) -> None:
        self.n, self._kind, self._remedy = n, kind, remedy
        self._over: list[Callable[[], bool]] = []  # for each, whether it has ended

    def __len__(self) -> int:
        self._over = [over for over in self._over if not over()]
        return len(self._over)

    def add(self, over: Callable[[], bool]) -> None:
        """Leave a task to itself; `over` says whether it has ended."""
        self._over.append(over)
        if len(self) > self.n:
            raise BoxError(
                f"{len(self)} {self._kind} hang in the box, more than the {self.n} that may, and cannot be ended. "
                f"{self._remedy}"
            )


def fulfil(future: "Future[Any]", work: Callable[[], Any]) -> None:
    """Do some work, and give its outcome to a future."""
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def takes_number(factory: Callable[..., Any] | None) -> bool:
    """Whether a factory has a parameter without a default: it is given the number of the worker."""
    try:
        known = inspect.signature(factory).parameters.values() if factory is not None else ()
    except (ValueError, TypeError):
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(parameter.default is parameter.empty and parameter.kind in kinds for parameter in known)


def make_box(factory: Callable[..., Any], number: int) -> Callable[..., Any]:
    """The box that a factory makes for a worker."""
    box: Callable[..., Any] = factory(number) if takes_number(factory) else factory()
    if not callable(box):
        raise TypeError(f"factory must return a function of rows, got {type(box).__name__}")
    return box


def describe_function(function: RowFunction) -> Description:
    """What the layer must know of a box that lives elsewhere."""
    structure = getattr(function.fn, "structure", None)
    return Description(function.name, function.seed_position is not None, structure)


class WorkerSettings(NamedTuple):
    """What a worker in another process is told with every task."""

    key: str  # of the box
    number: int  # of the worker
    threads: int  # of torch
    origin: int  # the process of the layer, in which nothing is set


class WorkerError(Exception):
    """What was raised in the process of a worker, where it is no answer of its box: its type, message and traceback."""

    def __init__(self, kind: str, message: str, text: str) -> None:
        super().__init__(kind, message, text)
        self.kind, self.message, self.text = kind, message, text

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"

    def cause(self) -> RemoteError:
        """The same as the cause of an error in the process of the layer."""
        return RemoteError(self.kind, self.text)


class StartError(WorkerError):
    """A worker could not make its box."""


class ExitError(WorkerError):
    """A box would have ended the process of its worker, as by sys.exit()."""


class MissingBoxError(Exception):
    """A worker was not told how to make its box, or has been started again since."""


_own = threading.local()  # the boxes of this thread, which need not stand several threads


def prepare_here(settings: WorkerSettings, pickled: bytes) -> Description:
    """Make the box in the process of a worker, if it does not exist there."""
    with _exit_reported():
        return describe_function(_function(settings, pickled, None))


def work_here(settings: WorkerSettings, pickled: bytes | None, task: PackedTask) -> PackedAnswer:
    """Evaluate a task in the process of a worker."""
    with _exit_reported():
        return carry_out(task, _function(settings, pickled, task.time_features))


@contextlib.contextmanager
def _exit_reported() -> Iterator[None]:
    """Report what would end this process as an error of its worker: it must not end that of the layer."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        vars(_own).pop("boxes", None)  # they are made anew, as if the process were
        raise _as(ExitError, error) from None


def _as(kind: type[WorkerError], error: BaseException) -> WorkerError:
    return kind(type(error).__name__, str(error), "".join(traceback.format_exception(error)).rstrip())


def _function(settings: WorkerSettings, pickled: bytes | None, time_features: int | None) -> RowFunction:
    """The `RowFunction` of a worker's box, which is made if need be."""
    boxes: dict[str, RowFunction] = vars(_own).setdefault("boxes", {})
    function = boxes.get(settings.key)
    if function is None:
        if pickled is None:
            raise MissingBoxError
        if os.getpid() != settings.origin:
            torch.set_num_threads(settings.threads)
        function = boxes[settings.key] = _made(settings, pickled)
        if os.getpid() != settings.origin:
            torch.seed()  # every process begins with the same one, and noise of several would be the same
        if len(boxes) > MOST_BOXES:
            del boxes[next(iter(boxes))]
    if function.time_features != time_features and time_features is not None:
        function = boxes[settings.key] = function.replaced(function.fn, time_features)
    return function


def _made(settings: WorkerSettings, pickled: bytes) -> RowFunction:
    import cloudpickle

    try:
        factory, function = cloudpickle.loads(pickled)
        if factory is not None:
            function = RowFunction(make_box(factory, settings.number), None)
    except Exception as error:
        raise _as(StartError, error) from None
    assert isinstance(function, RowFunction)
    return function
