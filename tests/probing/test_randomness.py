"""What answers to the same questions say of noise, by numbers."""

import math

import pytest
import torch
from torch import nn

from bondgrad.probing._facts import HARMLESS
from bondgrad.probing._randomness import judge_repeats, stochastic_modules
from tests.probing.test_facts import UNIT, facts


def judged(again, together=None):
    """By answers [repeats] about one row, in calls of their own and in one, of outputs that are about four."""
    again, together = (
        None if y is None else 4 + torch.tensor(y, dtype=torch.float64).view(1, -1, 1) for y in (again, together)
    )
    return judge_repeats(facts([4.0]), again, again if together is None else together, [])


def test_the_same_to_the_last_bit():
    found = judged([0.0, 0.0, 0.0])
    assert (found.deterministic, found.exact, found.moving) == (True, True, False)
    assert (found.std, found.largest, found.half_width, found.noise) == ([0.0], [0.0], [0.0], 0.0)


def test_the_same_up_to_two_units_in_the_last_place():
    """Two units of four: second differences of 4, 4 + e, 4 are 2 e, and have six times the variance."""
    e = 8 * UNIT * math.sqrt(6) / 2
    found = judged([0.0, 0.99 * e, 0.0])
    assert (found.deterministic, found.exact) == (True, False)
    assert not judged([0.0, 1.01 * e, 0.0]).deterministic


def test_deviation_from_second_differences():
    found = judged([0.0, 1.0, 0.0])
    assert found.std == pytest.approx([2 / math.sqrt(6)])
    assert found.relative == pytest.approx(2 / math.sqrt(6) / 4)  # of outputs that do not change, by their size
    assert found.largest == pytest.approx([math.sqrt(3 / 2)])  # from the median, which follows one answer in three


def test_a_steady_drift_is_no_noise():
    found = judged([0.0, 1.0, 2.0])
    assert (found.deterministic, found.moving) == (True, True)
    assert not judged([0.0, 100 * UNIT, 200 * UNIT]).moving  # which may come from rounding
    assert judged([0.0, 150 * UNIT, 300 * UNIT]).moving


def test_half_width():
    """Of 20 answers, one lies 7 from the median and one 1: the quantile at 0.95 is between them, at 0.05 of the way."""
    found = judged([7.0, 1.0] + [0.0] * 18)
    assert found.half_width == pytest.approx([(1 + 0.05 * 6) * math.sqrt(20 / 19)])


def test_noise_that_is_nearly_always_absent_has_the_half_width_of_a_normal_one():
    found = judged([0.0] * 20 + [1.0] + [0.0] * 20)
    assert found.half_width == pytest.approx([2 * found.std[0]])


def test_noise_by_place():
    found = judged([0.0] * 3, [0.0, 1.0, 0.0])
    assert (found.deterministic, found.by_place, found.within_a_call) == (False, True, True)
    assert found.std == pytest.approx([2 / math.sqrt(6)])
    rounded = (
        HARMLESS * 4 * math.sqrt(6) / 2
    )  # of outputs of size four; as much may come from the tolerance of a solver
    assert judged([0.0] * 3, [0.0, 0.99 * rounded, 0.0]).deterministic
    assert judged([0.0] * 3, [0.0, 1.01 * rounded, 0.0]).by_place


def test_noise_that_the_rows_of_a_call_share():
    assert not judged([0.0, 1.0, 0.0], [1.0, 1.0, 1.0]).within_a_call
    assert not judged([0.0, 1.0, 0.0], [0.0, 0.099, 0.0]).within_a_call  # a tenth may be other noise
    assert judged([0.0, 1.0, 0.0], [0.0, 0.101, 0.0]).within_a_call
    assert judged([0.0, 1.0, 0.0]).within_a_call  # it takes one row at a time
    assert not judged([0.0, 1.0, 0.0], [0.0, 1.0, 0.0]).by_place


def test_the_larger_deviation_counts():
    assert judged([0.0, 1.0, 0.0], [0.0, 3.0, 0.0]).std == pytest.approx([6 / math.sqrt(6)])
    assert judged([0.0, 3.0, 0.0], [0.0, 1.0, 0.0]).std == pytest.approx([6 / math.sqrt(6)])


def test_answers_that_did_not_come_are_left_out():
    found = judged([0.0, 1.0, 0.0, math.nan, 0.0, 1.0, 0.0])
    assert found.std == pytest.approx([2 / math.sqrt(6)])
    assert judged([0.0, 0.0, 0.0, math.nan]).exact


def test_modules_that_are_random_or_mix_rows():
    module = nn.Sequential(
        nn.Dropout(0.5), nn.Dropout(0.5), nn.Dropout(0.0), nn.BatchNorm1d(3), nn.RReLU(), nn.Tanh(), nn.LSTM(3, 3),
        nn.LSTM(3, 3, 2, dropout=0.1), nn.MultiheadAttention(4, 2, dropout=0.1), nn.Dropout(0.25).eval(),
    )  # fmt: skip
    assert stochastic_modules(module) == [
        "2 layers of dropout (p = 0.5)",
        "batch normalisation",
        "randomised ReLU",
        "dropout inside LSTM",
        "dropout inside MultiheadAttention",
    ]
    assert stochastic_modules(module.eval()) == []
    assert stochastic_modules(torch.sin) == []
