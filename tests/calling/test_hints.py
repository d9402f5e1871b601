"""Errors of functions that take something else than rows: the message says what to write."""

import math

import numpy as np
import pytest
import torch

from bondgrad import BlackBox, BoxError
from bondgrad.calling._function import RowFunction
from bondgrad.calling._hints import ANNOTATE, ONE_ROW

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def by_keyword(*, volts, amps):
    return volts * amps


def by_position(a, b, c, gain=1.0):
    return a * b * c * gain


def positional_only(a, b, /):
    return a * b


def any_keywords(**columns):
    return columns["volts"]


def by_get(x: np.ndarray):
    return x.get("volts")


def by_items(x: torch.Tensor):
    return sum(value for _, value in x.items())


def by_name(x: np.ndarray):
    return x["volts"]


@pytest.mark.parametrize(
    ("fn", "write"),
    [
        (by_keyword, "lambda x: fn(volts=x[:, 0], amps=x[:, 1])."),
        (by_position, "lambda x: fn(a=x[:, 0], b=x[:, 1], c=x[:, 2])."),
        (positional_only, "lambda x: fn(x[:, 0], x[:, 1])."),
        (any_keywords, "lambda x: fn(a=x[:, 0], b=x[:, 1])."),
        (by_get, "lambda x: fn({'a': x[:, 0], 'b': x[:, 1]})."),
        (by_items, "lambda x: fn({'a': x[:, 0], 'b': x[:, 1]})."),
        (by_name, "lambda x: fn({'a': x[:, 0], 'b': x[:, 1]})."),
    ],
)
def test_functions_of_keywords_and_dictionaries(fn, write):
    with pytest.raises(BoxError) as caught:
        BlackBox(fn, 3)(X)
    assert str(caught.value).endswith(f"write {write}")


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
def test_dictionaries_in_torch():
    with pytest.raises(BoxError, match="If it takes a dict, name the inputs"):
        RowFunction(lambda x: x["volts"], None)(X)


def test_functions_with_a_seed_can_be_called():
    assert RowFunction(lambda x, seed: x + seed, None)(X, seed=1).shape == (4, 3)

    def wrong(x, seed):
        raise TypeError("of its own")

    with pytest.raises(BoxError) as caught:
        RowFunction(wrong, None)(X, seed=1)
    assert str(caught.value).endswith(f"of its own. Call it yourself on an array of that shape to see why. {ANNOTATE}")


def silent(x):
    if x.shape != (3,):
        raise AssertionError  # as `assert` does
    return x


def branches(x):
    return x if x[0] > 0 else -x


def unpacks(x):
    a, b = x
    return a * b


@pytest.mark.parametrize("fn", [silent, branches, unpacks, lambda x: math.sin(x[0]), lambda x: float(x[0]) * x])
@pytest.mark.parametrize("rows", [torch.Tensor, np.ndarray])
def test_functions_of_one_sample(fn, rows):
    fn = fn if fn is silent or rows is torch.Tensor else lambda x, f=fn: f(np.asarray(x))
    with pytest.raises(BoxError) as caught:
        RowFunction(fn, None)(X)
    assert str(caught.value).endswith(ONE_ROW)


def test_an_error_without_a_text_is_said_to_have_none():
    with pytest.raises(
        BoxError, match=r"raised AssertionError on rows of shape \[4, 3\], torch.float32: it does not say"
    ):
        RowFunction(silent, None)(X)


def test_an_error_that_both_kinds_of_arrays_meet_is_said_once():
    with pytest.raises(BoxError) as caught:
        RowFunction(unpacks, None)(X)
    assert str(caught.value).count("values to unpack") == 1
