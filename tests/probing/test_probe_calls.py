"""What a probe finds out about calls: their time, their size, and those that fail."""

import math

import numpy as np
import pytest
import torch

from bondgrad import BoxError, probe
from tests.probing.test_probe import rows
from tests.probing.test_probe_code import pasted


def test_a_box_that_refuses_large_calls():
    def fn(x):
        if len(x) > 64:
            raise ValueError("at most 64 rows")
        return torch.sin(x)

    report = probe(fn, rows())
    assert "evaluator=bondgrad.evaluators.Local(max_rows=64)" in report.code
    assert "no more than about 64 rows in a call" in report.words["Speed"]
    assert not report.flaky
    pasted(report, fn)(rows().requires_grad_()).sum().backward()


@pytest.mark.parametrize("most", [2, 3, 20, 100, 300, 1000])
def test_the_largest_call_is_within_what_it_takes(most):
    def fn(x):
        if len(x) > most:
            raise ValueError("too many")
        return torch.sin(x)

    report = probe(fn, rows())
    assert report.verdict.startswith("deterministic, smooth, float32")
    found = report.speed.max_rows
    assert most == 1000 if found is None else most / 8 <= found <= most


def test_the_time_of_a_call_is_not_that_of_its_rows(clock):
    def fn(x):
        clock.sleep(0.05)
        return torch.sin(x)

    report = probe(fn, rows(), seconds=30)
    assert report.left_out == []
    assert "a call, vectorised" in report.verdict
    hasty = probe(fn, rows(), seconds=0.5)
    for found, batch in ((report, 64), (hasty, 1)):  # two calls a step, and trials now and then
        assert found.cost(batch)["central"].seconds / found.speed.latency < 4
    assert not report.cost(8)["central"].extrapolated
    assert report.cost(4096)["central"].extrapolated
    assert "extrapolated" in report.text(batch=4096)
    assert any("calls that there is time for" in text for text in hasty.left_out)


def test_a_box_that_writes_into_what_it_is_given():
    def fn(x):
        x *= 2
        return torch.sin(x)

    report = probe(fn, rows(dtype=torch.float64))
    assert report.verdict.startswith("deterministic, smooth, float64")
    assert not report.history.remembers


@pytest.mark.parametrize("share", [0.01, 0.03, 0.1])
def test_calls_that_fail_at_random(share):
    said = 0
    for seed in range(10):
        numbers = np.random.default_rng(seed)

        def fn(x, numbers=numbers):
            if numbers.random() < share:
                raise OSError("timeout")
            return torch.sin(x)

        report = probe(fn, rows(), seed=seed)
        assert report.speed.max_rows is None
        assert report.ranges.failures == []
        assert "deterministic" in report.verdict
        assert ("fails at random" in report.verdict) == (report.flaky > 0)
        said += report.flaky > 0
    assert said >= (10 if share > 0.05 else 5)


def test_rows_that_fail_at_random():
    for seed in range(10):
        numbers = np.random.default_rng(seed)

        def fn(x, numbers=numbers):
            y = torch.sin(x)
            y[torch.from_numpy(numbers.random(len(x)) < 0.05)] = math.nan
            return y

        report = probe(fn, rows(), seed=seed)
        assert "fails at random" in report.verdict
        assert report.ranges.failures == []
        assert report.ranges.failing_rows < 0.01
        assert "nan" not in str(report)


def test_one_row_at_a_time_and_failures_at_random():
    numbers = np.random.default_rng(0)

    def fn(x):
        if len(x) > 1 or numbers.random() < 0.1:
            raise OSError("timeout")
        return torch.sin(x)

    report = probe(fn, rows())
    assert report.speed.max_rows == 1
    assert "fails at random" in report.verdict
    assert report.left_out == []


def test_a_box_that_works_in_few_places():
    for seed in range(5):

        def fn(x):
            if bool((x[:, 0] > -1.3).any()):
                raise ValueError("only below")
            return torch.sin(x)

        assert "fails in places" in probe(fn, rows(generator=torch.Generator().manual_seed(seed)), seed=seed).verdict


def test_a_seed_that_must_be_given():
    def fn(x, *, seed):
        return torch.sin(x) + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))

    report = probe(fn, rows())
    assert report.randomness.takes_seed
    assert not report.randomness.deterministic
    assert report.randomness.std[0] == pytest.approx(0.1, rel=0.2)


def test_a_box_that_takes_eight_rows_or_more():
    def fn(x):
        if len(x) < 8:
            raise ValueError("too few")
        return torch.sin(x)

    report = probe(fn, rows(), seconds=20)
    assert report.verdict.startswith("deterministic, smooth, float32")
    assert "does not take one row alone; 8 take" in report.words["Speed"]
    assert str(probe(fn, rows(), budget=40))


@pytest.mark.parametrize(("least", "found"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8)])
def test_the_smallest_call_that_it_takes(least, found):
    def fn(x):
        if len(x) < least:
            raise ValueError("too few")
        return torch.sin(x)

    report = probe(fn, rows())
    assert min(report.speed.batches) == found
    assert report.flaky == 0
    assert report.left_out == []


@pytest.mark.parametrize("failing", [62, 64])
def test_a_box_is_given_up_after_64_rows(failing):
    """The first row is asked about alone, and among others."""
    calls = 0

    def fn(x: torch.Tensor):
        nonlocal calls
        calls += 1
        if calls <= failing + 1:
            raise ValueError("not yet")
        return torch.sin(x)

    if failing == 64:
        with pytest.raises(BoxError, match="raised ValueError"):
            probe(fn, rows())
        assert calls == 64 + 1
    else:
        assert probe(fn, rows()).out_features == 4


def test_a_loop_over_rows_is_not_vectorised(clock):
    def loop(x: np.ndarray):
        clock.sleep(1e-5 * len(x))
        return np.sin(x)

    speed = probe(loop, rows()).speed
    assert not speed.vectorised
    assert "the time grows with the rows" in speed.words
    assert probe(torch.sin, rows()).speed.vectorised
