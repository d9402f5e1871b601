"""What a layer says of its own costs, and random numbers for the time of a measurement."""

import pytest
import torch

from bondgrad import BlackBox
from tests.helpers import gradient


@pytest.mark.parametrize("policy", ["calibrated", "bond"])
@pytest.mark.parametrize("estimator", ["central", "forward", "simultaneous"])
def test_a_gradient_costs_no_more_than_the_layer_says(estimator, policy):
    layer = BlackBox(torch.sin, 3, estimator=estimator, policy=policy, seed=0).eval()
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        most, before = layer.gradient_evaluations(16), layer.stats.evaluations
        gradient(layer, x, torch.ones(16, 3))
        assert layer.stats.evaluations - before <= most
    assert most == 16 * (1 + layer.estimator.evaluations(3))  # once a first step is known, not one less


def test_other_random_numbers_are_gone_after_a_measurement():
    layer = BlackBox(torch.sin, 3, estimator="simultaneous", policy="bond", seed=0).eval()
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    before = gradient(layer, x, torch.ones(4, 3))
    with layer.without_trace():
        layer.reseed(1)
        assert not torch.equal(gradient(layer, x, torch.ones(4, 3)), before)
    assert torch.equal(gradient(layer, x, torch.ones(4, 3)), before)
