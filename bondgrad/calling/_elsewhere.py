"""A box that belongs to its evaluator, as the layer sees it."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from bondgrad.errors import BoxError
from bondgrad.evaluators import Description, Evaluator


class ElsewhereBox:
    """Stands in this process for a box that its evaluator has elsewhere. It says what is known of it.

    Args:
        description: By the evaluator.
    """

    def __init__(self, description: Description) -> None:
        self.__name__ = description.name
        if description.structure is not None:
            self.structure = description.structure
        rows = inspect.Parameter("x", inspect.Parameter.POSITIONAL_ONLY, annotation=np.ndarray)
        seed = [inspect.Parameter("seed", inspect.Parameter.KEYWORD_ONLY)] if description.takes_seed else []
        self.__signature__ = inspect.Signature([rows, *seed])

    def __call__(self, *_: object, **__: object) -> Any:  # noqa: ANN401
        """Raise an error: there is nothing to call here."""
        raise BoxError(f"the box {self.__name__} belongs to its evaluator, and cannot be called in this process")


def chosen_box(fn: Callable[..., Any] | None, evaluator: Evaluator | None, state: object = None) -> Callable[..., Any]:
    """The box that was given: fn, or what stands for the box of an evaluator that has one."""
    description = evaluator.describe() if isinstance(evaluator, Evaluator) else None  # others are refused elsewhere
    if fn is None and description is None:
        raise ValueError(
            "fn must be a function, or None with an evaluator that has a box of its own, such as "
            "evaluators.Processes(n, factory)"
        )
    if fn is not None and description is not None:
        raise ValueError(f"fn must be None, since {evaluator!r} has a box of its own: leave out one of the two")
    if description is not None and state is not None:
        raise ValueError("state must be None: a box with memory is called in this process, so give it as fn")
    if description is not None:
        return ElsewhereBox(description)
    assert fn is not None
    return fn
