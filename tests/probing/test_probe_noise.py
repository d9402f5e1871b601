"""What a probe calls noise, and what it does not take noise for."""

import numpy as np
import pytest
import torch

from bondgrad import per_row, probe
from bondgrad.probing._recommendation import choose_noise
from tests.probing.test_probe import D, rows
from tests.probing.test_probe_code import pasted


def test_noise_that_is_the_same_in_every_call():
    def reseeded(x):
        return torch.sin(x) + 0.05 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))

    def by_default(x, seed=0):
        return torch.sin(x) + 0.05 * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))

    for fn in (reseeded, by_default):
        report = probe(fn, rows())
        assert report.verdict.startswith("the same noise in every call, by place in the call, half-width 0.1")
        assert report.randomness.half_width == pytest.approx([0.1] * D, rel=0.3)
        assert float(choose_noise(report)[0]) == pytest.approx(0.1, rel=0.3)
        assert not report.company.matters
        pasted(report, fn)
    assert report.randomness.takes_seed


def test_rare_noise_is_never_advised_as_none():
    own = torch.Generator().manual_seed(0)

    def fn(x):
        return torch.sin(x) + (torch.rand(x.shape, generator=own) < 0.01).float()

    report = probe(fn, rows())
    assert not report.randomness.deterministic
    assert float(choose_noise(report)[0]) > 0


def device(kind, seed):
    """A box with noise of some kind that it draws itself."""
    numbers = np.random.default_rng(seed)

    def fn(x):
        y = torch.sin(x).cumsum(1)
        drawn = {
            "cauchy": lambda: 0.01 * numbers.standard_cauchy(y.shape),
            "outliers": lambda: (numbers.random(y.shape) < 0.003) * numbers.normal(size=y.shape),
            "outlying rows": lambda: (numbers.random((len(y), 1)) < 0.01) * numbers.normal(size=y.shape),
            "in one region": lambda: 0.05 * numbers.normal(size=y.shape) * (x[:, :1] > 0.5).numpy(),
            "of five ulps": lambda: 3e-6 * numbers.normal(size=y.shape),
        }[kind]()
        return y + torch.from_numpy(drawn).float()

    return fn


@pytest.mark.parametrize("kind", ["cauchy", "outliers", "outlying rows", "in one region", "of five ulps"])
def test_noise_is_taken_for_nothing_else(kind):
    for seed in range(8):
        report = probe(device(kind, seed), rows(generator=torch.Generator().manual_seed(seed)), seed=seed)
        assert (
            not report.randomness.deterministic or kind == "outlying rows"
        )  # which may not come while it is looked for
        assert not report.company.matters
        assert not report.history.remembers
        assert report.randomness.generator is None
        assert "as set here" not in report.verdict


def test_memory_is_taken_for_nothing_else():
    before = torch.zeros(D)

    def fn(x):
        nonlocal before
        y = torch.sin(x) + 0.1 * before
        before = x.mean(0)
        return y

    for seed in range(5):
        report = probe(fn, rows(), seed=seed)
        assert report.history.remembers
        assert not report.company.matters
        assert "as set here" not in report.verdict


@pytest.mark.parametrize(("tolerance", "step"), [(1e-6, 1.0), (1e-3, 1.0), (1e-10, 0.3)])
def test_a_solver_that_starts_from_its_last_answer_has_no_memory(tolerance, step):
    """What it remembers is as small as rounding, and hides neither smoothness nor gradients."""
    z = 1.0

    def solve(p):
        nonlocal z
        a = float(p[0]) * float(p[1])
        for _ in range(500):
            dz = step * (z**3 + z - a - 2) / (3 * z * z + 1)
            z -= dz
            if abs(dz) < tolerance:
                break
        return z

    report = probe(per_row(solve), rows(d=2))
    assert not report.history.remembers
    assert 0 < report.history.rounding < 1e-4
    assert "Its memory is no more than rounding" in report.words["History"]
    assert report.verdict.startswith("deterministic, smooth")
    assert report.gradients.predicted > 0.97
    assert not any("state" in text for text in report.warnings)


@pytest.mark.parametrize(("size", "remembers"), [(1e-3, True), (1e-6, False)])
def test_memory_matters_from_some_size_on(size, remembers):
    before = 0.0

    def fn(x):
        nonlocal before
        y = torch.sin(x) + size * before
        before = float(x[0, 0])
        return y

    report = probe(fn, rows(dtype=torch.float64))
    assert report.history.remembers == remembers
    assert (report.history.rounding > 0) == (not remembers)
