"""The first step: where slopes of neighbouring rungs agree best."""

import math

import pytest
import torch

from bondgrad.measuring._first_step import StartingPoint, climb, most_slopes
from bondgrad.measuring._spread import Spread
from bondgrad.measuring._step_trial import Differences, StepTrial, noise_covariance


def start(slopes, reach=(1.0,), noise=0.0, deviation=None):
    reach = torch.tensor(reach)
    spread = Spread(reach if deviation is None else torch.tensor(deviation), reach)
    return StartingPoint(spread, reach, torch.tensor(noise), slopes)


def test_a_line_needs_two_rungs():
    asked = []

    def slopes(h):
        asked.append(float(h))
        return torch.full((4, 1), 3.0, dtype=torch.float64) * (1 + 1e-5 * h.double())  # equal slopes would say nothing

    found = climb(start(slopes))
    assert asked == [4.0**-8, 4.0**-7]
    assert float(found.step) == 4.0**-7 / 2
    assert float(found.slope) == pytest.approx(3 * math.sqrt(2), rel=1e-3)


@pytest.mark.parametrize("sigma", [1e-4, 1e-2])
def test_noise_and_bending_are_balanced(sigma):
    """D(h) = 1 + h² + noise / h is best where both errors are alike, at h = (sigma / 2)^(1/3), give or take a rung."""
    generator = torch.Generator().manual_seed(0)
    found = climb(start(lambda h: 1 + h**2 + sigma / h * torch.randn(64, 1, generator=generator)))
    assert 1 / 8 < float(found.step) / (sigma / 2) ** (1 / 3) < 8


def test_where_nothing_agrees_the_longest_step_with_answers_is_taken():
    generator = torch.Generator().manual_seed(0)
    every_second = torch.arange(8)[:, None] % 2 == 0
    found = climb(start(lambda h: torch.randn(8, 1, generator=generator).where((h < 0.1) | every_second, math.nan)))
    assert float(found.step) == 4.0**-2


def test_a_step_is_kept_away_from_where_no_row_has_an_answer():
    found = climb(start(lambda h: (1 + 0.1 * torch.rand(8, 1)).where(h < 0.01, math.nan)))
    assert float(found.step) <= 4.0**-3 / 16


def test_more_rungs_for_inputs_that_vary_much_less_than_their_size():
    asked = []

    def slopes(h):
        asked.append(float(h))
        return torch.full((2, 1), math.nan)

    climb(start(slopes, reach=(500.0,), deviation=(1.0,)))
    assert min(asked) <= 1 / 256 < 4 * min(asked)
    assert asked[-1] == 500
    climb(start(slopes, reach=(5e9,), deviation=(1.0,)))
    assert len(asked) - 11 <= most_slopes() == 21


@pytest.mark.parametrize("differences", [Differences(), Differences(order=1, shared_base=True)])
def test_noise_of_a_trial_is_right_on_average_and_knows_no_bending(differences):
    generator = torch.Generator().manual_seed(0)
    h, sigma, (r, d) = 0.1, 0.01, (20_000, 2)
    ends = sigma * torch.randn(3, 2, r, d, dtype=torch.float64, generator=generator)
    steps = torch.tensor([h / 2, h, 2 * h], dtype=torch.float64)[:, None, None]
    base, span = (ends[0, 1], steps) if differences.shared_base else (ends[:, 1], 2 * steps)
    noise = (ends[:, 0] - base) / span
    slopes = 3 + 5 * steps**differences.order + noise
    nothing = torch.zeros(r, d)
    trial = StepTrial(differences, torch.ones(d), torch.ones(d), nothing + h, slopes, nothing == 0, nothing)
    expected = sigma**2 * differences.noise_gain / h**2
    assert trial.noise().mean() / expected == pytest.approx(1, abs=0.05)
    assert torch.allclose(torch.stack([*noise]).flatten(1).cov() / expected, noise_covariance(differences), atol=0.1)


def test_a_box_without_any_answer_gets_the_longest_step():
    found = climb(start(lambda h: torch.full((4, 1), math.nan)))
    assert float(found.step) == 1
    assert float(found.slope) == 1


def test_slopes_that_agree_by_chance_within_the_noise_are_not_believed():
    # Equal to 1e-4 at every rung, but noise of variance 1e-6 / h² says that short steps cannot be as good as that.
    found = climb(start(lambda h: torch.full((4, 1), 1.0) * (1 + 1e-4 * h), noise=1e-6))
    assert float(found.step) == 0.5


def test_the_typical_slope_is_that_of_inputs_that_have_one():
    slopes = lambda h: torch.tensor([[3.0, 0.0, 0.0]]).double() * (1 + 1e-5 * h.double())  # noqa: E731
    assert float(climb(start(slopes, reach=(1.0, 1.0, 1.0))).slope) == pytest.approx(3 * math.sqrt(2), rel=1e-3)
