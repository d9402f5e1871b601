"""Limits of an evaluator: on all evaluations of a layer, and on those in a second."""

import pytest
import torch

from bondgrad import BlackBox, BoxError
from bondgrad.calling._function import RowFunction
from bondgrad.errors import EvaluationLimitError
from bondgrad.evaluators import Driver, Local, Threads
from bondgrad.evaluators._pace import Pace
from bondgrad.policies import Fixed
from tests.evaluators.test_retries import Faulty, ask, numbers
from tests.helpers import gradient


def test_the_evaluation_beyond_the_limit_is_not_made():
    fn = Faulty()
    driver, function = Driver(Local(max_evaluations=10)), RowFunction(fn, None)
    driver.ask(function, numbers(6))
    with pytest.raises(EvaluationLimitError, match="the next request has 5 rows, and 6 of max_evaluations=10"):
        driver.ask(function, numbers(5))
    assert fn.sizes == [6]
    driver.ask(function, numbers(4))
    assert fn.sizes == [6, 4]


def test_rows_that_are_asked_again_count_for_the_limit():
    fn = Faulty(1)
    with pytest.raises(EvaluationLimitError, match="the next request has 1 rows, and 5 of max_evaluations=5"):
        ask(fn, 2, Local(max_evaluations=5, retries=5))
    assert fn.calls == [[0, 1], [0], [1], [1]]


def test_rows_that_were_evaluated_before_memory_ran_out_count_for_the_limit():
    evaluated = []

    def fn(x: torch.Tensor):
        evaluated.append(len(x))
        if len(evaluated) == 32:
            raise MemoryError
        return x

    driver = Driver(Local(max_rows=2, max_evaluations=100))
    with pytest.warns(UserWarning, match="out of memory"), pytest.raises(EvaluationLimitError, match="and 64 of max"):
        driver.run(lambda: driver.ask(RowFunction(fn, None), numbers(70)))
    assert sum(evaluated) == driver.record.evaluations == 64
    assert driver.record.errors == {"MemoryError": 2}


@pytest.mark.parametrize("evaluator", [Local(max_rows=1), Threads(1, max_rows=1)])
@pytest.mark.parametrize("error", [TypeError, KeyboardInterrupt, SystemExit])
def test_rows_that_were_evaluated_before_the_training_ended_count(evaluator, error):
    fn = Faulty(5, error=error)
    layer = BlackBox(fn, 1, evaluator=evaluator)
    with pytest.raises((BoxError, error)):
        layer(numbers(8))
    assert len(fn.calls) == layer.stats.evaluations == layer.driver.record.evaluations == 6
    assert [worker.rows for worker in layer.stats.workers] == [6]


@pytest.mark.parametrize("policy", ["calibrated", Fixed(1e-2)])
def test_a_layer_ends_at_its_limit(policy):
    fn = Faulty()
    layer = BlackBox(fn, 1, policy=policy, evaluator=Local(max_evaluations=100), seed=0)
    with pytest.raises(EvaluationLimitError, match="max_evaluations=100"):
        for _ in range(100):
            gradient(layer, torch.randn(8, 1), torch.ones(8, 1))
    assert 50 < sum(fn.sizes) <= 100


@pytest.mark.filterwarnings("ignore:.*got no .*output")
@pytest.mark.parametrize("limit", [None, 136, 135, 100, 64])
def test_parts_of_a_call_that_a_box_with_a_state_is_given_again_count(limit):
    fn = Faulty(5, error=RuntimeError)

    def stateful(x, state):
        return fn(x), state + 1

    start = torch.zeros(1, 1)
    layer = BlackBox(stateful, 1, 1, state=start, evaluator=Local(max_evaluations=limit, retries=0))
    if limit is None or limit >= 136:
        layer(numbers(64))
        assert fn.sizes == [64] + 8 * [8] + 8 * [1]  # the call, its parts, and the rows of the part that raised
        assert layer.stats.retried == 72
    else:
        with pytest.raises(EvaluationLimitError, match=f"of max_evaluations={limit} evaluations are made"):
            layer(numbers(64))
        assert limit - 8 < sum(fn.sizes) <= limit
        assert layer.memory.get_extra_state()["train"] is None
        assert "EvaluationLimitError" not in layer.stats.errors
    assert layer.driver.record.evaluations == layer.stats.evaluations == sum(fn.sizes)
    assert layer.driver.record.under_way == 0


class Clock:
    """Passes only where something waits for it."""

    def __init__(self):
        self.now, self.starts = 0.0, []

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_no_more_evaluations_start_in_a_second_than_the_rate(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("time.monotonic", clock.monotonic)
    monkeypatch.setattr("time.sleep", clock.sleep)
    starts = []

    def fn(x: torch.Tensor):
        starts.append((round(clock.now, 6), len(x)))
        return x

    driver, function = Driver(Local(rate=100)), RowFunction(fn, None)
    driver.ask(function, numbers(35))
    driver.ask(function, numbers(4))
    assert starts == [(0.0, 10), (0.1, 10), (0.2, 10), (0.3, 5), (0.35, 4)]
    clock.now = 100.0  # time that was not used is not made up for
    starts.clear()
    driver.ask(function, numbers(20))
    assert starts == [(100.0, 10), (100.1, 10)]


@pytest.mark.parametrize(("rate", "rows"), [(0.5, 1), (19, 1), (20, 2), (1e6, 100_000)])
def test_a_call_has_a_tenth_of_the_evaluations_of_a_second(rate, rows):
    assert Pace(rate).call_rows == rows


def test_a_slow_rate_is_kept_to(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("time.monotonic", clock.monotonic)
    pace = Pace(0.5)
    assert [pace.delay(1) for _ in range(3)] == [0, 2, 4]
    clock.now = 5.0
    assert pace.delay(1) == 1
