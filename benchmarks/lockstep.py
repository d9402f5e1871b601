"""Searches that ask for one value at a time, run side by side so that a box is called for all of them at once."""

from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def side_by_side(
    searches: Sequence[Callable[[Callable[[float], float]], T]],
    values: Callable[[list[int], list[float]], Sequence[float]],
) -> list[T]:
    """The results of all searches.

    Args:
        searches: Each is called with a function of one number, in a thread of its own.
        values: Answers questions of several searches: their indices, and where each wants its function.
    """
    events: SimpleQueue[tuple[int, float | None]] = SimpleQueue()  # a question, or None when a search has ended
    replies: list[SimpleQueue[float | Exception]] = [SimpleQueue() for _ in searches]
    results: list[T | Exception] = [RuntimeError("not run")] * len(searches)

    def one(n: int) -> None:
        def f(at: float) -> float:
            events.put((n, float(at)))
            reply = replies[n].get()
            if isinstance(reply, Exception):
                raise reply
            return reply

        try:
            results[n] = searches[n](f)
        except Exception as error:
            results[n] = error
        events.put((n, None))

    for n in range(len(searches)):
        Thread(target=one, args=(n,), daemon=True).start()
    running = len(searches)
    asked: list[tuple[int, float]] = []
    while running:
        n, at = events.get()
        if at is None:
            running -= 1
        else:
            asked.append((n, at))
        if asked and len(asked) == running:
            answer(asked, values, replies)
            asked = []
    for result in results:
        if isinstance(result, Exception):
            raise result
    return [result for result in results if not isinstance(result, Exception)]


def answer(
    asked: list[tuple[int, float]],
    values: Callable[[list[int], list[float]], Sequence[float]],
    replies: list["SimpleQueue[float | Exception]"],
) -> None:
    """Evaluate what was asked, in one call, and reply; an error of the box goes to every search."""
    asked.sort()  # threads ask in any order; noise must not depend on it
    try:
        found: Sequence[float | Exception] = values([n for n, _ in asked], [at for _, at in asked])
    except Exception as error:
        found = [error] * len(asked)
    for (n, _), value in zip(asked, found, strict=True):
        replies[n].put(value)
