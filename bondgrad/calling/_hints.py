"""What is said of an error that a box raised: how it was called, and how to call it otherwise."""

import inspect
import re
from collections.abc import Callable
from typing import Any

from bondgrad.calling._signature import parameters

ANNOTATE = "If it expects numpy arrays, annotate its first parameter, x: np.ndarray; if tensors, x: torch.Tensor."
ONE_ROW = (
    "If it is a function of one sample, give it as bondgrad.per_row(fn); if it takes rows one at a time, say "
    "evaluator=bondgrad.evaluators.Local(max_rows=1)."
)
ONE_NUMBER = "per_row gives it an array [d]: if it takes a number, write per_row(lambda x: f(x[0]))."
# What Python, numpy and torch say where a number is expected and an array comes.
SAMPLE_WORDS = (
    "ambiguous",
    "can be converted to Python scalars",
    "cannot be converted to Scalar",
    "values to unpack",
    "must be real number, not",
)
# What numpy and torch say to x["name"], and to x.get("name") and the like.
NAME_WORDS = ("only integers, slices", "invalid data type 'str'", "too many indices for tensor")
DICT_METHODS = re.compile("has no attribute '(get|items|keys|pop|update|values)'")
NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
SILENT = "it does not say why"  # in place of an empty message


def call_hint(fn: Callable[..., Any], error: BaseException, arguments: int, sample: bool = False) -> str | None:
    """What to write, where an error says that fn takes dictionaries or keywords; None: it does not say so.

    Args:
        fn: The function.
        error: What it raised.
        arguments: The number of positional arguments it was given.
        sample: Whether it was given one sample at a time.
    """
    column = "x[{}]" if sample else "x[:, {}]"
    if isinstance(error, TypeError) and not _binds(fn, arguments):
        wanted = [p for p in parameters(fn).values() if p.default is p.empty and p.kind in NAMED and p.name != "seed"]
        names = ["" if p.kind is p.POSITIONAL_ONLY else f"{p.name}=" for p in wanted] or ["a=", "b="]
        columns = ", ".join(name + column.format(i) for i, name in enumerate(names))
        return f"It is called as fn(x, *context) with all inputs in x: write lambda x: fn({columns})."
    by_name = isinstance(error, (TypeError, IndexError)) and any(words in str(error) for words in NAME_WORDS)
    if by_name or (isinstance(error, AttributeError) and DICT_METHODS.search(str(error))):
        columns = f"'a': {column.format(0)}, 'b': {column.format(1)}"
        return f"If it takes a dict, name the inputs: write lambda x: fn({{{columns}}})."
    return None


def takes_samples(error: BaseException) -> bool:
    """Whether an error looks like one of a function of one sample that was given rows."""
    silent = isinstance(error, AssertionError) and not str(error)
    return silent or any(words in str(error) for words in SAMPLE_WORDS)


def _binds(fn: Callable[..., Any], arguments: int) -> bool:
    """Whether fn can be called with that many positional arguments, as far as it is known."""
    try:
        signature = inspect.signature(fn)
    except (ValueError, TypeError):
        return True
    named = {"seed": 0} if "seed" in signature.parameters else {}
    for options in ({}, named):
        try:
            signature.bind(*[None] * arguments, **options)
        except TypeError:
            continue
        return True
    return False
