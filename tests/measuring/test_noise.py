"""Noise from answers that would be equal without it."""

import math

import pytest
import torch

from bondgrad.measuring._noise import noise_from_repeats


@pytest.mark.parametrize("order", [1, 2, 5])
def test_noise_is_that_of_the_answers_and_drift_is_none(order):
    generator = torch.Generator().manual_seed(0)
    noise = 0.3 * torch.randn(2000, 16, 2, dtype=torch.float64, generator=generator)
    drift = torch.linspace(0, 5, 16, dtype=torch.float64)[:, None] ** (order - 1)
    assert noise_from_repeats(noise + drift, 1, order, (0, 1)).sub(0.3).abs().max() < 0.01


def test_noise_without_answers_is_zero():
    assert noise_from_repeats(torch.full((3, 4, 2), math.nan), 1, 1, (0, 1)).tolist() == [0, 0]
