"""Evaluation in threads of this process."""

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from bondgrad.calling._event_loop import cancel_in
from bondgrad.calling._function import RowFunction
from bondgrad.evaluators._calls import evaluate_rows
from bondgrad.evaluators._evaluator import Answer, Description, Request
from bondgrad.evaluators._pool import WorkerPool
from bondgrad.evaluators._worker import Abandoned, Source, Worker, describe_function, fulfil, make_box

_Counted = tuple[int, int, float]  # calls, evaluations and seconds


class Threads(WorkerPool):
    """Evaluates rows in n threads: for boxes that wait, such as devices and services, or that release the GIL.

    A thread cannot be ended. One that exceeds `timeout` is left to itself, its late answer is dropped, and another
    takes its place; with more than n such threads, `BoxError` is raised. A coroutine that it waits for is cancelled.

    Args:
        n: The number of threads.
        factory: Makes a box for each thread, for boxes that must not be shared. With a parameter, it is given the
            number of the thread, from 0 on. None: all threads call the function of the layer.
        max_rows: The most rows in one call; 1 for a box that takes one row at a time. None: each thread gets an equal
            share of the rows of a request.
        timeout: Seconds that the evaluation of one row may take; None: any time.
        retries: How often a row is asked again for which no finite output came; None: as often as it takes.
        rate: The most evaluations in a second; None: no limit.
        max_evaluations: The most evaluations of one layer; None: no limit.

    Example:
        >>> box = bondgrad.BlackBox(torch.sin, 3, evaluator=Threads(4, max_rows=1))
        >>> box(torch.zeros(8, 3)).shape
        torch.Size([8, 3])
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
    ) -> None:
        options: Any = {"max_rows": max_rows, "retries": retries, "rate": rate, "max_evaluations": max_evaluations}
        super().__init__(n, factory, timeout=timeout, **options)
        self._abandoned = Abandoned(self.n, "threads", self.hang_advice)

    def __repr__(self) -> str:
        return f"Threads({self.n}, max_rows={self.max_rows}, timeout={self.timeout})"

    @property
    def abandoned(self) -> int:
        """The number of threads that took too long, and are still at it."""
        return len(self._abandoned)

    def evaluate(self, request: Request) -> Answer:
        """See `Evaluator.evaluate`."""
        if getattr(_serving, "evaluator", None) is self._abandoned:  # a box in a box: all threads may be inside
            return evaluate_rows(request, pace=self.pace)
        return super().evaluate(request)

    def source(self, function: Any) -> Source:  # noqa: ANN401
        """See `WorkerPool.source`."""
        return Source("this process", self.factory, function)

    def make_worker(self, number: int) -> Worker:
        """See `WorkerPool.make_worker`."""
        return ThreadWorker(number, self._abandoned)

    hang_advice = (
        "Let the box give up by itself, as by requests.post(..., timeout=1); or use Processes, which ends a box that "
        "hangs; or give a longer timeout="
    )


class ThreadWorker(Worker):
    """A daemon thread that takes tasks from a queue.

    Args:
        number: Of the worker.
        abandoned: Gets a thread that is left to itself.
    """

    def __init__(self, number: int, abandoned: Abandoned) -> None:
        super().__init__(number)
        self._abandoned = abandoned
        self._start()

    def _start(self) -> None:
        self._box: RowFunction | None = None  # if it has its own
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._queue, self._abandoned), daemon=True)
        self._thread.start()

    def prepare(self, source: Source) -> "Future[Description]":
        """See `Worker.prepare`."""
        self.calls_function = source.factory is None

        def make() -> Description:
            if source.factory is None:
                return Description("")  # nothing has to be made
            if self._box is None:
                self._box = RowFunction(make_box(source.factory, self.number), None)
            return describe_function(self._box)

        return self._do(make)

    def submit(self, source: Source, part: Request, seconds: float | None) -> "Future[tuple[Answer, float, _Counted]]":
        """See `Worker.submit`."""
        settings = _Settings(part.points)
        time_features = getattr(part.function, "time_features", None)

        def own(answer: Answer) -> Answer:  # a box may answer every call in the same memory
            return answer._replace(y=answer.y.clone())

        def evaluate() -> tuple[Answer, float, _Counted]:
            with settings:
                box = self._box
                if box is None:
                    return own(evaluate_rows(part, self.number)), 0.0, (0, 0, 0.0)
                if box.time_features != time_features:
                    box = self._box = box.replaced(box.fn, time_features)
                before = box.calls, box.evaluations, box.seconds
                answer = evaluate_rows(part._replace(function=box), self.number)
                counted = box.calls - before[0], box.evaluations - before[1], box.seconds - before[2]
                return own(answer), box.rounding, counted

        return self._do(evaluate)

    def answer(self, result: Any, part: Request) -> Answer:  # noqa: ANN401
        """See `Worker.answer`."""
        answer: Answer = result[0]
        if self._box is not None:  # which the function of the layer only stands for
            function: Any = part.function
            function.count(*result[2])
            if answer.ok is None or bool(answer.ok.any()):
                function.learn(part.points, answer.y, result[1])
        return answer

    def expire(self) -> None:
        """See `Worker.expire`."""
        thread = self._thread
        cancel_in(thread.ident)  # a coroutine can be ended, unlike a thread
        self._queue.put(None)
        self._start()
        self._abandoned.add(lambda: not thread.is_alive())

    def close(self) -> None:
        """Let the thread end when it has done what it was given."""
        self._queue.put(None)
        if self.tasks == 0 and self._thread is not threading.current_thread():
            self._thread.join(1.0)  # a thread that still runs while the interpreter ends would abort the program

    def _do(self, work: Callable[[], Any]) -> "Future[Any]":
        future: Future[Any] = Future()
        self._queue.put((future, work))
        return future


_serving = threading.local()  # in a thread of an evaluator, which one it is, by the tasks that it has abandoned


def _serve(tasks: "queue.SimpleQueue[Any]", evaluator: Abandoned) -> None:
    """Do the tasks of a queue until it says None."""
    _serving.evaluator = evaluator
    while (task := tasks.get()) is not None:
        future, work = task
        if future.set_running_or_notify_cancel():
            fulfil(future, work)
        del future, work, task  # and with them the tensors of the task


class _Settings:
    """A context with the settings of torch of the thread that made it, which each thread has for itself."""

    def __init__(self, points: torch.Tensor) -> None:
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        self._autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds]
        self._stream = torch.cuda.current_stream(points.device) if points.is_cuda else None
        self._device = torch.get_default_device()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(torch.no_grad())
        for kind, dtype in self._autocast:
            self._stack.enter_context(torch.autocast(kind, dtype=dtype))
        if self._device.type != "cpu":  # as torch.set_default_device has it
            self._stack.enter_context(self._device)
        if self._stream is not None:
            self._stack.enter_context(torch.cuda.stream(self._stream))

    def __exit__(self, *_: object) -> None:
        self._stack.close()
