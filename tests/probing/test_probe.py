"""Probe names boxes for what they are, within its budget and the limits, and leaves no trace."""

import math
import random

import numpy as np
import pytest
import torch
from torch import nn

from bondgrad import probe
from bondgrad.evaluators import Local
from bondgrad.networks import ffnn
from bondgrad.probing._recommendation import choose_noise
from bondgrad.testing.boxes import Sparse, TanhNetwork
from tests.helpers import needs_cuda, noisy
from tests.patterns import blocks

D = 4
WEIGHTS = np.random.default_rng(0).normal(size=(D, 3)) / 2


def simulator(x):
    return np.tanh(x @ WEIGHTS.astype(x.dtype))


def network(*middle):
    return nn.Sequential(nn.Linear(D, 30), *middle, nn.Linear(30, 3))


def rows(n=200, d=D, **kind):
    return torch.randn(n, d, **kind)


# ---- what boxes are


def test_a_numpy_function():
    report = probe(simulator, rows())
    assert report.verdict.startswith("deterministic, smooth, float32")
    assert report.randomness.exact
    assert (report.in_features, report.out_features) == (D, 3)
    assert report.rounding.floor < 1e-6
    assert report.steps.low_5 < 1e-4
    assert report.steps.high_5 > 0.1
    assert 1e-4 < report.steps.best < 0.3
    assert set(report.reasons) == {"in_features", "out_features"}
    assert report.left_out == []
    assert "float64" in probe(simulator, rows(dtype=torch.float64)).verdict


@pytest.fixture
def tf32_allowed():
    torch.set_float32_matmul_precision("high")
    yield
    assert torch.get_float32_matmul_precision() == "high"
    torch.set_float32_matmul_precision("highest")


def check_tf32(report):
    assert "float32, but TF32 or float16 as set here" in report.verdict
    assert report.rounding.floor < 1e-5
    assert 1e-5 < report.rounding.shortcut < 2e-3
    assert "noise" not in report.reasons  # BlackBox switches it off


@needs_cuda
def test_a_network_with_tf32_on(tf32_allowed):
    check_tf32(probe(ffnn([50, 500, 50]).cuda(), rows(d=50, device="cuda")))


def test_a_function_that_does_as_tf32_does(tf32_allowed):
    first, second = (0.1 * torch.randn(*shape) for shape in ((D, 500), (500, 3)))

    def fn(x):
        rounded = rounded_to_tf32 if torch.get_float32_matmul_precision() == "high" else torch.Tensor.clone
        return rounded(torch.tanh(rounded(x) @ rounded(first))) @ rounded(second)

    check_tf32(probe(fn, rows()))


def test_a_network_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        report = probe(network(nn.Tanh()), rows())
    assert "float32, but bfloat16 as set here" in report.verdict
    assert "full_precision=False" in str(report)


def rounded_to_tf32(x):
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize(
    ("rounded", "digits"), [(rounded_to_tf32, "3 digits"), (lambda x: x.bfloat16().float(), "2 digits")]
)
def test_coarse_arithmetic_inside(rounded, digits):
    first, second = (0.3 * torch.randn(*shape) for shape in ((D, 30), (30, 3)))
    report = probe(lambda x: rounded(torch.tanh(rounded(x) @ rounded(first))) @ rounded(second), rows())
    assert f"good to about {digits}" in report.verdict
    assert choose_noise(report)[1] == f"answers are good to about {digits}, fewer than float32 has"


def test_dropout():
    report = probe(network(nn.Tanh(), nn.Dropout(0.1)), rows())
    assert report.verdict.startswith("random: dropout (p = 0.1) in training mode, drawn from torch's generator")
    assert report.randomness.quiet_in_eval
    assert "noise" not in report.reasons  # BlackBox keeps modules in eval mode
    assert any("eval mode" in text for text in report.warnings)


def test_batch_normalisation_in_training_mode():
    report = probe(network(nn.BatchNorm1d(30), nn.Tanh()), rows())
    assert report.verdict.startswith("rows influence one another (batch normalisation in training mode)")
    assert min(report.speed.batches) == 2
    assert report.dependence is None
    assert "Structure: rows influence one another" in report.left_out[0]
    quiet = probe(network(nn.BatchNorm1d(30), nn.Tanh()).eval(), rows())
    assert not quiet.company.matters


def test_a_box_that_sleeps(clock):
    def sleepy(x):
        clock.sleep(2e-3 * len(x))
        return torch.sin(x)

    report = probe(sleepy, rows(), evaluator=Local(), budget=700)
    assert "ms a row, not vectorised" in report.verdict
    assert report.evaluations <= 700
    cost = report.cost(batch=10, steps=3600)["central"]
    assert cost.seconds == pytest.approx(2e-3 * cost.evaluations, rel=0.01)
    assert cost.hours == pytest.approx(cost.seconds)


def test_time_runs_out(clock):
    def slow(x):
        clock.sleep(0.02 * len(x))
        return torch.sin(x)

    report = probe(slow, rows(), seconds=1.5)
    assert report.evaluations <= 76
    assert report.speed is not None
    assert any(text.startswith("Structure") for text in report.left_out)


@pytest.mark.parametrize("name", ["uniform", "normal"])
def test_a_noisy_device(name):
    generator = torch.Generator().manual_seed(0)

    def device(x):
        y = torch.sin(x).cumsum(1)
        drawn = torch.rand(y.shape, generator=generator) * 2 - 1
        return y + 3e-3 * (drawn if name == "uniform" else torch.randn(y.shape, generator=generator) / 2)

    report = probe(device, rows())
    assert report.verdict.startswith("noisy device, half-width 0.003")
    assert all(abs(b / 3e-3 - 1) < 0.3 for b in report.randomness.half_width)
    assert report.randomness.generator is None
    assert report.steps.best >= 0.03
    assert choose_noise(report)[0] == f"{report.randomness.noise:.2g}"
    assert set(report.reasons) == {"in_features", "out_features"}  # the policy measures noise itself
    assert not report.history.drifts
    assert not report.history.remembers
    assert not report.company.matters


# ---- single findings


@pytest.mark.parametrize("name", ["torch", "numpy", "python"])
def test_seeds(name):
    def fn(x):
        drawn = {"torch": torch.randn(len(x), 1), "numpy": torch.from_numpy(np.random.randn(len(x), 1)).float()}
        return torch.sin(x) + 0.01 * drawn.get(name, random.gauss(0, 1))

    found = probe(fn, rows()).randomness
    assert found.generator == name
    assert found.within_a_call == (name != "python")


def test_rare_noise_is_not_taken_for_seeded():
    own = torch.Generator().manual_seed(0)

    def fn(x):
        assert len(x) == 1
        return torch.sin(x) + (torch.rand(x.shape, generator=own) < 0.03).float()

    for seed in range(3):
        found = probe(fn, rows(), seed=seed).randomness
        assert not found.deterministic
        assert found.generator is None


def test_a_seed_as_keyword():
    own = torch.Generator().manual_seed(0)

    def fn(x, seed=None):
        generator = own if seed is None else torch.Generator().manual_seed(seed)
        return torch.sin(x) + 0.01 * torch.randn(x.shape, generator=generator)

    report = probe(fn, rows())
    assert report.randomness.takes_seed
    assert "takes a seed" in report.verdict


def test_drift():
    asked = 0

    def fn(x):
        nonlocal asked
        asked += len(x)
        return torch.sin(x) + 1e-5 * asked

    report = probe(fn, rows())
    assert report.verdict.startswith("drifts")
    assert report.history.per_evaluation == pytest.approx(1e-5 / 0.63, rel=0.2)
    assert not report.history.remembers
    assert not report.company.matters
    slow = probe(noisy(fn, 1e-3), rows())
    assert slow.history.drifts
    assert slow.randomness.std[0] == pytest.approx(1e-3, rel=0.5)


def test_memory():
    before = torch.zeros(D)

    def fn(x):
        nonlocal before
        y = torch.sin(x) + 0.1 * before
        before = x.mean(0)
        return y

    report = probe(fn, rows())
    assert "remembers" in report.verdict


def test_rows_that_influence_one_another():
    assert probe(lambda x: x - x.mean(0), rows()).company.matters
    assert probe(lambda x: x.sort(0).values, rows()).company.matters
    assert probe(noisy(lambda x: x / x.std(0), 1e-2), rows()).company.matters


def test_decimals_and_converters():
    report = probe(lambda x: (100 * torch.sin(x)).round() / 100, rows())
    assert "quantised in steps of 0.01" in report.verdict
    assert "decimals" in report.rounding.words
    assert choose_noise(report)[0] == "0.005"
    step = 2 / 255
    found = probe(lambda x: (torch.tanh(x) / step).round() * step, rows()).rounding
    assert found.quantum == pytest.approx([step] * D, rel=1e-3)
    assert probe(noisy(TanhNetwork(), 1e-3), rows()).rounding.quantum == [None] * 6


def test_kinks_jumps_and_saturation():
    torch.manual_seed(1)
    assert probe(network(nn.ReLU()), rows()).smoothness.kind == "kinks"
    assert probe(network(nn.Tanh()), rows()).smoothness.kind == "smooth"
    jumping = probe(lambda x: torch.floor(3 * x).cumsum(1) + x, rows())
    assert jumping.smoothness.kind == "jumps"
    assert jumping.smoothness.jump > 0.1
    assert "saturated" in probe(lambda x: torch.tanh(20 * x), rows()).verdict
    assert "constant" in probe(lambda x: 0 * x + 1, rows()).verdict


def test_rounded_points_are_not_taken_for_jumps():
    for seed in range(5):
        assert probe(lambda x: torch.tanh(x - 100), rows() + 100, seed=seed).smoothness.kind == "smooth"
        assert probe(lambda x: torch.tanh(x.double()), rows(), seed=seed).smoothness.kind == "smooth"


def test_steps_cut_short_by_limits_are_not_judged():
    found = probe(torch.square, torch.rand(200, D), limits=(0, 1)).steps
    long = [e for h, e in zip(found.ladder, found.disagreement, strict=False) if h > 1e-3 and e is not None]
    assert len(long) > 3
    assert max(long) < 1e-3  # of a parabola, central differences are right over any step


def test_where_it_fails():
    def fn(x):
        y = torch.sin(x).clone()
        y[x[:, 2] < -1.3] = math.nan
        if bool((x[:, 1] > 1.7).any()):
            raise OverflowError("too much")
        return y

    report = probe(fn, rows())
    assert "fails in places" in report.verdict
    first, second = report.ranges.failures
    assert (first.input, first.low) == (1, pytest.approx(1.7, abs=0.01))
    assert (second.input, second.high) == (2, pytest.approx(-1.3, abs=0.01))
    assert "input 2 below -1.3: NaN" in str(report)
    assert "input 1 above 1.7: raises OverflowError" in str(report)


def test_inputs_that_matter():
    def fn(x):
        return torch.stack([3 * x[:, 0] + x[:, 2], x[:, 2].sin()], 1)

    found = probe(fn, rows()).sensitivity
    assert found.dead == [1, 3]
    assert found.change[0] == pytest.approx(3 / 10**0.5 / 2**0.5, rel=0.2)
    assert found.change[1] == 0
    assert probe(noisy(fn, 1e-3), rows()).sensitivity.dead == [1, 3]


def test_structure():
    report = probe(Sparse(blocks(10, 5, 3)), rows(d=50))
    assert report.dependence.blocks == (5, 3)
    assert "10 blocks of 5 inputs: 10 evaluations a row" in str(report)
    assert "Blocks(5, 3)" in report.code
    assert report.cost(batch=100)["central"].evaluations == 100 * (1 + 1.04 * 10)
    assert probe(simulator, rows()).dependence.groups == D


def test_one_row_at_a_time():
    def fn(x):
        assert len(x) == 1
        return torch.sin(x)

    report = probe(fn, rows())
    assert "one row at a time" in report.verdict
    assert "Local(max_rows=1)" in report.code
