"""The range that a box may be asked about: the numbers nearest to the limits that lie inside."""

import math

import numpy as np
import pytest
import torch

from bondgrad.calling._limits import Limits

# The numbers of single precision next to 0.1 and 0.7: below and above.
BELOW_TENTH, ABOVE_TENTH = 0.09999999403953552, 0.10000000149011612
BELOW_SEVEN_TENTHS, ABOVE_SEVEN_TENTHS = 0.699999988079071, 0.7000000476837158


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
