"""Boxes whose answers are coarse, large, flat or at their limits, and what a probe must not make of that."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from bondgrad import probe
from bondgrad.probing._recommendation import choose_noise
from tests.probing.test_probe import rows

D = 6


def typical(seed=0, n=200, d=D):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(1000 + seed))


def weights(seed=0, d=D, d_out=4):
    return torch.randn(d, d_out, generator=torch.Generator().manual_seed(seed)) / d**0.5


# ---- an offset


def test_noise_above_an_offset_is_seen():
    for seed in range(5):
        numbers, w = np.random.default_rng(seed), weights(seed)

        def fn(x, numbers=numbers, w=w):
            return 101325 + 5 * (x @ w) + 0.1 * torch.from_numpy(numbers.normal(size=(len(x), 4))).float()

        report = probe(fn, typical(seed), seed=seed)
        assert report.verdict.startswith("noisy device, half-width 0.2")
        assert "structure" not in report.reasons


@pytest.mark.parametrize("size", [0.5, 0.05, 0.01])
def test_an_offset_invents_no_structure(size):
    for seed in range(5):
        w = weights(seed)
        report = probe(lambda x, w=w: 101325 + size * (x @ w), typical(seed), seed=seed)
        assert "structure" not in report.reasons
        assert not report.rounding.quantised
        assert not report.sensitivity.dead


def test_few_rows_and_an_offset_are_no_lattice():
    for offset in (300, 1e4, 1e5):
        for seed in range(4):
            x = typical(seed, 20, 3)
            report = probe(lambda x, c=offset: c + x.sum(1, keepdim=True).sin(), x, seed=seed, budget=3000)
            assert not report.rounding.quantised


# ---- coarse answers


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounded_answers_in_a_finer_type(dtype):
    w = weights()
    report = probe(lambda x: torch.tanh(x @ w).to(dtype).float(), typical())
    assert report.rounding.returned == "float32"
    assert "coarser than the float32 that it returns" in choose_noise(report)[1]
    assert choose_noise(probe(lambda x: torch.tanh(x @ w).to(dtype), typical())) is None


def test_whole_numbers_among_the_rows_are_no_lattice():
    x = torch.randint(0, 10, (200, 4), generator=torch.Generator().manual_seed(0)).float()
    report = probe(lambda x: x @ torch.tensor([[1.0], [2.0], [3.0], [5.0]]), x)
    assert "quantised" not in report.verdict
    assert probe(lambda x: (x @ torch.tensor([[1.0], [2.0], [3.0], [5.0]])).round(), x).rounding.quantised


def test_few_values_say_nothing_of_the_arithmetic():
    w = weights()
    for fn in (lambda x: torch.zeros(len(x), 3), lambda x: torch.full((len(x), 3), 0.5), lambda x: (x @ w > 0).float()):
        assert probe(fn, typical()).rounding.precision == "float32"


def test_coarse_outputs_are_deaf_not_their_inputs_dead():
    mistaken = 0  # now and then an output does not react at any of the rows
    for seed in range(6):
        w = weights(seed)
        for fn in (lambda x, w=w: (x @ w > 0).float(), lambda x, w=w: (x @ w).argmax(1, keepdim=True)):
            report = probe(fn, typical(seed), seed=seed)
            assert not report.sensitivity.dead
            assert not any("leave them out" in text for text in report.warnings)
            mistaken += "structure" in report.reasons
    assert mistaken <= 1


def test_a_rough_box():
    for seed in range(5):
        w = weights(seed)

        def fn(x, w=w):
            return x @ w + 0.05 * (torch.sin(x.sum(1, keepdim=True) * 1e4) * 43758.5 % 1)

        report = probe(fn, typical(seed), seed=seed)
        assert report.verdict.startswith("deterministic, rough, float32")
        assert "structure" not in report.reasons
        assert not probe(lambda x, w=w: torch.tanh((x - 1e4) @ w), typical(seed) + 1e4, seed=seed).rounding.rough
        ripples = probe(lambda x, w=w: x @ w + 0.02 * torch.sin(2000 * (x @ w)), typical(seed), seed=seed)
        assert "bfloat16" not in ripples.verdict


# ---- flat and infinite answers, and limits


@pytest.mark.parametrize("d_out", [1, 4, 64])
def test_saturation_whatever_the_number_of_outputs(d_out):
    for seed in range(5):
        w = weights(seed, D, d_out)
        assert probe(lambda x, w=w: torch.tanh(100 * (x @ w)), typical(seed), seed=seed).ranges.saturated
        assert not probe(lambda x, w=w: torch.tanh(x @ w), typical(seed), seed=seed).ranges.saturated


def test_infinite_answers_are_not_saturated():
    for seed in range(5):
        w = weights(seed)
        report = probe(lambda x, w=w: torch.where(x[:, :1] > 1.5, math.inf, (x @ w).sin()), typical(seed), seed=seed)
        assert not report.ranges.saturated
        assert report.ranges.failures[0].how == "infinite"


def test_rows_at_the_limits():
    x, w = (typical() > 0).float(), weights()
    report = probe(lambda x: torch.tanh(x @ w), x, limits=(0, 1))
    assert "constant" not in report.verdict
    assert report.steps.changes
    assert report.steps.low_5 < 1e-3
    assert report.steps.high_5 >= 0.1


@pytest.mark.parametrize(("width", "floor"), [(0.01, False), (1.0, True)])
def test_a_floor_needs_room_within_the_limits(width, floor):
    """Two spacings: around 1,000, the sixteen points of the narrowest take 0.016, those of the next 0.25."""
    report = probe(lambda x: torch.sin(300 * x), 1000 + width * torch.rand(200, 2), limits=(1000, 1000 + width))
    assert (report.rounding.floor > 0) == floor
    assert report.left_out == []


# ---- traces


def test_buffers_that_a_module_replaces():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.zeros(()))

        def forward(self, x):
            self.n = self.n + 1
            return torch.sin(x)

    module = Counter()
    before = module.n
    probe(module, rows())
    assert module.n is before
    assert int(module.n) == 0
