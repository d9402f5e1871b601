"""What a box may return besides tensors and arrays, and what is said of all else."""

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bondgrad.errors import shortened

ONE_COLUMN_EACH = "np.stack(y, axis=1) (of tensors: torch.stack(y, 1)) if each is one output of all rows"


class UnusableAnswer(Exception):  # noqa: N818 - a part of the message of an error
    """Says what is wrong with the answer of a box, and what to return instead."""


def from_numpy(array: np.ndarray) -> Tensor:
    """The array as a tensor of the same dtype; of float64, if that is unsigned, long double or byte-swapped."""
    known = array.dtype.isnative and array.dtype.kind in "fib" and array.dtype != np.longdouble
    return torch.from_numpy(np.require(array, array.dtype if known else np.float64, ["C", "W"]))


def answer_tensor(answer: object) -> Tensor:
    """The answer of a box as a tensor, if it is a tensor, an array, or a list or tuple of numbers.

    Raises `UnusableAnswer` for anything else.
    """
    if isinstance(answer, (list, tuple)):
        answer = _array(answer)
    if isinstance(answer, np.ndarray) and answer.dtype.kind in "fiub":
        answer = from_numpy(answer)
    if isinstance(answer, np.ndarray) and answer.dtype.kind == "c":
        raise UnusableAnswer("returned complex numbers; return real and imaginary parts as two outputs")
    if not isinstance(answer, Tensor):
        raise UnusableAnswer(
            f"must return a real torch tensor or numpy array, or a list of numbers, got {_kind(answer)}"
        )
    return answer


def output_tensor(output: object) -> Tensor:
    """The output of a function of one sample as a tensor: [d_out], also if it is a number; [T, d_out] of a sequence."""
    if isinstance(output, (numbers.Real, np.generic)):
        output = np.asarray(output)
    if isinstance(output, np.ndarray) and output.dtype.kind in "fiub":
        return from_numpy(output if output.ndim > 0 else output[None])
    t = answer_tensor(output)
    return t.detach() if t.ndim > 0 else t.detach()[None]


def stacked(outputs: list[Any], rows: list[int]) -> Tensor:
    """The outputs of a function at some rows, put together: [k, d_out], or [k, T, d_out] of sequences."""
    tensors = []
    for row, output in zip(rows, outputs, strict=True):
        try:
            tensors.append(output_tensor(output))
        except UnusableAnswer as error:
            raise UnusableAnswer(f"{error} (for row {row})") from None
    shapes = [tuple(t.shape) for t in tensors]
    if len(set(shapes)) > 1:
        other = next(i for i, shape in enumerate(shapes) if shape != shapes[0])
        raise UnusableAnswer(
            f"must return equally many numbers for every row, got shape {list(shapes[0])} for row {rows[0]} and "
            f"{list(shapes[other])} for row {rows[other]}"
        )
    return torch.stack(tensors)


def _array(values: Sequence[Any]) -> np.ndarray:
    """The numbers of a nested list or tuple."""
    kind = type(values).__name__
    inner = [v for v in values if isinstance(v, (Tensor, np.ndarray)) and v.ndim > 0]
    if inner:
        raise UnusableAnswer(
            f"must return one array, got a {kind} of {len(values)} arrays, the first of shape {list(inner[0].shape)}: "
            f"return {ONE_COLUMN_EACH}, or with axis=0 if each has the outputs of one row"
        )
    plain = _plain(values)
    try:
        array = np.array(plain)
    except ValueError:
        lengths = sorted({len(v) if isinstance(v, list) else 1 for v in plain})
        sizes = f", of {lengths[0]} to {lengths[-1]}" if len(lengths) > 1 else ""
        raise UnusableAnswer(
            f"must return equally many numbers for every row, got a {kind} of different lengths{sizes}"
        ) from None
    if array.dtype.kind not in "fiubc":
        odd = next((v for v in _leaves(plain) if not isinstance(v, (numbers.Number, np.generic))), None)
        instead = ": return NaN where there is no number" if odd is None else ""
        raise UnusableAnswer(f"must return numbers, got a {kind} with {shortened(repr(odd))} in it{instead}")
    return array


def _plain(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value.item() if isinstance(value, Tensor) and value.ndim == 0 else value


def _leaves(value: Any) -> list[Any]:  # noqa: ANN401
    return [leaf for v in value for leaf in _leaves(v)] if isinstance(value, list) else [value]


def _kind(answer: object) -> str:
    if isinstance(answer, np.ndarray):
        return f"an array of {answer.dtype}"
    if isinstance(answer, Mapping):
        keys = ", ".join(map(repr, answer))
        return (
            f"a {type(answer).__name__} with the keys {shortened(keys)}. Put its values side by side: write "
            "lambda x: np.stack([*fn(x).values()], axis=1), or in per_row lambda x: [*f(x).values()]"
        )
    return "None, as of a function without return" if answer is None else type(answer).__name__
