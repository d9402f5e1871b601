"""Warnings about a box that does not do well: once, and only where there is reason."""

import warnings

import pytest
import torch

from bondgrad import BlackBox
from bondgrad.policies import Calibrated
from bondgrad.step._trials import TrialSettings
from tests.helpers import gradient, noisy

D, K = 3, 4
A = torch.randn(D, K, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """The box is looked at every fifty steps, or every few hundred: too rarely for a test."""
    monkeypatch.setattr("bondgrad.step._trials.SETTINGS", TrialSettings(noise_share=0.5))
    monkeypatch.setattr(Calibrated, "share", 0.2)


def waves(x):
    return torch.sin(x @ A.to(x))


def train(layer, n, rows=16, dtype=torch.float32, size=1.0):
    random = torch.Generator().manual_seed(1)
    for _ in range(n):
        x, gy = torch.randn(rows, D, generator=random), torch.randn(rows, K, generator=random)
        gradient(layer, size * x.to(dtype), gy.to(dtype))


def warned(layer, n, **kind):
    """The warnings in n steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(layer, n, **kind)
    return [str(warning.message) for warning in caught]


def layer_of(fn, **settings):
    return BlackBox(fn, D, K, policy="calibrated", seed=0, **settings)


class Drifting:
    """A box whose noise is what it is told to be."""

    def __init__(self, sigma):
        self.sigma, self.generator = sigma, torch.Generator().manual_seed(0)

    def __call__(self, x):
        y = waves(x)
        return y + self.sigma * torch.randn(y.shape, generator=self.generator, dtype=y.dtype)


watching = pytest.mark.parametrize(
    "settings", [{"policy": "calibrated"}, {"policy": "bond", "noise": "auto"}], ids=["calibrated", "auto"]
)


@watching
def test_a_box_that_starts_to_answer_at_random(settings):
    fn = Drifting(0.0)
    layer = BlackBox(fn, D, K, seed=0, **settings)
    train(layer, 50)
    assert layer.health.last.alike
    fn.sigma = 1e-3
    (message,) = warned(layer, 300)
    assert "same answers" in message
    assert not layer.health.last.alike


@watching
def test_noise_that_grows(settings):
    fn = Drifting(1e-4)
    layer = BlackBox(fn, D, K, seed=0, **settings)
    train(layer, 100)
    fn.sigma = 1e-3
    (message,) = warned(layer, 600)
    assert "grew" in message
    assert 0.5e-3 < layer.health.last.noise < 2e-3


def test_noise_that_grows_little_is_nothing_to_speak_of():
    fn = Drifting(1e-4)
    layer = layer_of(fn)
    train(layer, 100)
    fn.sigma = 2e-4
    train(layer, 300)
    assert layer.health.last.noise > 1.5e-4


@watching
def test_outputs_that_do_not_react(settings):
    layer = BlackBox(lambda x: 0 * x[:, :1] + torch.ones(K), D, K, seed=0, **settings)
    (message,) = warned(layer, 200)
    assert "do not change at all" in message
    assert layer.health.last.dead


@watching
def test_nothing_but_noise(settings):
    layer = BlackBox(noisy(lambda x: 0 * waves(x), 0.1), D, K, seed=0, **settings)
    *before, message = warned(layer, 200)
    assert "no signal" in message
    assert all("noise on the outputs is too large" in other for other in before)  # it may have seemed so at first
    assert len(before) <= 1


def test_signs_that_drown_at_the_longest_steps():
    layer = layer_of(noisy(lambda x: x @ A.to(x), 0.035), limits=(-0.1, 0.1))
    (message,) = warned(layer, 150, rows=64, size=0.05)
    assert "the noise on the outputs is too large (0.0" in message


@pytest.mark.parametrize("fn", [lambda x: (x @ A.to(x)).round(), lambda x: x.round() @ A.to(x)])
def test_a_box_that_jumps(fn):
    layer = layer_of(fn)
    (message,) = warned(layer, 100, rows=64)
    assert "jumps, or is piecewise constant" in message
    assert layer.health.last.jumps


def test_jumps_that_are_small_beside_the_spread_are_nothing_to_speak_of():
    layer = layer_of(lambda x: waves(x).mul(100).round().div(100))
    train(layer, 100, rows=64)
    assert not layer.health.last.jumps


def test_a_warning_once_for_each_layer():
    for _ in range(2):
        assert len(warned(layer_of(lambda x: 0 * waves(x)), 50)) == 1


BOXES = {
    "exact": waves,
    "noisy": noisy(waves, 1e-3),
    "linear": lambda x: x @ A.to(x),
    "linear and noisy": noisy(lambda x: x @ A.to(x), 1e-2),
    "rounded": lambda x: waves(x).mul(1e3).round().div(1e3),
    "saturating": lambda x: torch.tanh(3 * x @ A.to(x)),
    "steep": lambda x: (x @ A.to(x)) ** 3,
    "one output asleep": lambda x: waves(x) * torch.tensor([1, 1, 0, 1]).to(x),
}


KINDS = [{"estimator": estimator, "policy": "calibrated"} for estimator in ("central", "forward", "simultaneous")]


@pytest.mark.parametrize("settings", [*KINDS, {"noise": "auto"}], ids=lambda settings: "-".join(settings.values()))
@pytest.mark.parametrize("box", BOXES)
def test_nothing_to_complain_of(box, settings):
    layer = BlackBox(BOXES[box], D, K, seed=0, **settings)
    train(layer, 300)
    assert layer.policy_state.schedule.trials > 5


def test_nothing_to_complain_of_in_double_precision():
    for box in ("exact", "linear"):
        layer = layer_of(BOXES[box])
        train(layer, 300, dtype=torch.float64)
        assert layer.health.last.noise == 0
        assert layer.health.last.alike


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("box", ["exact", "steep"])
def test_few_rows_are_no_reason_to_complain(box, rows):
    layer = BlackBox(lambda x: BOXES[box](x.expand(-1, D))[:, :1], 1, 1, policy="calibrated", seed=0)
    random = torch.Generator().manual_seed(1)
    for _ in range(300):
        gradient(layer, torch.randn(rows, 1, generator=random), torch.ones(rows, 1))
    assert layer.policy_state.schedule.trials > 5


# ---- rows that differ too much for one step


def steep(x):
    return torch.exp(5 * x)


def own(fn, n=400, d=D):
    """The warnings of a box with inputs that act alone."""
    layer, random = BlackBox(fn, d, d, policy="calibrated", seed=0), torch.Generator().manual_seed(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(n):
            gradient(layer, torch.randn(64, d, generator=random), torch.ones(64, d))
    assert layer.policy_state.schedule.trials > 20
    return [str(warning.message) for warning in caught]


def test_rows_too_different_for_one_step_under_noise():
    """Slopes 5·exp(5x) are from 1e-4 to 1e4, and over a step of a tenth the noise is one."""
    (message,) = own(noisy(steep, 0.1))
    assert "hides" in message
    assert "one step for each input does not suit all rows" in message


@pytest.mark.parametrize("sigma", [0.0, 1e-3])
@pytest.mark.parametrize(
    "fn",
    [
        torch.relu,
        lambda x: torch.relu(x) * torch.tensor([1.0, 0, 0]),
        lambda x: torch.sin(x) * torch.tensor([1.0, 1, 0]),
        lambda x: x**2,
    ],
    ids=["relu", "most inputs dead", "one input dead", "square"],
)
def test_rows_and_inputs_without_slopes_are_not_too_different(fn, sigma):
    assert own(noisy(fn, sigma)) == []


@pytest.mark.parametrize("fn", [steep, lambda x: torch.relu(x) * steep(x)], ids=["steep", "steep above zero"])
def test_without_noise_no_slope_is_hidden(fn):
    assert own(fn) == []


def test_noise_that_both_ends_have_in_common_hides_nothing():
    def fn(x: torch.Tensor, seed: int):
        return steep(x) + 3e-3 * torch.randn(x.shape[1], generator=torch.Generator().manual_seed(seed))

    assert own(fn) == []
