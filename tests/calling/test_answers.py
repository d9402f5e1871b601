"""Lists and tuples as the outputs of a box, and what is said of answers that are neither these nor arrays."""

import numpy as np
import pytest
import torch

from bondgrad import BlackBox, BoxError
from bondgrad.calling._function import RowFunction
from bondgrad.policies import Fixed
from tests.helpers import close, gradient

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: [[2 * float(v) for v in row] for row in x],
        lambda x: tuple(tuple(2 * float(v) for v in row) for row in x),
        lambda x: [[2 * v for v in row] for row in np.asarray(x)],
        lambda x: [[2 * v for v in row] for row in torch.as_tensor(x)],
        lambda x: [(2 * float(row[0]), np.float32(2 * row[1]), torch.tensor(2.0) * float(row[2])) for row in x],
    ],
)
def test_lists_of_numbers_are_rows(fn):
    layer = BlackBox(fn, 3, policy=Fixed(1e-2))
    assert torch.allclose(layer(X), 2 * X)
    assert close(gradient(layer, X, torch.ones(4, 3)), torch.full((4, 3), 2.0))


def test_whole_numbers_and_truth_values_are_numbers():
    assert RowFunction(lambda x: [[1, True]] * len(x), None)(X).tolist() == [[1, 1]] * 4


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda x: [[1.0], [1.0, 2.0], [1.0], [1.0]], "equally many .* got a list of different lengths, of 1 to 2"),
        (lambda x: [[[1.0], [1.0, 2.0]]] * 4, "equally many numbers for every row, got a list of different lengths"),
        (lambda x: [1.0] * 4, r"got shape \[4\] \(return \[\[y0\], \[y1\], ...\]\)"),
        (
            lambda x: [[None]] * 4,
            "must return numbers, got a list with None in it: return NaN where there is no number.$",
        ),
        (lambda x: (("on",),) * 4, "must return numbers, got a tuple with 'on' in it"),
        (lambda x: [[1j]] * 4, "complex numbers; return real and imaginary parts"),
        (lambda x: [torch.ones(4), torch.ones(4)], r"a list of 2 arrays, the first of shape \[4\]: return np.stack"),
        (lambda x: (np.ones((4, 2)), {}), r"a tuple of 2 arrays, the first of shape \[4, 2\]"),
        (
            lambda x: {"p": x, "q": x},
            r"the keys 'p', 'q'.*write lambda x: np.stack\(\[\*fn\(x\).values\(\)\], axis=1\)",
        ),
        (lambda x: 1.0, "a list of numbers, got float. .*give it as bondgrad.per_row"),
        (lambda x: None, "a list of numbers, got None, as of a function without return.$"),
        (lambda x: np.array([["a"]] * 4), "got an array of <U1"),
        (lambda x: x.sum(0), r"got shape \[3\].*give it as bondgrad.per_row"),
        (lambda x: x[:, 0], r"\(add a dimension: y\[..., None\]\)\.$"),
    ],
)
def test_what_is_refused_and_what_to_return_instead(answer, says):
    with pytest.raises(BoxError, match=says):
        BlackBox(answer, 3)(X)


def test_as_many_rows_as_inputs_may_hide_a_function_of_one_sample():
    with pytest.raises(BoxError, match=r"\(add a dimension: y\[..., None\]\).*give it as bondgrad.per_row"):
        BlackBox(lambda x: x.sum(0), 3)(X[:3])
