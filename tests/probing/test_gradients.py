"""The share of right signs that a probe predicts, and the fixed step that it recommends."""

import math
from dataclasses import replace

import pytest
import torch

from bondgrad import BlackBox, probe, sign_accuracy
from bondgrad.policies import Fixed
from bondgrad.probing._gradients import Gradients
from tests.helpers import gradient, noisy
from tests.probing.test_probe import D, network, rows
from tests.probing.test_probe_code import pasted


def found(default, fixed, error=0.01, even=True, jumps=False, entries=100):
    return Gradients(default, fixed, error, "the slope", even, jumps, entries)


@pytest.mark.parametrize(
    ("gradients", "step"),
    [
        (found(0.9, {}), None),
        (found(0.9, {0.1: 0.5, 0.2: 0.92}), None),  # hardly better
        (found(0.9, {0.1: 0.5, 0.2: 0.94}), 0.2),
        (found(0.9, {0.1: 0.5, 0.2: 0.94}, error=0.03), None),  # within two standard errors
        (found(0.9, {0.1: 0.5, 0.2: 0.985, 0.4: 0.99, 0.8: 0.97}), 0.2),  # the shortest of those that are good
        (found(0.5, {0.1: 1.0}, even=False), None),
        (found(0.9, {0.1: 0.91}, jumps=True), None),
        (found(0.9, {0.1: 0.91}, jumps=True, entries=48), 0.1),  # too few to trust the default
        (found(0.9, {0.1: 0.89}, jumps=True, entries=48), None),
    ],
)
def test_a_fixed_step_where_it_is_better(gradients, step):
    assert gradients.step == step
    assert gradients.predicted == (gradients.default if step is None else gradients.fixed[step])


def test_words():
    assert found(0.9, {0.2: 0.96}).words == (
        "With the default policy, 90 % ± 1 % of the signs of a gradient are right (100 entries; right is the slope). "
        "With a fixed step of 0.2, 96 % are."
    )
    assert found(0.9, {0.2: 0.91}).words.endswith("The best fixed step, 0.2, has 91 %.")
    assert found(1.0, {}).words.endswith("right is the slope).")


def test_smooth_boxes_are_predicted_to_be_right():
    for fn in (torch.sin, network(torch.nn.Tanh()), network(torch.nn.ReLU()), network(torch.nn.Dropout(0.2))):
        report = probe(fn, rows())
        assert report.gradients.predicted > 0.97
        assert report.gradients.reference == "the slope"
        assert "policy" not in report.arguments


def test_a_staircase_gets_a_step_that_reaches_across():
    """Steps of 1, inputs of deviation 0.3: over shorter steps, most slopes are zero."""
    mix = torch.randn(D, 3, generator=torch.Generator().manual_seed(0))

    def fn(x):
        return torch.floor(x @ mix).sin()

    x = 0.3 * rows()
    report = probe(fn, x)
    assert report.gradients.reference == "the slope over 1 × an input's spread"
    assert report.gradients.predicted > 0.8
    shares = list(report.gradients.fixed.values())
    assert not shares or max(shares[-4:]) > 0.8 > 0.5 > shares[0]
    step = replace(report, gradients=found(0.5, {0.3: 0.95}))
    assert step.arguments["policy"] == "bondgrad.policies.Fixed(0.3)"
    assert step.reasons["policy"] == "95 % of signs were right, with the default 50 %"
    assert pasted(step, fn).policy.step == 0.3


@pytest.mark.parametrize("sigma", [0.03, 0.1])
@pytest.mark.parametrize("seeded", [False, True])
def test_the_prediction_for_noisy_boxes(sigma, seeded):
    """Of fixed steps, against what they bring: with a seed the noise cancels."""
    inside, own = network(torch.nn.Tanh()), torch.Generator().manual_seed(0)

    def fn(x, seed=None):
        drawn = own if seed is None else torch.Generator().manual_seed(seed)
        return inside(x).detach() + sigma * torch.randn(len(x), 3, generator=drawn)

    box = fn if seeded else lambda x: fn(x)
    report = probe(box, rows(), budget=40_000)
    assert len(report.gradients.fixed) == 7 or report.gradients.default > 0.97
    x, gy = rows(400), torch.randn(400, 3)
    exact = gradient(inside, x, gy)
    for step, predicted in report.gradients.fixed.items():
        if step < 1.1:  # longer ones have another slope
            right = float(sign_accuracy(gradient(BlackBox(box, D, policy=Fixed(step)), x, gy), exact))
            assert predicted == pytest.approx(right, abs=0.1)
    if seeded:
        assert report.gradients.default > 0.9


@pytest.mark.filterwarnings("ignore:noise on the outputs")
def test_default_signs_of_a_noisy_box_are_those_of_training():
    inside = network(torch.nn.Tanh())
    box = noisy(lambda x: inside(x).detach(), 0.1)
    report, layer = probe(box, rows()), BlackBox(box, D, seed=0)
    right = []
    for step in range(100):
        x, gy = rows(32), torch.randn(32, 3)
        g = gradient(layer, x, gy)
        right += [float(sign_accuracy(g, gradient(inside, x, gy)))] if step >= 50 else []
    assert report.gradients.default == pytest.approx(sum(right) / len(right), abs=0.06)


def test_limits_and_inputs_that_do_not_move():
    asked = []

    def fn(x):
        asked.append(x.clone())
        return torch.floor(4 * x[:, :2])

    report = probe(fn, torch.rand(100, 3), limits=(0, 1))
    assert report.gradients.entries == 24 * 2
    assert float(torch.cat(asked).amin()) >= 0
    assert float(torch.cat(asked).amax()) <= 1


def test_inputs_of_other_units_get_no_common_step():
    scale = torch.tensor([1.0, 100.0])
    report = probe(lambda x: torch.floor(2 * x / scale).cumsum(1), rows(d=2) * scale)
    assert not report.gradients.even
    assert "policy" not in report.arguments


def test_what_is_left_out():
    assert any("Gradients" in text for text in probe(torch.sin, rows(), budget=2000).left_out)
    coupled = probe(lambda x: x - x.mean(0), rows())
    assert any(text.startswith("Gradients: answers depend on other rows") for text in coupled.left_out)
    drowned = probe(noisy(torch.sin, 2.0), rows())
    assert any(text.startswith("Gradients: noise drowns slopes") for text in drowned.left_out)
    still = probe(lambda x: 0 * x, rows())
    assert any(text == "Gradients: no input changes an output" for text in still.left_out)
    assert math.isfinite(probe(torch.sin, rows()).gradients.error)
