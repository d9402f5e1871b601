"""The event loop on which the coroutines of boxes run: one in a process, in a thread of its own."""

import asyncio
import atexit
import contextlib
import os
import threading
from collections.abc import Awaitable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

T = TypeVar("T")


class EventLoop:
    """An event loop in a thread of its own, so that it does not matter whether the caller runs inside another one.

    It serves all boxes of a process from the first coroutine on until the process ends: a client that a coroutine has
    opened belongs to its loop, and may be used again by later calls, by other layers, and by `probe` and `check`.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._awaited: dict[int, _Job] = {}  # by the thread that waits for it
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="bondgrad coroutines", daemon=True)
        self._thread.start()

    def result(self, awaitable: Awaitable[T]) -> T:
        """What the awaitable results in. It is cancelled if waiting for it ends with an error, as by Ctrl-C."""
        job, thread = _Job(awaitable), threading.get_ident()
        if thread == self._thread.ident:
            job.close()
            raise TypeError("a coroutine must not wait for another box whose function is a coroutine: await that")
        try:  # Ctrl-C may come at any time
            self._awaited[thread] = job
            self._loop.call_soon_threadsafe(job.start)
            return job.outcome.result()  # type: ignore[no-any-return]
        finally:
            self._awaited.pop(thread, None)
            if not job.outcome.done():
                self._loop.call_soon_threadsafe(job.cancel)

    def cancel(self, thread: int) -> None:
        """Cancel what a thread waits for, which goes on with an error."""
        if (job := self._awaited.get(thread)) is not None:
            self._loop.call_soon_threadsafe(job.cancel)

    def close(self) -> None:
        """Cancel what is left, and end the loop and its thread."""
        self._closing = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(1.0)
        if self._thread.is_alive():  # a coroutine that does not await keeps it busy; the thread ends with the process
            return
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        with contextlib.suppress(Exception):
            self._loop.run_until_complete(asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 1.0))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._closing:
            with contextlib.suppress(BaseException):  # SystemExit of a coroutine, which whoever waits gets, too
                self._loop.run_forever()


class _Job:
    """An awaitable on its way: its methods are called by the loop, one after the other."""

    def __init__(self, awaitable: Awaitable[Any]) -> None:
        self._awaitable = awaitable
        self._task: asyncio.Task[Any] | None = None
        self.outcome: Future[Any] = Future()

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._wait())
        self._task.add_done_callback(self._end)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def close(self) -> None:
        """Do without it."""
        if isinstance(self._awaitable, Coroutine):
            self._awaitable.close()

    async def _wait(self) -> Any:  # noqa: ANN401
        return await self._awaitable

    def _end(self, task: "asyncio.Task[Any]") -> None:
        error = CancelledError("the coroutine was cancelled") if task.cancelled() else task.exception()
        if error is None:
            self.outcome.set_result(task.result())
        else:
            self.outcome.set_exception(error)


_current: EventLoop | None = None
_making = threading.Lock()


def settled(value: Any) -> Any:  # noqa: ANN401
    """The value; if it is one to be awaited, what it results in on the event loop of the process."""
    if not isinstance(value, Awaitable):
        return value
    global _current
    with _making:
        if _current is None:
            _current = EventLoop()
            atexit.register(_current.close)
    return _current.result(value)


def cancel_in(thread: int | None) -> None:
    """Cancel the coroutine that a thread waits for, if it does."""
    if _current is not None and thread is not None:
        _current.cancel(thread)


def _forget() -> None:
    """In a process that was forked, there is no thread of the loop."""
    global _current, _making
    if _current is not None:
        atexit.unregister(_current.close)
    _current, _making = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
