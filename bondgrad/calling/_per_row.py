"""`per_row`: a function of one sample as a box, which is a function of rows."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from torch import nn

from bondgrad.calling._event_loop import settled
from bondgrad.calling._signature import function_name
from bondgrad.errors import MISTAKES, is_out_of_memory, positive_int


def per_row(f: Callable[..., Any], at_once: int = 32) -> "PerRow":
    """A box that gives a function of one sample each row in turn, and puts its outputs together as rows.

    Every row is a call of f, and is counted as one. An error at a row costs that row only: it is asked again by itself.
    If f is a coroutine function (`async def`), rows are awaited concurrently, on an event loop in a thread of its own.
    Several rows at a time of an ordinary function are a matter of the evaluator, such as `evaluators.Threads(8)`.

    Args:
        f: f(x [d], *context) -> a number, a list or tuple of numbers, or an array or tensor [d_out]. Of sequences x is
            [T, d], and the outputs [T, d_out]. The row is a numpy array if f does not refer to torch; annotate the
            first parameter (x: torch.Tensor, x: np.ndarray) to say which it is. A parameter `seed`, a `structure`, and
            methods `snapshot()` and `restore()` are those of the box.
        at_once: How many rows are awaited at a time at most, in each worker of an evaluator, if f is a coroutine
            function. 1 for a device that takes one request at a time.

    Example:
        >>> import math
        >>> box = bondgrad.BlackBox(bondgrad.per_row(lambda x: [math.sin(x[0]), x[0] * x[1]]), in_features=2)
        >>> box(torch.zeros(5, 2)).shape
        torch.Size([5, 2])
    """
    if not callable(f):
        raise TypeError(f"f must be callable, got {type(f).__name__}")
    if isinstance(f, nn.Module):
        raise TypeError(
            f"f must be a function of one sample; the module {type(f).__name__} takes rows, so give it to BlackBox as "
            "it is"
        )
    return PerRow(f.f if isinstance(f, PerRow) else f, positive_int("at_once", at_once))


class PerRow:
    """What `per_row` returns.

    Args:
        f: The function of one sample.
        at_once: See `per_row`.
    """

    def __init__(self, f: Callable[..., Any], at_once: int) -> None:
        self.f, self.at_once = f, at_once
        self.__name__ = function_name(f)
        self.__wrapped__ = f  # for `inspect.signature`
        if getattr(f, "structure", None) is not None:
            self.structure = f.structure  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return f"per_row({self.__name__})"

    def __call__(self, *rows: Any, **options: Any) -> list[Any]:  # noqa: ANN401
        """The outputs of f for each of the rows [N, ...] of its arguments. The first error is raised."""
        outcomes = self.outcomes(*rows, **options)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes

    def outcomes(self, *rows: Any, first_error: bool = False, **options: Any) -> list[Any]:  # noqa: ANN401
        """For each of the rows what f returned, or the error that it raised.

        The list ends with the first error that says that the code is wrong or that memory ran out; with `first_error`,
        with the first one of any kind.
        """
        outcomes: list[Any] = []
        for sample in zip(*rows, strict=True):
            try:
                outcome = self.f(*sample, **options)
            except Exception as error:
                outcomes.append(error)
                if first_error or isinstance(error, MISTAKES) or is_out_of_memory(error):
                    break
                continue
            if isinstance(outcome, Awaitable):
                rest = list(zip(*(row[len(outcomes) + 1 :] for row in rows), strict=True))
                at_once = 1 if first_error else self.at_once
                return outcomes + settled(self._await_all(outcome, rest, at_once, options))  # type: ignore[no-any-return]
            outcomes.append(outcome)
        return outcomes

    async def _await_all(
        self, first: Awaitable[Any], rest: list[tuple[Any, ...]], at_once: int, options: dict[str, Any]
    ) -> list[Any]:
        """What the first awaitable, and those of the rest of the rows, result in, or the errors that they raise."""
        free = asyncio.Semaphore(at_once)

        async def outcome(sample: tuple[Any, ...] | None) -> Any:  # noqa: ANN401
            async with free:
                return await (first if sample is None else self.f(*sample, **options))

        return await asyncio.gather(*map(outcome, [None, *rest]), return_exceptions=True)
