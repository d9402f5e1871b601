"""Calibrated steps with whatever they work with; the standard error; measured noise; graphs."""

import math
import warnings

import numpy as np
import pytest
import torch

from bondgrad import BoxError, GraphedStep
from bondgrad.networks import ffnn
from bondgrad.structure import Blocks, Sequence
from tests.calling.test_memory import Device, leaky
from tests.helpers import close, gradient, needs_cuda, noisy, same_state
from tests.policies.test_calibrated import (
    DRAWN,
    D,
    check_state,
    exact_gradient,
    layer_of,
    problems,
    signs_right,
    trained,
    waves,
)
from tests.structure.test_sequence import Echo
from tests.torch_support.test_graphs import Trainer, batches

# ---- whatever it works with


def test_blocks():
    layer = trained(layer_of(lambda x: torch.sin(2 * x + 1), k=D, structure=Blocks(1, 1)), 50)
    check_state(layer)
    (x, gy), *_ = problems(1, k=D, seed=2)
    assert close(gradient(layer, x, gy), gy * 2 * torch.cos(2 * x + 1), 1e-6)


def test_a_pattern():
    pattern = torch.eye(D, dtype=torch.bool) | torch.eye(D, dtype=torch.bool).roll(1, 0)

    def fn(x):
        return torch.sin(x) * torch.cos(x.roll(1, 1))

    layer = trained(layer_of(fn, k=D, structure=pattern), 50)
    check_state(layer)
    (x, gy), *_ = problems(1, k=D, seed=2)
    assert close(gradient(layer, x, gy), exact_gradient(fn, x, gy), 1e-6)


@pytest.mark.parametrize("horizon", [None, 2])
def test_sequences(horizon):
    box = Echo(d=D, d_out=2, radius=0.01)
    layer = layer_of(box, k=2, structure=Sequence(horizon))
    for x, gy in problems(30, rows=4 * 5, k=2):
        x, gy = x.view(4, 5, D), gy.view(4, 5, 2)
        g = gradient(layer, x, gy)
    check_state(layer)
    assert close(g, box.vjp(x, gy), 1e-2 if horizon else 1e-5)


@pytest.mark.parametrize("kind", ["given", "own"])
def test_boxes_with_memory(kind):
    if kind == "given":
        layer = layer_of(leaky, k=D, state=torch.zeros(1, D, dtype=torch.float64))
    else:
        layer = layer_of(Device(), k=D)
    state = torch.zeros(32, D, dtype=torch.float64)
    for x, gy in problems(40, k=D):
        new = 0.5 * state + torch.sin(x)
        assert close(gradient(layer, x, gy), gy * 2 * new * x.cos(), 1e-4)
        state = new
    check_state(layer)
    assert layer.policy_state.schedule.trials > 3


def test_context():
    def fn(x, scale, shift):
        return waves(scale * x) + shift

    layer = layer_of(fn)
    for x, gy in problems(50):
        scale, shift = x[:, :1].exp(), gy.clone()
        g = gradient(layer, x, gy, scale, shift)
    check_state(layer)
    assert close(g, scale * exact_gradient(waves, scale * x, gy), 1e-5)


def test_numpy():
    layer = trained(layer_of(lambda x: np.sin(x), k=D), 50)
    (x, gy), *_ = problems(1, k=D, seed=2)
    assert close(gradient(layer, x, gy), gy * x.cos(), 1e-6)


@pytest.mark.parametrize("estimator", ["central", "forward", "simultaneous"])
@pytest.mark.parametrize("kind", ["one row", "constant", "zero", "one input constant", "far from zero"])
def test_inputs_of_all_kinds(kind, estimator):
    layer = layer_of(noisy(waves, 1e-5), estimator=estimator)
    errors = []
    for x, gy in problems(100, rows=1 if kind == "one row" else 8):
        if kind == "constant":
            x[:] = 0.3
        if kind == "zero":
            x[:] = 0
        if kind == "one input constant":
            x[:, 1] = 1e-3
        if kind == "far from zero":
            x += 100
        g, exact = gradient(layer, x, gy), exact_gradient(waves, x, gy)
        errors.append((g - exact).norm() / exact.norm())
    check_state(layer)
    if estimator != "simultaneous":
        assert torch.stack(errors[50:]).median() < (0.01 if estimator == "central" else 0.1)


def test_loss_gradients_of_all_kinds():
    layer = layer_of(noisy(waves, 1e-5))
    for i, (x, gy) in enumerate(problems(100)):
        if i % 5 == 4:
            gy[:] = 0
        gy[i % 7 :: 7] = math.nan if i % 2 else 0
        g = gradient(layer, x, gy)
        bad = ~torch.isfinite(gy).all(1)
        assert not torch.isfinite(g[bad]).any()
        assert torch.isfinite(g[~bad]).all()
        check_state(layer)
    (x, gy), *_ = problems(1, seed=2)
    assert close(gradient(layer, x, gy), exact_gradient(waves, x, gy), 1e-2)


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_a_start_that_says_nothing(bad):
    layer = layer_of(noisy(waves, 1e-5))
    for x, gy in problems(3):
        assert not gradient(layer, x, gy * bad).nan_to_num(0, 0, 0).any()
    assert layer.stats.evaluations == 3 * 32 * (1 + 2 * D)  # no trials
    trained(layer, 100)
    (x, gy), *_ = problems(1, seed=2)
    assert signs_right(gradient(layer, x, gy), exact_gradient(waves, x, gy)) > 0.9


def test_a_read_out_that_starts_at_zero():
    layer, usual = layer_of(noisy(waves, 1e-5)), trained(layer_of(noisy(waves, 1e-5)), 300)
    (x, gy), *_ = problems(1)
    gradient(layer, x, 0 * gy)
    trained(layer, 300)
    assert (layer.policy_state.step / usual.policy_state.step).log2().abs().max() < 1.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_all_precisions(dtype):
    layer = trained(layer_of(waves), 60, dtype=dtype)
    check_state(layer)
    (x, gy), *_ = problems(1, dtype=dtype, seed=2)
    g, exact = gradient(layer, x, gy), exact_gradient(waves, x.double(), gy.double())
    assert g.dtype == dtype
    assert close(g.double(), exact, max(8 * torch.finfo(dtype).eps, 1e-3 if dtype != torch.float64 else 1e-7))


# ---- the standard error


@pytest.mark.parametrize("estimator", ["central", "forward"])
@pytest.mark.parametrize("structure", [None, Blocks(2, 3)], ids=str)
def test_the_standard_error_is_that_of_the_gradient(structure, estimator):
    weight = DRAWN[:-1].clone()
    if structure is not None:
        weight[:2, 3:] = weight[2:, :3] = 0
    layer = layer_of(noisy(lambda x: x @ weight, 1e-2), structure=structure, estimator=estimator)
    (x, gy), *_ = problems(1)
    for _ in range(300):
        gradient(layer, x, gy)
    seen = []
    layer.register_step_hook(lambda box, step: seen.append((step.g - gy @ weight.T) / box.standard_error(step)))
    for _ in range(200):
        gradient(layer, x, gy)
    ratio = torch.stack(seen).square().mean(0).sqrt()  # [B, d]
    assert 0.75 < ratio.square().mean().sqrt() < 1.45  # some twenty trials say no more of the noise
    assert ((ratio > 0.6) & (ratio < 1.9)).all()


def test_a_policy_that_measures_no_noise_has_no_standard_error():
    layer = layer_of(waves, policy="bond", noise="auto")
    layer.register_step_hook(lambda box, step: box.standard_error(step))
    with pytest.raises(BoxError, match="calibrated"):
        trained(layer, 1)


# ---- noise="auto"


@pytest.mark.parametrize("half_width", [1e-4, 1e-3, 1e-2, 1e-1])
def test_uniform_noise_is_measured(half_width):
    random = torch.Generator().manual_seed(0)

    def fn(x):
        y = waves(x)
        return y + half_width * torch.empty_like(y).uniform_(-1, 1, generator=random)

    layer = trained(layer_of(fn, policy="bond", noise="auto"), 100)
    assert 1 / 1.5 < layer.policy_state.schedule.noise / half_width < 1.5


@pytest.mark.parametrize("decimals", [1, 2, 4])
def test_rounding_is_measured(decimals):
    def fn(x):
        return waves(x).mul(10**decimals).round().div(10**decimals)

    layer = trained(layer_of(fn, policy="bond", noise="auto"), 100, dtype=torch.float32)
    assert 1 / 4 < layer.policy_state.schedule.noise / (0.5 * 10**-decimals) < 4


def test_rounding_is_measured_in_double_precision():
    layer = layer_of(lambda x: waves(x).mul(100).round().div(100), policy="bond", noise="auto")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that outputs do not change at all
        trained(layer, 100)
    assert 1 / 4 < layer.policy_state.schedule.noise / 0.005 < 4


def test_an_exact_box_has_the_noise_of_its_precision():
    layer = trained(layer_of(waves, policy="bond", noise="auto"), 100, dtype=torch.float32)
    assert layer.policy_state.schedule.noise < 10 * torch.finfo(torch.float32).eps


def right_signs(noise, dtype):
    (x, gy), *_ = problems(1, rows=200, dtype=dtype, seed=2)
    layer = trained(layer_of(noisy(waves, 1e-2), policy="bond", noise=noise), 100, dtype=dtype)
    return signs_right(gradient(layer, x, gy), exact_gradient(waves, x, gy))


def test_measured_noise_makes_better_signs():
    measured = right_signs("auto", torch.float32)
    assert measured > right_signs(None, torch.float32) + 0.1
    assert measured > right_signs(math.sqrt(3) * 1e-2, torch.float32) - 0.03


def test_so_it_does_in_double_precision():
    assert right_signs("auto", torch.float64) > right_signs(math.sqrt(3) * 1e-2, torch.float64) - 0.03


# ---- graphs


@needs_cuda
@pytest.mark.parametrize(
    ("settings", "steps"), [({}, 60), ({"policy": "bond", "noise": "auto"}, 700)], ids=["calibrated", "auto"]
)
@pytest.mark.parametrize("estimator", ["central", "forward", "simultaneous"])
def test_graphed_and_eager_training_agree(estimator, settings, steps):
    def make_box():
        return layer_of(ffnn([5, 50, 4]), d=5, k=4, estimator=estimator, **settings)

    data = batches("cuda", steps)
    eager, graphed = Trainer("cuda", make_box), Trainer("cuda", make_box)
    eager.run(eager.step, data)
    step = GraphedStep(graphed.step, graphed.model, graphed.optimizer)
    graphed.run(step, data)
    assert same_state(graphed.result(), eager.result())
    assert graphed.box.stats[:3] == eager.box.stats[:3]
    assert step.replays > 0
    assert graphed.box.policy_state.schedule.trials == eager.box.policy_state.schedule.trials >= 3
