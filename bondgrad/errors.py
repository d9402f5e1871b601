"""The error that blames the box, and checks of arguments that blame the caller.

Every message names the argument, what was expected, and what to do.
"""

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

T = TypeVar("T")

__all__ = ["BoxError", "EvaluationLimitError"]

MISTAKES = (TypeError, NameError, AttributeError)  # errors of code that is wrong, which trying again does not mend


class BoxError(RuntimeError):
    """The user's function failed, or answered with something that is not one row of output per row of input.

    What the function itself raised, if anything, is chained as ``__cause__``.
    """


class RowsFailed(BoxError):  # noqa: N818 - some of them
    """A function of one sample failed at some rows of a call.

    Args:
        y: [N, d_out] the outputs, NaN where it failed; None: it failed at all rows.
        errors: What is said of each of those rows, by its place.
    """

    def __init__(self, y: torch.Tensor | None, errors: dict[int, BoxError]) -> None:
        first = next(iter(errors.values()))
        super().__init__(str(first))
        self.y, self.errors, self.__cause__ = y, errors, first.__cause__


class EvaluationLimitError(BoxError):
    """The next evaluations would be more than `max_evaluations` of the evaluator allows. They were not made."""


class RequestCancelled(Exception):  # noqa: N818 - it is no error
    """The answer to a request is not needed any more; `rows` of its evaluations were made."""

    def __init__(self, rows: int, calls: tuple[Any, ...] = ()) -> None:
        super().__init__(rows)
        self.rows = rows
        note_calls(self, calls)


class RemoteError(Exception):
    """The cause of an error that was raised elsewhere, in another process or on another machine.

    Args:
        kind: The name of its type.
        text: Its message and traceback, as they were there.
        mistake: Whether it is one of `MISTAKES`.
    """

    def __init__(self, kind: str, text: str, mistake: bool = False) -> None:
        super().__init__(text)
        self.kind, self.mistake = kind, mistake

    def __reduce__(self) -> Any:  # noqa: ANN401
        return RemoteError, (self.kind, str(self), self.mistake)


CALLS = "bondgrad_calls"  # the attribute of an error that ends a request


def note_calls(error: BaseException, calls: Iterable[Any]) -> None:
    """Let an error that ends a request say which calls of the box were made for it: they count."""
    setattr(error, CALLS, tuple(calls))


def noted_calls(error: BaseException) -> tuple[Any, ...] | None:
    """The calls of the box that an error ended, the one that raised it included; None: it does not say."""
    calls: tuple[Any, ...] | None = getattr(error, CALLS, None)
    return calls


def is_mistake(error: BaseException) -> bool:
    """Whether an error of a box says that code is wrong, the box's or an answer's form, so that it must be raised."""
    cause = error.__cause__
    if isinstance(cause, RemoteError):
        return cause.mistake
    return isinstance(error, EvaluationLimitError) or cause is None or isinstance(cause, MISTAKES)


def kind_of(error: BaseException) -> str:
    """The name of the type of what a box raised."""
    cause = error.__cause__
    return cause.kind if isinstance(cause, RemoteError) else type(cause or error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on the CPU or on an accelerator."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("not enough memory" in text or "out of memory" in text)


def positive_int(name: str, value: Any) -> int:  # noqa: ANN401
    """The value as an int, if it is a whole number of at least one."""
    if (number := _whole(value)) < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return number


def not_negative_int(name: str, value: Any) -> int:  # noqa: ANN401
    """The value as an int, if it is a whole number of at least zero."""
    if (number := _whole(value)) < 0:
        raise ValueError(f"{name} must be zero or a positive integer, got {value!r}")
    return number


def checked_seed(value: Any) -> int:  # noqa: ANN401
    """The value as an int, if it is a seed."""
    if not 0 <= (seed := _whole(value)) < 2**63:
        raise ValueError(f"seed must be an integer from 0 to 2**63 - 1, or None, got {value!r}")
    return seed


def positive_float(name: str, value: Any) -> float:  # noqa: ANN401
    """The value as a float, if it is a positive finite number."""
    if not 0 < (number := _number(value)) < math.inf:
        raise ValueError(f"{name} must be a positive finite number, got {value!r}")
    return number


def not_negative(name: str, value: Any) -> float:  # noqa: ANN401
    """The value as a float, if it is a finite number of at least zero."""
    if not 0 <= (number := _number(value)) < math.inf:
        raise ValueError(f"{name} must be zero or a positive finite number, got {value!r}")
    return number


def checked_noise(value: Any) -> float | str | None:  # noqa: ANN401
    """The value, if it is a half-width of noise, None for that of rounding, or "auto"."""
    if value is None or (isinstance(value, str) and value == "auto"):
        return value
    if not 0 < (number := _number(value)) < math.inf:
        raise ValueError(f"noise must be a positive finite number, got {value!r} (None and 'auto' are possible, too)")
    return number


def chosen(name: str, value: object, by_name: dict[str, Callable[[], T]], kind: type[Any]) -> T:
    """An instance made from its name, or the instance itself."""
    if isinstance(value, str) and value in by_name:
        return by_name[value]()
    if not isinstance(value, kind):
        names = ", ".join(map(repr, by_name))
        raise ValueError(f"{name} must be one of {names} or an instance of {kind.__name__}, got {value!r}")
    return value  # type: ignore[no-any-return]


def counted(n: int, noun: str = "row") -> str:
    """A number of things in words: "1 row", "2 rows"; "1 dependency", "2 dependencies"."""
    several = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{n} {noun if n == 1 else several}"


def shortened(text: str, most: int = 80) -> str:
    """The text, or its beginning where it is long."""
    return text if len(text) <= most else f"{text[:most]}..."


def _whole(value: Any) -> int:  # noqa: ANN401
    """The value as an int, of whichever library; -1 if it is not a whole number."""
    try:
        return -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return -1


def _number(value: Any) -> float:  # noqa: ANN401
    """The value as a float, of whichever library; NaN if it is not a number."""
    try:
        return math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
