"""Calls of a box that fails: how often they are made again, which rows are at fault, and how large calls may be."""

import math

import pytest
import torch

from bondgrad.errors import BoxError
from bondgrad.measuring._fault_tolerant_caller import FaultTolerantCaller


class Box:
    """Answers with its points, in 0.1 s and 0.02 s a row; fails as it is told, and writes down the sizes of calls."""

    def __init__(self, fails=lambda call, rows: None):
        self.sizes, self.fails = [], fails

    def __call__(self, points, rows):
        self.sizes.append(len(points))
        error = self.fails(len(self.sizes), rows.tolist())
        if error is not None:
            raise error
        return points.clone(), 0.1 + 0.02 * len(points)


def failure(cause=ValueError):
    error = BoxError("it failed")
    error.__cause__ = cause()
    return error


def ask(caller, n):
    points = torch.arange(float(n)).view(n, 1).double()
    return points, caller.ask(points, torch.arange(n))


def caller_of(fails=lambda call, rows: None, max_rows=None):
    box = Box(fails)
    return box, FaultTolerantCaller(box, torch.full((2, 1), 7.0, dtype=torch.float64), max_rows)


def test_calls_have_at_most_512_rows_or_as_many_as_is_said():
    box, caller = caller_of()
    points, y = ask(caller, 1030)
    assert torch.equal(y, points)
    assert box.sizes == [512, 512, 6]
    box, caller = caller_of(max_rows=100)
    ask(caller, 250)
    assert box.sizes == [100, 100, 50]


def test_the_time_of_calls_and_of_rows():
    _, caller = caller_of()
    rows = torch.arange(20)
    points = rows.double().view(20, 1)
    assert caller.time(points[:4], rows[:4])
    assert (caller.seconds_per_call, caller.seconds_per_row) == pytest.approx((0.18, 0))
    assert caller.time(points[:14], rows[:14])
    assert (caller.seconds_per_call, caller.seconds_per_row) == pytest.approx((0.1, 0.02))
    assert caller.time(points, rows)
    assert caller.times == {4: [pytest.approx(0.18)], 14: [pytest.approx(0.38)], 20: [pytest.approx(0.5)]}


@pytest.mark.parametrize(
    ("call", "row", "rows"),
    [(0.0, 0.0, 512), (0.2, 0.01, 80), (2.0, 0.01, 200), (0.2, 0.8 / 512, 512), (0.2, 5.0, 1)],
)
def test_a_call_takes_a_second_or_twice_what_it_takes_anyway(call, row, rows):
    _, caller = caller_of()
    caller.seconds_per_call, caller.seconds_per_row = call, row
    assert caller.call_rows == rows


def test_rows_at_fault_are_found_and_counted_by_error():
    box, caller = caller_of(lambda _, rows: failure(OverflowError) if 5 in rows else None)
    points, y = ask(caller, 8)
    assert torch.equal(y.isnan(), points == 5)
    # All rows, two halves, a quarter, the row beside, the row at fault, again since it may be chance, the last quarter.
    assert box.sizes == [8, 4, 4, 2, 1, 1, 1, 2]
    assert caller.errors == {"OverflowError": 1}
    assert (caller.refused, caller.largest, caller.random_failures) == (None, 512, 0)
    _, caller = caller_of(lambda _, rows: BoxError("no cause") if 5 in rows else None)
    ask(caller, 8)
    assert caller.errors == {"a wrong shape": 1}


def test_where_all_rows_fail_there_are_no_outputs_to_be_not_finite():
    _, caller = caller_of(lambda _call, _rows: failure())
    assert ask(caller, 2)[1].shape == (2, 0)


@pytest.mark.parametrize("error", [failure, MemoryError])
def test_calls_that_are_too_large_are_not_made_again(error):
    box, caller = caller_of(lambda _, rows: error() if len(rows) > 5 else None)
    points, y = ask(caller, 16)
    assert torch.equal(y, points)
    assert (caller.refused, caller.largest) == (8, 4)
    box.sizes.clear()
    ask(caller, 16)
    assert box.sizes == [4, 4, 4, 4]


def test_a_single_row_for_which_memory_does_not_reach_is_an_error():
    _, caller = caller_of(lambda _call, _rows: MemoryError())
    with pytest.raises(MemoryError):
        ask(caller, 4)


def test_a_call_that_fails_once_was_unlucky():
    box, caller = caller_of(lambda call, _rows: failure() if call == 1 else None)
    points, y = ask(caller, 4)
    assert torch.equal(y, points)
    assert box.sizes == [4, 2, 2, 4]  # the halves answer, and so does the whole
    assert (caller.random_failures, caller.refused, caller.largest) == (1, None, 512)


def test_calls_are_made_up_to_seven_times_once_some_failed_by_chance():
    for failing, answers in ((6, True), (7, False)):
        box, caller = caller_of(lambda call, _rows, failing=failing: failure() if call <= failing else None)
        caller.count_random_failures(1)
        y = caller.call(torch.ones(3, 1), torch.arange(3))
        assert isinstance(y, torch.Tensor) == answers
        assert len(box.sizes) == 7
        assert caller.random_failures == (7 if answers else 1)


def test_answers_that_are_not_finite_are_asked_for_again_where_failures_are_chance():
    asked = 0

    def send(points, _rows):
        nonlocal asked
        asked += 1
        return points.where(torch.tensor(asked >= 4), math.nan), 0.0

    caller = FaultTolerantCaller(send, torch.zeros(1, 1), None)
    assert ask(caller, 2)[1].isnan().all()
    assert asked == 1
    caller.count_random_failures(1)
    points, y = ask(caller, 2)
    assert torch.equal(y, points)
    assert asked == 4


def test_what_was_taken_for_a_limit_is_none_once_failures_are_chance():
    _, caller = caller_of(lambda _, rows: failure() if len(rows) > 5 else None)
    ask(caller, 16)
    assert caller.largest == 4
    caller.count_random_failures(0)
    assert caller.largest == 4
    caller.count_random_failures(2)
    assert (caller.largest, caller.refused, caller.random_failures) == (512, None, 2)
    caller.largest = 4
    caller.count_random_failures(1)
    assert caller.largest == 4  # it is known by now that failures are chance


def test_calls_that_are_too_small_for_the_box_are_filled_up():
    box, caller = caller_of()
    caller.smallest = 3
    points, y = ask(caller, 1)
    assert torch.equal(y, points)
    assert box.sizes == [3]


def test_other_errors_are_raised():
    _, caller = caller_of(lambda _call, _rows: KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        ask(caller, 4)
    _, caller = caller_of(lambda _call, _rows: ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        ask(caller, 4)
