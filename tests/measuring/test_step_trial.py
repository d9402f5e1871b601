"""Noise and bending, told apart by slopes at half, once and twice a step."""

import pytest
import torch

from bondgrad.measuring._step_trial import Differences, StepTrial, noise_covariance


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
    one = torch.ones(d)
    trial = StepTrial(differences, one, one, nothing + h, slopes, nothing == 0, nothing, nothing.sum())
    expected = sigma**2 * differences.noise_gain / h**2
    assert trial.noise().mean() / expected == pytest.approx(1, abs=0.05)
    assert torch.allclose(torch.stack([*noise]).flatten(1).cov() / expected, noise_covariance(differences), atol=0.1)


@pytest.mark.parametrize("order", [1, 2, 4])
def test_the_noise_of_one_entry_is_that_of_a_combination_without_slope_and_bending(order):
    """Off by e in D(h/2) alone, for variances 4, 1 and 1/4 of the three slopes."""
    e, weight = 0.3, 0.5**order
    h = torch.tensor([0.05, 0.1, 0.2], dtype=torch.float64)[:, None, None]
    slopes = (3 + 500 * h**order).expand(3, 2, 1).clone()
    slopes[0, 1] += e
    nothing = torch.zeros(2, 1)
    one = torch.ones(1)
    trial = StepTrial(Differences(order), one, one, nothing + 0.1, slopes, nothing == 0, nothing, nothing.sum())
    expected = e**2 / (4 + (1 + weight) ** 2 + weight**2 / 4)
    assert trial.noise().flatten().tolist() == pytest.approx([0, expected], abs=1e-15)


def test_the_covariance_of_noise_at_half_once_and_twice_a_step():
    assert noise_covariance(Differences()).tolist() == [[4, 0, 0], [0, 1, 0], [0, 0, 0.25]]
    assert noise_covariance(Differences(1, True)).tolist() == [[4, 1, 0.5], [1, 1, 0.25], [0.5, 0.25, 0.25]]


@pytest.mark.parametrize(("shared", "draws", "gain"), [(False, 1, 0.5), (False, 4, 0.125), (True, 1, 2), (True, 2, 1)])
def test_noise_of_slopes_is_half_or_twice_that_of_outputs_over_steps_of_one(shared, draws, gain):
    assert Differences(2, shared, draws).noise_gain == gain
