"""A sampler asks near typical rows, within its budget and the limits, whatever calls the box refuses."""

import math
import time

import pytest
import torch

from bondgrad.calling._function import RowFunction
from bondgrad.calling._inputs import Limits
from bondgrad.measuring._sampler import BudgetExceeded, Sampler


def sampler(fn, x=None, limits=(-math.inf, math.inf), budget=10_000, seconds=60.0, evaluator=None):
    x = torch.randn(20, 3) if x is None else x
    bounds = Limits(limits, x.shape[1])
    return Sampler(RowFunction(fn, None), x, torch.arange(len(x)), (), bounds, evaluator, budget, seconds)


def double(x: torch.Tensor):
    return 2 * x


def test_points_of_any_shape_near_rows():
    asked = sampler(double)
    points = torch.randn(4, 5, 2, 3, dtype=torch.float64)
    y = asked.ask(points, torch.arange(4))
    assert torch.equal(y, 2 * points.float().double())
    assert (asked.evaluations, asked.calls) == (40, 1)
    assert torch.equal(asked.ask_rows(torch.tensor([3, 3])), 2 * asked.x[[3, 3]])


def test_context_goes_with_its_row():
    x = torch.randn(5, 2)
    function = RowFunction(lambda x, c: x * c, None)
    context, limits = (torch.arange(5.0)[:, None],), Limits((-math.inf, math.inf), 2)
    asked = Sampler(function, x, torch.tensor([4, 2]), context, limits, None, 100, 60.0)
    y = asked.ask(torch.ones(2, 3, 2, dtype=torch.float64), torch.tensor([1, 0]))
    assert y[:, :, 0].tolist() == [[2, 2, 2], [4, 4, 4]]


def test_one_input_is_moved():
    asked = sampler(double)
    rows, inputs, values = torch.tensor([0, 7]), torch.tensor([2, 1]), torch.randn(2, 4, 2).double()
    y = asked.ask_moved(rows, inputs, values)
    assert y.shape == (2, 4, 2, 3)
    for m in range(2):
        expected = asked.x[rows[m]].repeat(8, 1)
        expected[:, inputs[m]] = values[m].flatten().float().double()
        assert torch.equal(y[m].flatten(0, 1), 2 * expected)


def test_both_sides_stay_within_the_limits():
    asked = sampler(double, torch.tensor([[0.0, 0.5], [1.0, 0.5]]), limits=(0, 1))
    ends, whole = asked.either_side(torch.tensor([0, 1]), torch.tensor([0, 0]), torch.tensor([[0.1, 0.4]] * 2).double())
    assert bool(((ends >= 0) & (ends <= 1)).all())
    assert whole.tolist() == [[True, False]] * 2  # a value at a limit is moved inwards, by no more than it needs
    assert ends[:, 0].diff(dim=1).flatten().tolist() == pytest.approx([0.2, 0.2])


def test_spread_of_rows_that_are_alike_fits_into_the_limits():
    assert sampler(double, torch.full((4, 1), 5.0)).spread.tolist() == [2.5]
    assert sampler(double, torch.full((4, 1), 5.0), limits=(4, 6)).spread.tolist() == [0.5]


def test_the_budget_is_not_exceeded():
    asked = sampler(double, budget=25)
    asked.ask_rows(torch.arange(20))
    with pytest.raises(BudgetExceeded, match="the 5 evaluations of the budget do not reach"):
        asked.ask_rows(torch.arange(6))
    assert asked.affordable_count(10, 2) == 2
    with pytest.raises(BudgetExceeded):
        asked.affordable_count(10, 6)
    assert asked.evaluations == 20


def test_the_time_is_not_exceeded():
    def slow(x: torch.Tensor):
        time.sleep(0.03)
        return x

    asked = sampler(slow, seconds=0.05)
    assert asked.time_rows(torch.arange(4))
    with pytest.raises(BudgetExceeded, match="calls that there is time for"):
        asked.require(1, calls=2)
    time.sleep(0.05)
    with pytest.raises(BudgetExceeded, match="in the time left"):
        asked.ask_rows(torch.arange(4))


def test_rows_at_fault_are_found_by_halving():
    def fn(x: torch.Tensor):
        if bool((x[:, 0] > 1).any()):
            raise OverflowError
        return x

    x = torch.zeros(20, 3)
    x[[3, 11], 0] = 2
    asked = sampler(fn, x)
    asked.ask_rows(torch.tensor([0]))
    y = asked.ask_rows(torch.arange(20))
    assert torch.isnan(y).all(1).nonzero().squeeze(1).tolist() == [3, 11]
    assert dict(asked.caller.errors) == {"OverflowError": 2}
    assert asked.caller.refused is None
    assert asked.caller.random_failures == 0


@pytest.mark.parametrize("error", [ValueError, MemoryError])
def test_calls_that_are_too_large_are_made_smaller(error):
    def fn(x: torch.Tensor):
        if len(x) > 6:
            raise error
        return x

    asked = sampler(fn)
    y = asked.ask_rows(torch.arange(20))
    assert torch.equal(y, asked.x)
    assert asked.caller.largest <= 6 < asked.caller.refused
    calls = asked.calls
    asked.ask_rows(torch.arange(20))
    assert asked.calls - calls == math.ceil(20 / asked.caller.largest)


def test_calls_that_fail_by_chance_are_made_again():
    calls = 0

    def fn(x: torch.Tensor):
        nonlocal calls
        calls += 1
        if calls % 4 == 2:
            raise OSError
        return x

    asked = sampler(fn)
    for _ in range(10):
        assert torch.equal(asked.ask_rows(torch.arange(20)), asked.x)
    assert asked.caller.random_failures > 0
    assert asked.caller.largest == 512


def test_what_there_is_time_for_goes_by_the_time_of_calls_and_rows():
    asked = sampler(double, budget=10_000, seconds=100.5)
    assert (asked.affordable, asked.affordable_calls) == (10_000, 10_000)
    asked.caller.seconds_per_row = 1.0
    asked.caller.largest = 4
    assert (asked.caller.call_rows, asked.affordable, asked.affordable_calls) == (1, 100, 100)
    asked.caller.seconds_per_call, asked.caller.seconds_per_row = 10.0, 2.5
    assert asked.caller.call_rows == 4
    assert asked.affordable == 20  # four rows in 20 seconds
    assert asked.affordable_calls == 8  # one row in 12.5
    asked.require(20, calls=8)
    with pytest.raises(BudgetExceeded, match="the 20 evaluations in the time left"):
        asked.require(21)
    with pytest.raises(BudgetExceeded, match="the 8 calls that there is time for"):
        asked.require(1, calls=9)


def test_a_share_of_what_is_left_is_divided_among_things():
    asked = sampler(double, budget=100)
    assert asked.affordable_count(10, 7) == 10
    assert asked.affordable_count(100, 7) == 14
    assert asked.affordable_count(100, 7, share=0.5) == 7
    assert asked.affordable_count(100, 100) == 1
    with pytest.raises(BudgetExceeded):
        asked.affordable_count(100, 101)


def test_a_value_near_a_limit_is_moved_inwards_before_it_is_moved_to_both_sides():
    x = torch.tensor([[0.0], [10.0], [5.0]])
    asked = sampler(double, x, limits=(0, 10))
    spread = float(x.std())
    ends, whole = asked.either_side(torch.arange(3), torch.zeros(3, dtype=torch.long), torch.ones(3, 1).double())
    room = 0.3 * spread
    assert ends[:, 0].mean(1).tolist() == pytest.approx([room, 10 - room, 5])
    assert whole.all()
    narrow = sampler(double, x, limits=(0, 10))
    narrow.spread = narrow.spread * 100  # the room is a quarter of what lies between the limits at most
    ends, _ = narrow.either_side(torch.tensor([0]), torch.tensor([0]), torch.tensor([[0.5]]).double())
    assert ends.flatten().tolist() == [2.0, 3.0]


def test_spreads_of_inputs_that_vary_are_their_deviations_whatever_the_limits():
    x = torch.tensor([[0.0, 3.0], [2.0, 3.0]])
    assert sampler(double, x, limits=(0, 3)).spread.tolist() == pytest.approx([math.sqrt(2), 0.75])


def test_many_moves_are_asked_about_in_portions():
    sizes = []

    def fn(x: torch.Tensor):
        sizes.append(len(x))
        return x[:, :1]

    asked = sampler(fn, torch.randn(4, 2**16), budget=100_000)
    values = torch.randn(40, 1, 2).double()
    asked.ask_moved(torch.zeros(40, dtype=torch.long), torch.arange(40), values)
    assert sizes == [32, 32, 16]  # two points of sixteen moves have 2^21 numbers


def test_seeds_of_boxes_that_need_one():
    seen = []

    def needs(x, seed):
        seen.append(seed)
        return x

    def takes(x, seed=None):
        seen.append(seed)
        return x

    asked = sampler(needs)
    asked.ask_rows(torch.arange(2))
    asked.ask_rows(torch.arange(2))
    first, second = seen[-2:]
    assert first != second  # a new one in every call
    asked.seed = 5
    asked.ask_rows(torch.arange(2))
    assert seen[-1] == 5
    sampler(takes).ask_rows(torch.arange(2))
    assert seen[-1] is None
