"""Rows that a box is given: what is refused, and what is said about it; the numbers nearest to limits, inside."""

import math

import numpy as np
import pytest
import torch

from bondgrad.calling._inputs import (
    Limits,
    check_input,
    check_rows,
    context_rows,
    seen_to_be_finite,
    with_typical_rows,
)

# The numbers of single precision next to 0.1 and 0.7: below and above.
BELOW_TENTH, ABOVE_TENTH = 0.09999999403953552, 0.10000000149011612
BELOW_SEVEN_TENTHS, ABOVE_SEVEN_TENTHS = 0.699999988079071, 0.7000000476837158


@pytest.mark.parametrize(
    ("x", "in_time", "says"),
    [
        (torch.zeros(()), False, r"shape \[..., in_features=2\], got \[\]"),
        (torch.zeros(3), False, r"shape \[..., in_features=2\], got \[3\]"),
        (torch.zeros(2, 3), False, r"shape \[..., in_features=2\], got \[2, 3\]"),
        (torch.zeros(2), True, r"shape \[..., time, in_features=2\], got \[2\]"),
        (torch.zeros(0, 2), False, r"empty batch, shape \[0, 2\]"),
    ],
)
def test_shapes_that_are_refused(x, in_time, says):
    with pytest.raises(ValueError, match=says):
        check_input(x, 2, in_time)


@pytest.mark.parametrize("x", [torch.zeros(2), torch.zeros(1, 2), torch.zeros(4, 5, 2), torch.zeros(2).half()])
def test_any_leading_shape_is_taken(x):
    check_input(x, 2)


def test_one_number_is_a_batch():
    check_input(torch.zeros(1), 1)
    check_rows(torch.zeros(1, 1))
    check_input(torch.zeros(1, 1), 1, in_time=True)


@pytest.mark.parametrize(
    ("x", "error", "says"),
    [
        (np.zeros((4, 3)), TypeError, "torch tensor, got ndarray"),
        (torch.zeros(4, 3).long(), TypeError, "floating point"),
        (torch.zeros(()), ValueError, r"\[..., in_features=any\], got \[\]"),
        (torch.zeros(3), ValueError, r"rows, \[N, d\], got \[3\]"),
        (torch.zeros(4, 3, 2), ValueError, r"rows, \[N, d\], got \[4, 3, 2\]"),
        (torch.zeros(0, 3), ValueError, "empty batch"),
    ],
)
def test_what_is_not_rows_is_refused(x, error, says):
    with pytest.raises(error, match=says):
        check_rows(x)


def test_contexts_as_rows():
    one, two = context_rows((torch.arange(6).view(2, 3), torch.zeros(2, 3, 4, requires_grad=True)), torch.Size([2, 3]))
    assert one.tolist() == [0, 1, 2, 3, 4, 5]
    assert two.shape == (6, 4)
    assert not two.requires_grad
    with pytest.raises(ValueError, match=r"context 1 must have one entry per row of x, shape \[2, 3, ...\], got \[2\]"):
        context_rows((torch.zeros(2, 3), torch.zeros(2)), torch.Size([2, 3]))


@pytest.mark.parametrize(
    ("limits", "low", "high"),
    [
        ((0.5, 0.75), 0.5, 0.75),  # which every precision has
        ((0.1, 0.7), ABOVE_TENTH, BELOW_SEVEN_TENTHS),  # the nearest ones lie inside
        ((0.7, 0.8), ABOVE_SEVEN_TENTHS, 0.800000011920929 - 2**-24),  # the nearest ones lie outside
        ((-0.7, 0.1), -BELOW_SEVEN_TENTHS, BELOW_TENTH),
        ((-math.inf, math.inf), -math.inf, math.inf),
        ((-1e300, 1e300), -3.4028234663852886e38, 3.4028234663852886e38),
    ],
)
def test_limits_are_rounded_inwards(limits, low, high):
    made = Limits(limits, 2)
    for got, wanted in zip(made.like(torch.zeros(3, 2)), (low, high), strict=True):
        assert got.tolist() == [wanted, wanted]
    for got, wanted in zip(made.like(torch.zeros(3, 2).double()), limits, strict=True):
        assert got.tolist() == [wanted, wanted]
    assert made.numbers() == ([limits[0]] * 2, [limits[1]] * 2)


def test_of_every_input_and_of_every_time_step():
    limits = Limits(([0, 1], torch.tensor([2, 3])), 2)
    assert [t.tolist() for t in limits.like(torch.zeros(5, 2))] == [[0, 1], [2, 3]]
    assert [t.tolist() for t in limits.like(torch.zeros(5, 6))] == [[0, 1] * 3, [2, 3] * 3]
    assert limits.clamped(torch.tensor([[-1.0, 9.0]])).tolist() == [[0, 3]]


@pytest.mark.parametrize("limits", [[0, 1], (0, np.ones(2)), np.array([0, 1]), torch.tensor([[0, 0], [1, 1]])])
def test_kinds_of_pairs(limits):
    assert Limits(limits, 2).numbers() == ([0, 0], [1, 1])


@pytest.mark.parametrize("limits", [3.0, (0,), (0, 1, 2), {0, 1}])
def test_what_is_no_pair_is_refused(limits):
    with pytest.raises(ValueError, match=r"limits must be a pair \(low, high\)"):
        Limits(limits, 2)


@pytest.mark.parametrize("limits", [(1, 1), ([0, 1], 1), (math.nan, 1)])
def test_nothing_in_between_is_refused(limits):
    with pytest.raises(ValueError, match="low < high for every input"):
        Limits(limits, 2)


def test_single_precision_must_tell_them_apart():
    limits = Limits((0.1, 0.1 + 1e-10), 1)
    assert limits.like(torch.zeros(1, 1).double())[1].tolist() == [0.1 + 1e-10]
    with pytest.raises(ValueError, match=r"within what torch.float32 can tell apart"):
        limits.like(torch.zeros(1, 1))


def test_what_is_not_finite_stays_outside_of_the_limits():
    limits = Limits((0, [1, math.inf]), 2)
    x = torch.tensor([[math.nan, 2.0], [math.inf, math.inf], [-3.0, 5.0]])
    clamped = limits.clamped(x)
    assert clamped.isnan().tolist() == [[True, False], [True, True], [False, False]]
    assert clamped[2].tolist() == [0, 5]
    assert limits.admissible(clamped).tolist() == [[0, 2], [0, 0], [0, 5]]
    assert Limits((2, 3), 1).admissible(torch.tensor([[math.nan]])).item() == 2


def test_a_sum_tells_whether_all_entries_are_finite():
    assert seen_to_be_finite(torch.ones(2, 2))
    assert not seen_to_be_finite(torch.tensor([1.0, math.nan]))
    assert not seen_to_be_finite(torch.tensor([math.inf, -math.inf]))
    assert not seen_to_be_finite(torch.ones(2, device="meta"))


def test_the_mean_of_the_others_stands_for_rows_that_are_not_finite():
    x = torch.tensor([[1.0, 2.0], [math.nan, 100.0], [3.0, 4.0]])
    assert with_typical_rows(x).tolist() == [[1, 2], [2, 3], [3, 4]]
    assert with_typical_rows(x[1:2]).tolist() == [[0, 0]]
