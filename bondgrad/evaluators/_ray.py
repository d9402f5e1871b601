"""Evaluation by actors of Ray, on one machine or on many."""

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from bondgrad.errors import BoxError
from bondgrad.evaluators._evaluator import Description, Request
from bondgrad.evaluators._remote import RemotePool, RemoteWorker, in_thread, needed, reported, settle
from bondgrad.evaluators._tasks import pack_task
from bondgrad.evaluators._worker import (
    MissingBoxError,
    Source,
    Worker,
    prepare_here,
    takes_number,
    work_here,
)


class Ray(RemotePool):
    """Evaluates rows by n actors of Ray, each of which has a box of its own, with its GPU, its licence or its device.

    If Ray is initialised, its cluster is used. Otherwise this evaluator connects to `address`, to ``RAY_ADDRESS`` of
    the environment, or starts Ray on this machine; the last evaluator that is closed ends that again. bondgrad must be
    installed on all nodes.

    An actor that exceeds `timeout`, dies or loses its node costs the rows that it was evaluating, which are asked
    again, and is replaced as soon as there is a node with room for it; the others go on meanwhile.

    Args:
        n: The number of actors that evaluate at a time.
        factory: Makes the box of an actor. With a parameter, it is given the number of the actor, from 0 on. None: the
            function of the layer is sent to the actors, as it is at the first request.
        resources: What each actor needs, as options of Ray: ``{"num_gpus": 1}``, ``{"resources": {"licence": 1}}``.
        address: Of the cluster, if Ray is not initialised. None: see above.
        max_rows: The most rows in one call; 1 for a box that takes one row at a time. None: each actor gets an equal
            share of the rows of a request.
        timeout: Seconds that the evaluation of one row may take, after which the actor is ended; None: any time.
        retries: How often a row is asked again for which no finite output came; None: as often as it takes.
        rate: The most evaluations in a second; None: no limit.
        max_evaluations: The most evaluations of one layer; None: no limit.
        torch_threads: Threads of torch in each actor.
        spares: Actors beyond n that stand ready to take the place of one that has to be replaced. None: one; or none,
            if the factory is given numbers or if `resources` are given, which a spare would take.

    Example:
        >>> evaluator = Ray(8, make_simulator, resources={"num_gpus": 1}, address="auto")  # doctest: +SKIP
        >>> box = bondgrad.BlackBox(None, in_features=3, evaluator=evaluator)  # doctest: +SKIP
    """

    any_describes = True

    def __init__(
        self,
        n: int,
        factory: Callable[..., Any] | None = None,
        *,
        resources: dict[str, Any] | None = None,
        address: str | None = None,
        max_rows: int | None = None,
        timeout: float | None = None,
        retries: int | None = 2,
        rate: float | None = None,
        max_evaluations: int | None = None,
        torch_threads: int = 1,
        spares: int | None = None,
    ) -> None:
        options: Any = {"max_rows": max_rows, "retries": retries, "rate": rate, "max_evaluations": max_evaluations}
        ready = (0 if takes_number(factory) or resources else 1) if spares is None else spares
        super().__init__(n, factory, torch_threads, timeout=timeout, spares=ready, **options)
        self.resources, self.address = resources, address
        try:
            self._actors = needed("ray", "ray").remote(BoxActor).options(**resources or {})
        except (ValueError, TypeError) as error:
            raise ValueError(f"resources must be options of an actor of Ray, got {resources!r}: {error}") from error

    def __repr__(self) -> str:
        return f"Ray({self.n}, max_rows={self.max_rows}, timeout={self.timeout})"

    def make_worker(self, number: int) -> Worker:
        """See `WorkerPool.make_worker`."""
        worker = RayWorker(number, self._actors, self.address, self.torch_threads)
        worker.most_tasks = 2 if self.timeout is None else 1  # the time of a task that waits would run, too
        return worker


class BoxActor:
    """An actor: a process that has a box."""

    def run(self, work: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401
        """See `reported`."""
        return reported(work, *arguments)


class RayWorker(RemoteWorker):
    """An actor, and the one that takes its place when it is lost.

    All that waits for Ray is done in threads: Ray's callbacks wait for the lock of the pool, with which most methods
    are called, and Ray can do nothing meanwhile.

    Args:
        number: Of the worker.
        actors: The class of actors.
        address: Of the cluster.
        threads: Of torch.
    """

    def __init__(self, number: int, actors: Any, address: str | None, threads: int) -> None:  # noqa: ANN401
        super().__init__(number, threads)
        self._actors = actors
        self._lock = threading.Lock()  # of the following
        self._actor: Any = None  # None: it was lost, or is not made yet
        self._closed = False
        CONNECTION.join(self, address)
        in_thread(self._living_actor)  # so that its process is ready when it is needed

    def prepare(self, source: Source) -> "Future[Description]":
        """See `Worker.prepare`. It takes as long as there is no node for the actor."""
        ready: Future[Description] = Future()
        arguments = self.settings(source), source.pickled

        def begin() -> None:
            try:
                self._send(ready, self._living_actor(), prepare_here, *arguments)
            except Exception as error:
                ready.set_exception(error)

        in_thread(begin)
        return ready

    def submit(self, source: Source, part: Request, seconds: float | None) -> "Future[Any]":
        """See `Worker.submit`."""
        answer: Future[Any] = Future()
        try:
            CONNECTION.check()
            self._send(answer, self._actor, work_here, self.settings(source), None, pack_task(part))
        except BoxError as error:
            answer.set_exception(error)
        except Exception:  # it was lost meanwhile
            answer.set_exception(MissingBoxError())
        return answer

    def expire(self) -> None:
        """End the actor."""
        self._drop(self._actor)

    def close(self) -> None:
        """End the actor, and Ray if it was started for this worker and no other is left."""
        with self._lock:
            actor, self._actor, self._closed = self._actor, None, True
        _kill(actor)
        CONNECTION.leave(self)

    def _living_actor(self) -> Any:  # noqa: ANN401
        with self._lock:
            if self._closed:
                raise RuntimeError("the evaluator was closed")
            if self._actor is None:
                CONNECTION.check()
                self._actor = self._actors.remote()
            return self._actor

    def _send(self, answer: "Future[Any]", actor: Any, work: Callable[..., Any], *arguments: Any) -> None:  # noqa: ANN401
        """Let an actor do something, and `answer` know what came of it."""

        def collect(task: "Future[Any]") -> None:
            if task.exception() is not None:  # errors of the box are values
                self._drop(actor)
            settle(answer, task)

        try:
            task = actor.run.remote(work, *arguments).future()
        except Exception:
            self._drop(actor)
            raise
        task.add_done_callback(collect)

    def _drop(self, actor: Any) -> None:  # noqa: ANN401
        """Do without an actor, which may still run."""
        if self._actor is actor:  # otherwise another has taken its place
            self._actor = None
        in_thread(lambda: _kill(actor))


class Connection:
    """The connection of this process to Ray, which all evaluators share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: set[int] = set()  # workers, by their identity
        self._own = False  # whether it was made here

    def join(self, worker: RayWorker, address: str | None) -> None:
        """Connect to Ray, or start it, unless it is initialised."""
        ray = needed("ray", "ray")
        with self._lock:
            self._users.add(id(worker))
            if ray.is_initialized():
                return
            where = address or os.environ.get("RAY_ADDRESS") or "local"
            options: Any = {"include_dashboard": False} if where == "local" else {}
            ray.init(address=where, logging_level=logging.WARNING, **options)
            self._own = True

    def check(self) -> None:
        """Raise an error if Ray was shut down. It would connect to any cluster that it finds, with the next call."""
        if not needed("ray", "ray").is_initialized():
            raise BoxError("Ray was shut down while evaluators.Ray used it: call close() of the evaluator before")

    def leave(self, worker: RayWorker) -> None:
        """End the connection if it was made here, when no worker needs it any more."""
        with self._lock:
            self._users.discard(id(worker))
            if self._own and not self._users:
                self._own = False
                needed("ray", "ray").shutdown()


CONNECTION = Connection()


def _kill(actor: Any) -> None:  # noqa: ANN401
    with contextlib.suppress(Exception):  # it is gone already, or Ray is
        CONNECTION.check()
        needed("ray", "ray").kill(actor)
