"""Rows for which no output came: which are asked again, how often, after which pause, and when that is an error."""

import contextlib
import math
import warnings

import pytest
import torch

from bondgrad import BlackBox, BoxError
from bondgrad.calling._function import RowFunction
from bondgrad.evaluators import Answer, Call, Driver, Evaluator, Local, evaluate_rows


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    """The pauses that were made, without those, and without their random part."""
    made = []
    monkeypatch.setattr("time.sleep", made.append)
    monkeypatch.setattr("bondgrad.evaluators._driver.JITTER.uniform", lambda low, high: (low + high) / 2)
    return made


class EndlessError(BaseException):
    """Ends a test that would run for ever."""


class Faulty:
    """Raises where one of its rows [N, 1] is among the bad ones, and keeps the rows of all calls."""

    def __init__(self, *bad, error=ValueError):
        self.bad, self.error, self.calls = bad, error, []

    def __call__(self, x: torch.Tensor):
        self.calls.append(x[:, 0].tolist())
        if len(self.calls) > 1000:
            raise EndlessError
        if any(row in self.bad for row in self.calls[-1]):
            raise self.error("out of range")
        return 2 * x

    @property
    def sizes(self):
        return [len(call) for call in self.calls]


class Recording(Evaluator):
    """Keeps the requests, and answers them by a function of them."""

    def __init__(self, answer, **limits):
        super().__init__(**limits)
        self.answer, self.requests = answer, []

    def evaluate(self, request):
        self.requests.append(request)
        if len(self.requests) > 1000:
            raise EndlessError
        return self.answer(request)


def numbers(n):
    return torch.arange(float(n))[:, None]


def ask(fn, n, evaluator=None, **arguments):
    return Driver(evaluator or Local()).ask(RowFunction(fn, None), numbers(n), **arguments)


# ---- division


@pytest.mark.parametrize("retries", [0, 1, 2])
def test_a_call_that_raises_is_divided_until_the_rows_at_fault_are_alone(retries):
    fn = Faulty(5, 41)
    with pytest.warns(UserWarning, match="2 remained without an output"):
        y, ok = ask(fn, 64, Local(retries=retries))
    assert (~ok).nonzero().flatten().tolist() == [5, 41]
    assert y[[5, 41]].isnan().all()
    assert torch.equal(y[ok], 2 * numbers(64)[ok])
    # A few rows first, which are answered; of calls of 8 then, two fail; what fails alone is asked again.
    assert fn.sizes == [64] + [1] * 8 + [8] * 7 + [1] * 16 + [1, 1] * retries
    assert fn.calls.count([5.0]) == fn.calls.count([41.0]) == 1 + retries


def test_rows_that_were_answered_are_not_asked_again():
    fn = Faulty(3)
    with pytest.warns(UserWarning, match="since the box Faulty raised ValueError"):
        ask(fn, 12, Local(max_rows=4, retries=1))
    assert fn.calls == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [0], [1], [2], [3], [3]]


def test_a_failure_by_chance_costs_nothing_but_a_call():
    fn = Faulty(7)

    def once(x: torch.Tensor):
        return 2 * x if fn.calls else fn(x)

    with pytest.warns(UserWarning, match="16 rows were asked again, and 0 remained without an output"):
        y, ok = ask(once, 16)
    assert ok is None
    assert torch.equal(y, 2 * numbers(16))


def test_requests_of_all_attempts_have_one_number():
    fn = Faulty(2)
    function = RowFunction(fn, None)
    driver = Driver(Recording(evaluate_rows, retries=1))
    with pytest.warns(UserWarning, match="asked again"):
        driver.ask(function, numbers(4))
    driver.ask(function, numbers(4))
    asked = [(r.number, r.attempt, r.max_rows, len(r.points)) for r in driver.evaluator.requests]
    assert asked == [(n, *rest) for n in (0, 1) for rest in ((0, None, 4), (1, 1, 4), (2, 1, 1))]
    assert driver.record.evaluations == 2 * (4 + 4 + 1)
    assert driver.record.retried == 2 * (4 + 1)


def test_contexts_go_with_their_rows():
    seen = []

    def fn(x: torch.Tensor, context):
        seen.append((x[:, 0] * 10 == context[:, 0]).all())
        if (x == 3).any():
            raise ValueError
        return x

    with pytest.warns(UserWarning, match="1 remained"):
        Driver(Local()).ask(RowFunction(fn, None), numbers(6), (10 * numbers(6),))
    assert len(seen) > 6
    assert all(seen)


# ---- retries


def test_rows_that_are_not_finite_are_asked_again_without_a_warning():
    left = {3: 1, 5: 2, 6: 3}  # how often an output is not finite

    def fn(x: torch.Tensor):
        y = x.clone()
        for i, row in enumerate(x[:, 0].tolist()):
            if left.get(row, 0) > 0:
                left[row] -= 1
                y[i] = math.inf
        return y

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y, ok = ask(fn, 8)
    assert ok.tolist() == [True] * 6 + [False, True]
    assert y[ok].flatten().tolist() == [0, 1, 2, 3, 4, 5, 7]


def test_without_retries_outputs_that_are_not_finite_are_left_as_they_are():
    calls = []

    def fn(x: torch.Tensor):
        calls.append(len(x))
        return torch.where(x == 2, math.inf, x)

    y, ok = ask(fn, 4, Local(retries=0))
    assert ok.tolist() == [True, True, False, True]
    assert y[2].isposinf()
    assert calls == [4]


def test_large_outputs_are_no_failures():
    y, ok = ask(lambda x: x * 0 + 3e38, 4)  # the sum of which is infinite
    assert ok is None
    assert torch.isfinite(y).all()


def test_a_row_without_an_output_is_nan_whatever_the_evaluator_has_there():
    def losing(request):
        return Answer(request.points, request.points[:, 0] != 2)

    y, ok = ask(torch.sin, 4, Recording(losing))
    assert ok.tolist() == [True, True, False, True]
    assert y[2].isnan()


def test_pauses_grow_and_the_first_retry_comes_at_once(pauses):
    with pytest.warns(UserWarning, match="asked again"):
        ask(Faulty(1), 2, Local(retries=5))
    assert pauses == [0.05, 0.1, 0.2, 0.4]


def test_without_a_limit_the_box_is_waited_for(pauses):
    calls = []

    def fn(x: torch.Tensor):
        if len(pauses) < 15:
            calls.append(len(x))
            raise OSError("the cable is out")
        return x

    with pytest.warns(UserWarning, match="the cable is out") as caught:
        y, ok = ask(fn, 100, Local(retries=None))
    assert ok is None
    assert torch.equal(y, numbers(100))
    assert pauses == [min(0.05 * 2**i, 30.0) for i in range(15)]
    assert [("is waited for" in str(w.message), "asked again" in str(w.message)) for w in caught] == [
        (True, False),
        (False, True),
    ]
    assert calls == [100] + [1] * 8 * 16  # only a few rows until there is an answer


def test_without_a_limit_outputs_that_are_not_finite_are_not_waited_for():
    calls = []

    def fn(x: torch.Tensor):
        calls.append(len(x))
        return torch.where(x == 2, math.nan, x)

    assert ask(fn, 4, Local(retries=None)).ok.tolist() == [True, True, False, True]
    assert calls == [4, 1, 1]


def test_nor_after_errors_that_are_over():
    """A row that the box answers, but not with a number, is not to be waited for."""
    fn = Faulty(error=OSError)

    def away_at_first(x: torch.Tensor):
        fn.bad = (0.0,) if len(fn.calls) < 3 else ()
        return torch.where(x == 2, math.nan, fn(x))

    with pytest.warns(UserWarning, match="asked again"):
        assert ask(away_at_first, 4, Local(retries=None)).ok.tolist() == [True, True, False, True]


# ---- errors


@pytest.mark.parametrize("error", [TypeError, NameError, AttributeError])
def test_mistakes_are_raised_at_once(error):
    fn = Faulty(2, error=error)
    with pytest.raises(BoxError, match="out of range"):
        ask(fn, 8)
    assert fn.sizes == [8]


def test_answers_of_a_wrong_form_are_raised_at_once():
    calls = []

    def fn(x: torch.Tensor):
        calls.append(len(x))
        return x[1:]

    with pytest.raises(BoxError, match="one row of outputs per row"):
        ask(fn, 8)
    assert calls == [8]


@pytest.mark.parametrize("pairs", [False, True])
def test_a_box_that_answers_nothing_is_an_error_when_every_row_was_asked_alone_once(pairs):
    fn = Faulty(*range(900))
    with pytest.raises(BoxError, match="out of range") as caught:
        ask(fn, 900, pairs=pairs)
    assert fn.sizes == [900] + [1] * 900
    assert {row for call in fn.calls[1:] for row in call} == set(range(900))
    assert "None of 900 rows got an output" in caught.value.__notes__[0]
    assert "ValueError on rows of shape [900, 1]" in str(caught.value)


@pytest.mark.parametrize("max_rows", [None, 1, 7])
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("retries", [0, 2])
def test_rows_that_a_few_others_do_not_speak_for_are_found_whatever_the_size_of_calls(max_rows, pairs, retries):
    answered = [3, 4, 5, 6]
    fn = Faulty(*set(range(64)) - set(answered))
    with pytest.warns(UserWarning, match="60 (remained without an|rows got no) output"):
        y, ok = ask(fn, 64, Local(max_rows=max_rows, retries=retries), pairs=pairs)
    assert ok.nonzero().flatten().tolist() == answered
    assert torch.equal(y[ok], 2 * numbers(64)[ok])
    assert all([row] in fn.calls for row in fn.bad)


@pytest.mark.parametrize("pairs", [False, True])
def test_an_evaluator_that_fails_as_a_whole_is_an_error_after_its_retries(pairs):
    def dead(request):
        raise BoxError("the line is dead") from ConnectionError()

    evaluator = Recording(dead)
    with pytest.raises(BoxError, match="the line is dead"):
        ask(torch.sin, 64, evaluator, pairs=pairs)
    assert len(evaluator.requests) <= 6


def test_errors_are_counted_by_kind_and_told_once_of_each():
    fn = Faulty(1)
    driver, function = Driver(Local(retries=0)), RowFunction(fn, None)
    for error, told in ((ValueError, True), (ValueError, False), (OSError, True), (KeyError, True), (OSError, False)):
        fn.error = error
        expected = pytest.warns(UserWarning, match=error.__name__) if told else contextlib.nullcontext()
        with expected:
            driver.ask(function, numbers(2))
    assert driver.record.errors == {"ValueError": 2 * 3, "OSError": 2 * 3, "KeyError": 3}
    assert driver.record.tracebacks.keys() == driver.record.errors.keys()
    assert "ValueError: out of range" in driver.record.tracebacks["ValueError"]


def test_the_statistics_of_a_layer_have_errors_and_retries():
    fn = Faulty(3)
    layer = BlackBox(fn, 1)
    again, lost = "4 rows were asked again, and 1 remained", "1 row got no finite output"
    with pytest.warns(UserWarning, match=lost), pytest.warns(UserWarning, match=again):
        layer(numbers(4))
    stats = layer.stats
    assert (stats.evaluations, stats.retried, stats.failures) == (4 + 4 + 2, 4 + 2, 1)
    assert stats.errors == {"ValueError": 4 + 1 + 2}
    assert [(w.worker, w.rows, w.failures) for w in stats.workers] == [(0, 10, 7)]


def test_calls_that_an_evaluator_reports_are_what_is_counted():
    def answer(request):
        return Answer(request.points, None, (Call(0, 3, 1, 5.0, 0.3), Call(3, 1, 2, 5.0, 0.1)))

    driver = Driver(Recording(answer))
    driver.ask(RowFunction(torch.sin, None), numbers(4))
    assert [(w.worker, w.rows) for w in driver.record.workers()] == [(1, 3), (2, 1)]
    assert driver.record.workers()[0].latency == pytest.approx((0.1, 0.1, 0.1))


def test_a_box_of_one_row_at_a_time_is_told_by_its_failures():
    def fn(x: torch.Tensor):
        (row,) = x  # which takes one
        return row.sin()[None]

    with pytest.warns(UserWarning, match="If the box takes one row at a time, give the evaluator max_rows=1"):
        y, ok = Driver(Local()).ask(RowFunction(fn, None), torch.ones(5, 2))
    assert ok is None
    assert torch.equal(y, torch.ones(5, 2).sin())


@pytest.mark.parametrize(
    ("bad", "retries", "told"),
    [
        ((1,), 1, "^1 row was asked again, and 1 remained without an output, since"),
        ((1, 2), 1, "^2 rows were asked again, and 2 remained without an output, since"),
        ((1,), 0, "^1 row got no output, since"),
        ((1, 2), 0, "^2 rows got no output, since"),
    ],
)
def test_what_is_said_of_rows_without_an_output(bad, retries, told):
    driver = Driver(Local(retries=retries, max_rows=1))
    with pytest.warns(UserWarning, match=told):
        driver.ask(RowFunction(Faulty(*bad), None), numbers(4))
