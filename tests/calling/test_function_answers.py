"""What becomes of a function's answer, what calls cost, and what is said when one fails."""

import re
import time

import numpy as np
import pytest
import torch
from torch import nn

from bondgrad import BoxError
from bondgrad.calling._answers import from_numpy
from bondgrad.calling._function import RowFunction
from bondgrad.calling._hints import ANNOTATE

X = torch.arange(12.0).view(4, 3)


def test_a_function_that_was_not_called_has_cost_nothing():
    function = RowFunction(torch.sin, None)
    assert (function.calls, function.evaluations, function.seconds, function.rounding) == (0, 0, 0.0, 0.0)


def test_calls_rows_and_time_are_counted():
    function, start = RowFunction(lambda x: x * 2, None), time.perf_counter()
    function(X)
    function(X[:1])
    assert (function.calls, function.evaluations) == (2, 5)
    assert 0 < function.seconds <= time.perf_counter() - start
    other = function.replaced(torch.sin, None)
    assert (other.calls, other.evaluations, other.seconds) == (2, 5, function.seconds)


def test_a_call_that_is_tried_with_both_kinds_of_arrays_counts_twice():
    function = RowFunction(lambda x: x.astype("float64"), None)
    function(X)
    assert (function.calls, function.evaluations, function.interfaces) == (2, 8, ("numpy",))
    function(X)
    assert (function.calls, function.evaluations) == (3, 12)


EPS = {torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float32: 2**-23, torch.float64: 2**-52}


@pytest.mark.parametrize("of_points", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "of_answer", [torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
def test_answers_have_at_least_the_precision_of_the_rows(of_points, of_answer):
    function = RowFunction(lambda x: x.to(of_answer), None)
    answer = function(torch.tensor([[0.0, 1.0]], dtype=of_points))
    assert answer.tolist() == [[0, 1]]
    assert answer.dtype == function.dtype == (torch.float64 if torch.float64 in (of_points, of_answer) else of_points)
    assert function.rounding == EPS.get(of_answer, 0.0)  # that of the answer itself


@pytest.mark.parametrize(
    "kind", ["float16", "float32", "float64", "longdouble", "int8", "int64", "uint16", "bool", ">f8"]
)
def test_arrays_of_every_kind(kind):
    array = np.array([[0, 1, 1]], dtype=kind)
    assert from_numpy(array).tolist() == [[0, 1, 1]]
    assert from_numpy(array[:, ::-1]).tolist() == [[1, 1, 0]]
    assert from_numpy(array).dtype == {
        "float16": torch.float16,
        "float32": torch.float32,
        "int8": torch.int8,
        "int64": torch.int64,
        "bool": torch.bool,
    }.get(kind, torch.float64)


def test_an_array_that_may_be_written_is_not_copied():
    array = np.zeros((2, 2))
    from_numpy(array)[0, 0] = 1
    assert array[0, 0] == 1
    array.flags.writeable = False
    from_numpy(array)[0, 0] = 2
    assert array[0, 0] == 1


def test_where_a_function_works():
    cpu, meta = torch.device("cpu"), torch.device("meta")
    assert RowFunction(np.sin, None).compute_device(meta) == cpu
    assert RowFunction(torch.sin, None).compute_device(meta) == meta
    assert RowFunction(nn.Linear(3, 2), None).compute_device(meta) == cpu
    assert RowFunction(nn.Linear(3, 2, device="meta"), None).compute_device(cpu) == meta
    assert RowFunction(nn.Tanh(), None).compute_device(meta) == meta


def test_a_seed_is_for_those_who_take_one():
    assert torch.equal(RowFunction(torch.sin, None)(X, seed=3), X.sin())
    assert torch.equal(RowFunction(lambda x, seed: x + seed, None)(X, seed=3), X + 3)
    assert torch.equal(RowFunction(lambda x, c, *, seed: x + c + seed, None)(X, X, seed=3), 2 * X + 3)
    assert torch.equal(RowFunction(lambda x, seed=1: x + seed, None)(X), X + 1)


def test_sequences_are_given_and_returned_as_such():
    function = RowFunction(lambda x: torch.cat((x, x[..., :1]), 2), None, time_features=3)
    answer = function(torch.arange(12.0).view(2, 6))
    assert answer.tolist() == [[0, 1, 2, 0, 3, 4, 5, 3], [6, 7, 8, 6, 9, 10, 11, 9]]
    assert function.out_features == 4


def test_a_state_stands_behind_the_rows_and_before_the_context():
    def fn(x, state, context):
        return x + context, {"b": state["b"] + 1, "a": context}

    function = RowFunction(fn, None, form={"a": 0, "b": 0})
    y, (a, b) = function.advance(X, torch.full((4, 1), 10.0), torch.zeros(4, 2), torch.ones(4, 2))
    assert torch.equal(y, X + 10)
    assert torch.equal(a, torch.full((4, 1), 10.0))
    assert torch.equal(b, torch.full((4, 2), 2.0))


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (lambda state: (state,), "of the form it was given"),
        (lambda state: 3.0, "float is neither a tensor nor an array"),
        (lambda state: state.sum(), r"one entry per row first, \[4, ...\], got \[\[\]\]"),
        (lambda state: state[:3], r"one entry per row first, \[4, ...\], got \[\[3, 2\]\]"),
    ],
)
def test_states_that_are_refused(state, says):
    function = RowFunction(lambda x, s: (x, state(s)), None, form=0)
    with pytest.raises(BoxError, match=says):
        function(X, torch.zeros(4, 2))


@pytest.mark.parametrize("answer", [lambda x: x, lambda x: (x,), lambda x: (x, x, x), lambda x: torch.stack((x, x))])
def test_a_function_with_a_state_returns_pairs(answer):
    with pytest.raises(BoxError, match=r"must return a pair \(y, state\), got (Tensor|tuple)"):
        RowFunction(lambda x, _: answer(x), None, form=0)(X, X)


def fails(*_):
    raise OSError("no power")


class Fails(nn.Module):
    def forward(self, x):
        fails()


@pytest.mark.parametrize(
    ("fn", "settings", "shape", "hint"),
    [
        (Fails(), {}, "[4, 3]", ""),
        (fails, {}, "[4, 3]", f" {ANNOTATE}"),
        (fails, {"time_features": 1}, "[4, 3, 1]", f" {ANNOTATE}"),
        (fails, {"form": 0}, "[4, 3]", f" {ANNOTATE} It is called as fn(x, state, *context)."),
    ],
)
def test_an_error_says_what_the_function_was_given(fn, settings, shape, hint):
    name = "Fails" if isinstance(fn, Fails) else "fails"
    expected = (
        f"the box {name} raised OSError on rows of shape {shape}, torch.float32: no power. Call it yourself on an "
    )
    with pytest.raises(BoxError, match=f"^{re.escape(expected + 'array of that shape to see why.' + hint)}$"):
        RowFunction(fn, None, **settings)(X, *([X] if "form" in settings else []))


@pytest.mark.parametrize(
    ("fn", "settings", "says"),
    [
        (lambda x: x[:3], {}, "row of inputs, [4, out_features], got shape [3, 3]. "),
        (lambda x: x[:, :0], {}, "row of inputs, [4, out_features], got shape [4, 0]. "),
        (lambda x: x[:, 0], {}, "row of inputs, [4, out_features], got shape [4] (add a dimension: y[..., None])."),
        (lambda x: x, {"out_features": 2}, "row of inputs, [4, 2], got shape [4, 3]. "),
        (lambda x: x[:, :1], {"time_features": 1}, "time step of inputs, [4, 3, out_features], got shape [4, 1, 1]."),
        (lambda x: x[:, :, 0], {"time_features": 1}, "[4, 3, out_features], got shape [4, 3] (add a dimension"),
    ],
)
def test_shapes_of_answers_that_are_refused(fn, settings, says):
    with pytest.raises(BoxError, match=re.escape(says)):
        RowFunction(fn, **({"out_features": None} | settings))(X)
