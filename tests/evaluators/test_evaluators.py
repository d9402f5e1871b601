"""In which portions rows are evaluated."""

import warnings

import numpy as np
import pytest
import torch

from bondgrad import BlackBox, BoxError
from bondgrad.calling._function import RowFunction
from bondgrad.evaluators import Answer, Call, Driver, Local, Progress, Request
from bondgrad.policies import Fixed
from tests.helpers import gradient


class Counting:
    def __init__(self, limit=None, error=MemoryError):
        self.sizes, self.limit, self.error = [], limit, error

    def __call__(self, x: torch.Tensor):
        if self.limit is not None and len(x) > self.limit:
            raise self.error("CUDA out of memory") if self.error is not MemoryError else MemoryError
        self.sizes.append(len(x))
        return torch.sin(x)


def test_by_default_one_call_forward_and_one_backward():
    fn = Counting()
    gradient(BlackBox(fn, 5, policy="bond"), torch.randn(64, 5), torch.randn(64, 5))
    assert fn.sizes == [64, 640]


@pytest.mark.parametrize("max_rows", [1, 2, 3, 16, 100])
def test_max_rows_is_never_exceeded(max_rows):
    fn = Counting()
    layer = BlackBox(fn, 5, evaluator=Local(max_rows=max_rows), policy=Fixed(1e-2))
    x, gy = torch.randn(17, 5), torch.randn(17, 5)
    g = gradient(layer, x, gy)
    assert max(fn.sizes) <= max_rows
    assert sum(fn.sizes) == 17 + 17 * 10
    assert torch.allclose(g, gy * x.cos(), rtol=1e-2, atol=1e-4)


def test_the_two_signs_of_a_perturbation_are_next_to_each_other():
    asked = []

    def fn(x):
        asked.append(x.clone())
        return torch.sin(x)

    for estimator in ("central", "simultaneous"):
        asked.clear()
        x = torch.randn(4, 3)
        gradient(BlackBox(fn, 3, estimator=estimator, evaluator=Local(max_rows=5), policy="bond"), x, torch.ones(4, 3))
        points = torch.cat(asked[1:] if len(asked[0]) == 4 else asked)
        middle = points.view(-1, 2, 3).mean(1)
        assert all((middle[i] - x).abs().sum(1).min() < 1e-6 for i in range(len(middle)))


def test_a_gradient_at_500_inputs_stays_within_its_memory():
    driver = Driver(Local())
    rows = driver.portion(4 * (500 + 500), 128 * 1000, torch.device("cpu"))
    assert rows * 4 * 1000 <= 2 * 2**20
    fn = Counting()
    gradient(BlackBox(fn, 500, policy="bond"), torch.randn(128, 500), torch.randn(128, 500))
    assert max(fn.sizes) <= rows
    assert len(fn.sizes) == 1 + 256  # half of a row in each


def test_contexts_count_as_memory():
    sizes = []

    def fn(x, context):
        sizes.append(len(x) * context[0].numel() * 4)
        return torch.sin(x)

    layer = BlackBox(fn, 50, evaluator=Local(memory=2**20))
    gradient(layer, torch.randn(16, 50), torch.randn(16, 50), torch.zeros(16, 1000))
    assert max(sizes[1:]) <= 2**20


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError, RuntimeError])
def test_out_of_memory_halves_says_so_once_and_goes_on(error):
    fn = Counting(limit=20, error=error)
    layer = BlackBox(fn, 5, policy=Fixed(1e-2))
    x, gy = torch.randn(17, 5), torch.randn(17, 5)
    with pytest.warns(UserWarning, match="out of memory with 170 rows at a time: going on with at most 85") as caught:
        g = gradient(layer, x, gy)
    assert len(caught) == 1
    assert torch.allclose(g, gy * x.cos(), rtol=1e-2, atol=1e-4)
    fn.sizes.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = gradient(layer, x, gy)
    assert torch.allclose(g, again, rtol=1e-2, atol=1e-4)
    assert max(fn.sizes) <= 20


def test_out_of_memory_in_the_forward_pass():
    fn = Counting(limit=20)
    layer = BlackBox(fn, 5)
    x = torch.randn(100, 5)
    with pytest.warns(UserWarning, match="out of memory with 100 rows"):
        assert torch.equal(layer(x), torch.sin(x))


def test_out_of_memory_on_a_single_row():
    with pytest.raises(BoxError, match="single row"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        BlackBox(Counting(limit=0), 5)(torch.randn(4, 5))


def test_any_other_error_halves_nothing():
    calls = []

    def fn(x):
        calls.append(len(x))
        raise RuntimeError("the laser is off")

    layer = BlackBox(fn, 5, evaluator=Local(retries=0))
    with pytest.raises(BoxError, match="the laser is off"):
        layer(torch.randn(4, 5))
    assert calls == [4, 1, 1, 1, 1]  # single rows might be at fault
    assert layer.driver.max_rows is None


def test_a_width_that_changes_between_portions():
    def fn(x):
        return x[:, : len(x)]

    with pytest.raises(BoxError, match="width must not change"):
        BlackBox(fn, 5, evaluator=Local(max_rows=4))(torch.randn(7, 5))


def test_answers_of_double_precision_are_not_rounded():
    def fn(x: np.ndarray):
        return 1e6 + np.sin(x.astype(np.float64))  # in float32 the sine would be lost

    x = torch.randn(4, 3)
    g = gradient(BlackBox(fn, 3, policy=Fixed(1e-2)), x, torch.ones(4, 3))
    assert torch.allclose(g, x.cos(), rtol=1e-3, atol=1e-4)


def test_the_state_does_not_depend_on_portions_where_answers_are_of_double_precision():
    def fn(x: np.ndarray):
        return np.sin(x.astype(np.float64)) * np.exp(x.astype(np.float64))

    layers = [BlackBox(fn, 3, evaluator=Local(max_rows=rows), seed=0) for rows in (None, 7)]
    for x in torch.randn(3, 64, 3):
        a, b = (gradient(layer, x, torch.ones(64, 3)) for layer in layers)
        assert torch.equal(a, b)
    assert torch.equal(layers[0].policy_state.sums, layers[1].policy_state.sums)


def test_memory_of_a_request_on_a_cpu_and_on_an_accelerator():
    driver = Driver(Local())
    assert driver.portion(1, 10**12, torch.device("cpu")) == 2 * 2**20
    assert driver.portion(1, 10**12, torch.device("cuda")) == 256 * 2**20
    assert Driver(Local(memory=1000)).portion(30, 10**12, torch.device("cuda")) == 33
    assert Driver(Local(memory=1)).portion(30, 10**12, torch.device("cpu")) == 1
    assert Driver(Local(max_rows=5)).portion(1, 10**12, torch.device("cpu")) == 2 * 2**20  # which the evaluator cuts
    assert driver.portion(1, 7, torch.device("cpu")) == 7


@pytest.mark.parametrize(
    ("max_rows", "pairs", "sizes"),
    [(5, True, [4, 4, 4, 2]), (5, False, [5, 5, 4]), (1, True, [1] * 14), (None, True, [14]), (14, True, [14])],
)
def test_pairs_are_not_divided_among_calls_of_more_than_one_row(max_rows, pairs, sizes):
    fn, points = Counting(), torch.randn(14, 3)
    function = RowFunction(fn, None)
    driver = Driver(Local(max_rows), Progress(requests=3))
    outcome = driver.ask(function, points, pairs=pairs)
    assert torch.equal(outcome.y, points.sin())
    assert outcome.ok is None
    assert fn.sizes == sizes
    assert driver.progress.requests == 3 + 1
    assert Driver(Local()).progress.requests == 0


def test_a_portion_has_what_fits_into_the_memory_and_at_least_one_row():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert Driver(Local()).portion(2**10, 10**6, cpu) == 2**11
    assert Driver(Local()).portion(2**10, 10**6, gpu) == 2**18
    assert Driver(Local()).portion(2**10, 100, cpu) == 100
    assert Driver(Local()).portion(2**30, 100, cpu) == 1
    assert Driver(Local(memory=2**12)).portion(2**10, 100, gpu) == 4
    assert Driver(Local(max_rows=7)).portion(2**10, 100, cpu) == 100
    driver = Driver(Local())
    driver.most = 7  # since memory ran out
    assert driver.portion(2**10, 100, cpu) == driver.max_rows == 7
    driver.evaluator = Local(max_rows=5)
    assert driver.portion(2**10, 100, cpu) == 7
    assert driver.max_rows == 5


def test_memory_may_reach_for_one_row_at_a_time():
    fn = Counting(limit=1)
    x, gy = torch.randn(3, 2), torch.randn(3, 2)
    with pytest.warns(UserWarning, match="out of memory with 3 rows at a time: going on with at most 1"):
        g = gradient(BlackBox(fn, 2, policy=Fixed(1e-2)), x, gy)
    assert set(fn.sizes) == {1}
    assert torch.allclose(g, gy * x.cos(), rtol=1e-2, atol=1e-4)


def test_a_request_is_one_of_plain_rows_unless_it_says_otherwise():
    points = torch.zeros(2, 3)
    request = Request(torch.sin, points)
    assert request == (torch.sin, points, (), False, None, "base", 0, False, None, 0, 0, None, None)
    assert Answer(points)[1:] == (None, ())
    assert Call(2, 3) == (2, 3, 0, 0.0, 0.0, None)
