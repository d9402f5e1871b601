"""Boxes that take a seed: the same random numbers at both ends of a move."""

import io
import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

import bondgrad
from bondgrad import BlackBox
from bondgrad.evaluators import Local, Threads
from bondgrad.policies import Fixed


def noise(x, seed):
    return torch.randn(len(x), x.shape[1], generator=torch.Generator().manual_seed(seed)).to(x)


def simulate(x, seed):
    return torch.sin(x) + noise(x, seed)


def by_name(x, *, seed):
    return simulate(x, seed)


def with_a_default(x: torch.Tensor, seed: int = 0):
    return simulate(x, seed)


def in_numpy(x, seed):
    return np.sin(x) + np.random.default_rng(seed).standard_normal(x.shape)


SEEDS = itertools.count()


class Simulator(nn.Module):
    def forward(self, x, seed):
        return simulate(x, seed)


def gradient(layer, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(layer(x).sum(), x)[0]


BOXES = {"in order": simulate, "by name": by_name, "default": with_a_default, "numpy": in_numpy, "module": Simulator()}


@pytest.mark.parametrize("fn", BOXES.values(), ids=BOXES)
@pytest.mark.parametrize("estimator", ["central", "simultaneous"])
@pytest.mark.parametrize("max_rows", [None, 3])
def test_noise_is_gone_from_differences(fn, estimator, max_rows):
    layer = BlackBox(fn, 4, estimator=estimator, evaluator=bondgrad.evaluators.Local(max_rows), seed=0)
    x = torch.randn(8, 4, dtype=torch.float64)
    for _ in range(3):
        g = gradient(layer, x)
    if estimator == "central":
        assert torch.allclose(g, x.cos(), atol=1e-3)
    assert g.abs().max() < 100  # with noise of 1 over steps of 1e-5 it would be thousands


@pytest.mark.parametrize(("fn", "least", "most"), [(simulate, 0.99, 1), (lambda x: simulate(x, next(SEEDS)), 0, 0.7)])
def test_signs_are_right_under_strong_noise(fn, least, most):
    layer = BlackBox(fn, 4, policy="bond", seed=0)
    x = torch.randn(64, 4)
    assert least <= bondgrad.sign_accuracy(gradient(layer, x), x.cos()) <= most


def test_forward_passes_differ():
    layer = BlackBox(simulate, 4, seed=0)
    x = torch.zeros(8, 4)
    first, second = layer(x), layer(x)
    assert not torch.equal(first, second)
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_a_context_may_stand_in_its_place():
    asked = []

    def fn(x, seed):
        asked.append(seed)
        return x * seed

    layer = BlackBox(fn, 2)
    layer(torch.ones(3, 2), torch.full((3, 1), 2.0))
    assert asked[-1].shape == (3, 1)


def test_training_resumes_bit_for_bit():
    x = torch.randn(5, 8, 4, dtype=torch.float64)
    layer = BlackBox(simulate, 4, policy="calibrated", seed=1)
    for rows in x[:2]:
        gradient(layer, rows)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = BlackBox(simulate, 4, policy="calibrated", seed=2)
    other.load_state_dict(torch.load(file))
    for rows in x[2:]:
        assert torch.equal(gradient(layer, rows), gradient(other, rows))


def test_steps_are_made_for_what_is_left_of_the_noise():
    layer = BlackBox(simulate, 4, policy="calibrated", seed=0)
    for _ in range(20):
        gradient(layer, torch.randn(32, 4))
    assert layer.policy_state.step.max() < 0.3
    assert layer.policy_state.schedule.noise < 1e-3


def test_a_step_with_seeds_is_not_captured():
    layer = BlackBox(simulate, 4, 4)
    gradient(layer, torch.randn(3, 4))
    assert layer.due()


@pytest.mark.parametrize("seed", [0, 2**31 - 1, 2**63 - 1])
def test_seeds_are_those_that_every_library_takes(seed):
    asked = []

    def fn(x, seed):
        asked.append(seed)
        return torch.sin(x)

    layer = BlackBox(fn, 3, seed=seed)
    for _ in range(5):
        gradient(layer, torch.randn(4, 3))
    assert all(0 <= number < 2**31 for number in asked)
    assert len(set(asked)) > 10  # a new one for every forward pass and every request


@pytest.mark.parametrize("evaluator", [Local(), Local(max_rows=3), Threads(2), Threads(2, max_rows=1)], ids=repr)
def test_noise_is_gone_also_where_one_end_was_asked_again(evaluator):
    lost = {5, 11, 12}

    def fn(x: torch.Tensor, seed: int):
        y = simulate(x, seed)
        for row in range(len(x)):
            count = next(rows)
            if count in lost:
                y[row] = math.nan
        return y

    rows = itertools.count(-8)
    with evaluator:
        layer = BlackBox(fn, 3, 3, evaluator=evaluator, policy=Fixed(1e-3), seed=0)
        x = torch.randn(8, 3)
        assert torch.allclose(gradient(layer, x), x.cos(), atol=1e-2)
    assert layer.stats.retried >= 4  # both ends of two pairs at least
