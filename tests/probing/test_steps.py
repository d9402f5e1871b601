"""What slopes over a ladder of steps say."""

import math

import pytest
import torch

from bondgrad.probing._steps import StepLadder, judge_slopes

LADDER = torch.tensor([0.001, 0.01, 0.1, 1.0], dtype=torch.float64)


def judged(*slopes):
    """By the slopes [n] of every step."""
    return judge_slopes(LADDER, torch.tensor(slopes, dtype=torch.float64), spread=2.0)


def test_neighbours_that_agree():
    found = judged([3.0, 4.0], [3.0, 4.0], [3.0, 4.05], [3.0, 8.0])
    assert found.disagreement == pytest.approx([0, 0.05 / math.hypot(3, 4.05), 3.95 / math.hypot(3, 8)])
    assert (found.low_5, found.high_5) == (0.001, 0.1)
    assert (found.low_1, found.high_1) == (0.001, 0.1)
    assert found.best == 0.01
    assert found.error == found.disagreement[1]
    assert found.changes


def test_the_finer_plateau_is_shorter():
    found = judged([1.0], [1.0], [1.005], [1.04])
    assert (found.low_1, found.high_1) == (0.001, 0.1)
    assert (found.low_5, found.high_5) == (0.001, 1.0)


def test_the_longest_plateau_counts():
    found = judge_slopes(torch.logspace(0, 5, 6), torch.tensor([[1.0], [1.0], [2.0], [2.0], [2.0], [4.0]]), 1.0)
    assert (found.low_5, found.high_5) == (100, 10_000)
    assert found.best == 1000


def test_slopes_that_are_not_known_are_left_out():
    found = judged([1.0, math.nan], [1.0, 5.0], [math.inf, 5.0], [1.0, 5.0])
    assert found.disagreement == [0, 0, 0]


def test_no_slope_is_none_to_agree_on():
    found = judged([0.0], [0.0], [1.0], [1.0])
    assert found.disagreement == [None, None, 0]
    assert found.best is None
    assert found.error is None
    assert found.changes
    nothing = judged([0.0], [math.nan], [0.0], [0.0])
    assert not nothing.changes
    assert (nothing.low_5, nothing.high_5) == (None, None)


def test_slopes_that_differ_by_half_are_noise():
    assert judged([1.0], [1.0], [0.51], [0.51]).best == 0.01
    assert judged([1.0], [1.0], [0.5], [0.5]).best is None


@pytest.mark.parametrize(
    ("plateau", "best", "changes", "words"),
    [
        (
            (1e-4, 0.1, 1e-3, 0.01),
            0.01,
            True,
            "Slopes agree to 5 % for steps from 1e-04 to 1e-01 of the spread, to 1 % "
            "from 1e-03 to 1e-02; the best step is about 0.01 of an input's spread (0.03).",
        ),
        (
            (1e-4, 0.1, None, None),
            0.01,
            True,
            "Slopes agree to 5 % for steps from 1e-04 to 1e-01 of the spread; the "
            "best step is about 0.01 of an input's spread (0.03).",
        ),
        (
            (None,) * 4,
            0.01,
            True,
            "No plateau: slopes agree to 20 % at best; the best step is about 0.01 of an input's spread (0.03).",
        ),
        (
            (None,) * 4,
            None,
            True,
            "Noise or roughness drowns the slopes: no two steps agree on them to better than 50 %.",
        ),
        ((None,) * 4, 0.01, False, "No slope anywhere: the outputs did not change at any step."),
    ],
)
def test_words(plateau, best, changes, words):
    error = None if best is None else 0.2
    assert StepLadder([0.01], [0.2], *plateau, best, error, spread=3.0, changes=changes).words == words
