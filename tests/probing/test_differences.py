"""What slopes over a ladder of steps say, and second differences that are seen ever closer."""

import math

import numpy as np
import pytest
import torch

from bondgrad import probe
from bondgrad.probing._differences import Smoothness, StepLadder, judge_bends, judge_slopes

LADDER = torch.tensor([0.001, 0.01, 0.1, 1.0], dtype=torch.float64)


def judged_slopes(*slopes):
    """By the slopes [n] of every step."""
    return judge_slopes(LADDER, torch.tensor(slopes, dtype=torch.float64), spread=2.0)


def test_neighbours_that_agree():
    found = judged_slopes([3.0, 4.0], [3.0, 4.0], [3.0, 4.05], [3.0, 8.0])
    assert found.disagreement == pytest.approx([0, 0.05 / math.hypot(3, 4.05), 3.95 / math.hypot(3, 8)])
    assert (found.low_5, found.high_5) == (0.001, 0.1)
    assert (found.low_1, found.high_1) == (0.001, 0.1)
    assert found.best == 0.01
    assert found.error == found.disagreement[1]
    assert found.changes


def test_the_finer_plateau_is_shorter():
    found = judged_slopes([1.0], [1.0], [1.005], [1.04])
    assert (found.low_1, found.high_1) == (0.001, 0.1)
    assert (found.low_5, found.high_5) == (0.001, 1.0)


def test_the_longest_plateau_counts():
    found = judge_slopes(torch.logspace(0, 5, 6), torch.tensor([[1.0], [1.0], [2.0], [2.0], [2.0], [4.0]]), 1.0)
    assert (found.low_5, found.high_5) == (100, 10_000)
    assert found.best == 1000


def test_slopes_that_are_not_known_are_left_out():
    found = judged_slopes([1.0, math.nan], [1.0, 5.0], [math.inf, 5.0], [1.0, 5.0])
    assert found.disagreement == [0, 0, 0]


def test_no_slope_is_none_to_agree_on():
    found = judged_slopes([0.0], [0.0], [1.0], [1.0])
    assert found.disagreement == [None, None, 0]
    assert found.best is None
    assert found.error is None
    assert found.changes
    nothing = judged_slopes([0.0], [math.nan], [0.0], [0.0])
    assert not nothing.changes
    assert (nothing.low_5, nothing.high_5) == (None, None)


def test_slopes_that_differ_by_half_are_noise():
    assert judged_slopes([1.0], [1.0], [0.51], [0.51]).best == 0.01
    assert judged_slopes([1.0], [1.0], [0.5], [0.5]).best is None


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
def test_words_about_steps(plateau, best, changes, words):
    error = None if best is None else 0.2
    assert StepLadder([0.01], [0.2], *plateau, best, error, spread=3.0, changes=changes).words == words


def judged_bends(*bends, least=1e-12):
    """By the largest bends of every zoom, on one line."""
    bends = torch.tensor(bends, dtype=torch.float64)[:, None]
    return judge_bends(bends, torch.full_like(bends, least))


@pytest.mark.parametrize(
    ("order", "kind"),
    [(2, "smooth"), (1.51, "smooth"), (1.49, "kinks"), (1, "kinks"), (0.41, "kinks"), (0.39, "jumps"), (0, "jumps")],
)
def test_the_power_with_which_bends_fall(order, kind):
    """A zoom makes distances eight times shorter."""
    found = judged_bends(1.0, 8.0**-order, 64.0**-order)
    assert found.kind == kind
    assert found.order == pytest.approx(order)
    assert found.jump == (pytest.approx(64.0**-order) if kind == "jumps" else 0)


@pytest.mark.parametrize(
    ("bends", "kind"),
    [
        ((1.0, 8.0, 64.0, 512.0, 4096.0), "poles"),
        ((1.0, 500.0, 500.0, 500.0, 500.0), "poles"),  # the second look has a point next to it by chance
        ((1.0, 1.0, 0.9, 8.0, 64.0), "poles"),
        ((0.1, 1.0, 1.0, 1.0, 1.0), "jumps"),  # two jumps that cancelled
        ((1.0, 0.7, 1.2, 1.0, 1.0), "jumps"),
        ((1.0, 8.0, 1.0, 1 / 64, 1 / 4096), "smooth"),  # steep, but no pole
    ],
)
def test_at_a_pole_bends_grow_without_bound(bends, kind):
    found = judged_bends(*bends)
    assert found.kind == kind
    assert (found.jump > 0) == (kind == "jumps")


def test_jumps_beside_a_pole():
    bends = torch.tensor([[1.0, 1.0], [8.0, 1.0], [64.0, 1.0]], dtype=torch.float64)
    assert judge_bends(bends, torch.full_like(bends, 1e-12)) == Smoothness("jumps", pytest.approx(-1), 1.0)


@pytest.mark.parametrize("seed", range(4))
def test_a_pole_is_not_taken_for_jumps_and_right_is_the_slope(seed):
    def fn(x: np.ndarray):
        x = x.astype(float)
        return np.stack([np.sin(2 * x[:, 0]) * x[:, 1], x[:, 2] / (1 + x[:, 0])], 1)

    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(seed))
    report = probe(fn, x, seed=seed)
    assert report.verdict.startswith("deterministic, with poles")
    assert report.gradients.reference == "the slope"
    # Fixed steps of a spread reach across the pole, and short ones do not.
    assert report.gradients.predicted > 0.95
    assert report.gradients.step is None or report.gradients.step < 0.3


def test_the_closest_look_counts_and_the_roughest_line():
    bends = torch.tensor([[1.0, 1.0], [1.0, 1 / 64], [1 / 64, 1 / 512]], dtype=torch.float64)
    found = judge_bends(bends, torch.full_like(bends, 1e-12))
    assert found.order == pytest.approx(1)
    assert found.kind == "kinks"


def test_bends_that_are_not_seen_say_nothing():
    assert judged_bends(1.0, 0.125, 1e-3, least=0.01) == Smoothness("kinks", pytest.approx(1), 0.0)  # the last hides
    assert judged_bends(1.0, 1e-9, 1e-9, least=1e-3).kind == "smooth"  # it fell by at least a thousand
    assert judged_bends(1.0, 1e-9, 1.0, least=0.1).kind == "unclear"  # what comes after is another bend
    assert judged_bends(0.5, 0.5, 0.5, least=1.0).kind == "unclear"
    assert judged_bends(0.01, 0.01, 0.01, least=0.019).kind == "smooth"
    assert judged_bends(0.01, 0.01, 0.01, least=0.021).kind == "unclear"


def test_words_about_smoothness():
    assert Smoothness("jumps", 0.0, 0.25).words.startswith("It jumps, by up to 25 % of the spread")
    assert "poles, next to which its outputs grow" in Smoothness("poles", -1.0, 0.0).words
    assert "drowns" in Smoothness("unclear", None, 0.0).words
