"""The default policy at boxes on which it once failed: each is as short as the box that a user brought."""

import math

import numpy as np
import pytest
import torch

from bondgrad import BlackBox, per_row, sign_accuracy
from bondgrad.policies import Fixed
from tests.helpers import gradient, noisy

pytestmark = pytest.mark.filterwarnings("ignore:the box jumps", "ignore:the noise on the outputs is too large")


def trained(layer, steps, sample, seed=0):
    """The gradients of the last ten steps, and the rows and loss gradients they belong to."""
    random, last = torch.Generator().manual_seed(seed), []
    for step in range(steps):
        x = sample(random)
        gy = torch.randn(len(x), layer.out_features, generator=random).to(x) if layer.out_features else None
        gy = torch.ones_like(layer(x)) if gy is None else gy
        g = gradient(layer, x, gy)
        last += [(x, gy, g)] if step >= steps - 10 else []
    return last


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("frequency", "sigma", "right"), [(3, 0.3, 0.70), (20, 0.3, 0.66), (10, 0.1, 0.84)])
def test_strong_noise_does_not_lengthen_steps_beyond_half_a_period(frequency, sigma, right, seed):
    """The best fixed step has 75 and 87 % of the signs; one beyond half a period has fewer than half."""
    layer = BlackBox(noisy(lambda x: torch.sin(frequency * x), sigma, seed), 8, 8, seed=seed)
    last = trained(layer, 160, lambda random: torch.randn(32, 8, generator=random), 100 + seed)
    signs = [sign_accuracy(g, frequency * torch.cos(frequency * x) * gy) for x, gy, g in last]
    assert sum(signs) / len(signs) > right


@pytest.mark.parametrize("frequency", [3, 10, 20])
def test_a_quarter_of_the_period_is_a_safe_step_under_strong_noise(frequency):
    """As the documents advise where the default warns of noise."""
    box, step = noisy(lambda x: torch.sin(frequency * x), 0.3, 0), math.pi / 2 / frequency
    layer = BlackBox(box, 8, 8, policy=Fixed(step), seed=0)
    last = trained(layer, 10, lambda random: torch.randn(32, 8, generator=random))
    signs = [sign_accuracy(g, frequency * torch.cos(frequency * x) * gy) for x, gy, g in last]
    assert sum(signs) / len(signs) > 0.7


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rows", [16, 64])
def test_an_integer_beside_smooth_inputs_gets_a_gradient_from_the_first_step_on(rows, seed):
    """Days until a payment, in double precision, where slopes along the other inputs agree over the shortest steps."""

    def value(x: np.ndarray):
        price, rate, days = x[:, 0].astype(float), x[:, 1].astype(float), np.round(x[:, 2].astype(float))
        return (price * np.exp(-rate * days / 365))[:, None]

    centre, spread = torch.tensor([100.0, 0.3, 180.0]), torch.tensor([10.0, 0.04, 40.0])
    layer = BlackBox(value, 3, 1, seed=seed)
    for x, gy, g in trained(layer, 10, lambda random: centre + spread * torch.randn(rows, 3, generator=random), seed):
        exact = -x[:, 0] * x[:, 1] / 365 * torch.exp(-x[:, 1] * x[:, 2] / 365) * gy[:, 0]
        assert sign_accuracy(g[:, 2], exact) > 0.9


def queue(p, seed):
    """The mean wait and the number of customers in a queue with random arrivals and services."""
    random, t, begin, served, waits = np.random.default_rng(seed), 0.0, 0.0, 0, []
    arrivals, services = math.exp(0.3 * p[0]), 1.5 * math.exp(0.3 * p[1])
    while True:
        t += random.exponential(1 / arrivals)
        begin = max(t, begin)
        if begin > 40:
            return [float(np.mean(waits or [0.0])), served / 5]
        waits.append(begin - t)
        begin, served = begin + random.exponential(1 / services), served + 1


def test_a_simulation_of_events_is_known_to_jump_with_a_dozen_rows():
    """Jumps are so dense in it that three rows at a time do not always tell; with twice as many rows they do."""
    known = {}
    for rows in (12, 24):
        layers = [BlackBox(per_row(queue), 2, 2, seed=seed) for seed in range(4)]
        for seed, layer in enumerate(layers):
            trained(layer, 120, lambda random: torch.randn(rows, 2, generator=random), seed)  # noqa: B023
        known[rows] = sum(
            layer.stats.health.jumps == (0, 1) and bool(layer.policy_state.step.min() > 0.4) for layer in layers
        )
    assert known[12] >= 3
    assert known[24] == 4


@pytest.mark.parametrize("box", [torch.reciprocal, lambda x: torch.tanh(30 * x)], ids=["a pole", "a steep ramp"])
def test_a_box_that_only_seems_to_jump_has_its_slopes_by_the_policy_that_does_not_look_for_jumps(box):
    """As the documents advise where the default warns of jumps."""
    warned = BlackBox(box, 4, 4, seed=0)
    trained(warned, 20, lambda random: torch.randn(32, 4, generator=random))
    assert warned.stats.health.jumps
    layer = BlackBox(box, 4, 4, policy="bond", seed=0)
    for x, gy, g in trained(layer, 20, lambda random: torch.randn(32, 4, generator=random)):
        exact = torch.func.vjp(box, x)[1](gy)[0]
        assert ((g - exact).abs() <= 0.1 * exact.abs() + 1e-3).float().mean() > 0.9
