"""The evaluator that a probe recommends: for boxes that wait, that compute, and that have a cost per call."""

import os
import threading
import time

import numpy as np
import pytest
import torch

import bondgrad
from bondgrad import probe
from bondgrad.evaluators import Local, Processes, Threads
from tests.helpers import close, gradient
from tests.probing.test_probe import rows
from tests.probing.test_probe_code import pasted

LONG = 0.01  # seconds of a call, in which a second one surely begins


def waits(x: torch.Tensor):
    assert len(x) == 1, "one row at a time"
    time.sleep(LONG)
    return torch.sin(x)


def computes(x: np.ndarray):
    """In Python, for some milliseconds a row."""
    for _ in x:
        total = 0.0
        for i in range(100_000):
            total += i
    return np.sin(x) + 0 * total


def short(fn, **options):
    return probe(fn, rows(20), budget=400, **options)


@pytest.fixture
def several_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)


def trains(report, fn):
    """The box that the recommended code makes, which has the right gradient."""
    box = pasted(report, fn, policy="bond")
    x, gy = torch.randn(2, 4), torch.ones(2, 4)
    for _ in range(2):
        found = gradient(box, x, gy)
    assert close(found, x.cos())
    return box


def test_threads_for_a_box_that_waits():
    report = short(waits)
    assert report.overlap.waits
    assert report.overlap.threads_help
    assert "it waits, so that threads help" in report.words["Side by side"]
    assert "a row, one row at a time, deterministic: Threads(8, max_rows=1) brings a step of 20 rows" in str(report)
    box = trains(report, waits)
    assert isinstance(box.evaluator, Threads)
    assert (box.evaluator.n, box.evaluator.max_rows) == (8, 1)
    assert len(box.stats.workers) > 1
    box.evaluator.close()


def test_processes_for_a_box_that_computes(several_cores):
    pytest.importorskip("pebble")
    pytest.importorskip("cloudpickle")
    report = short(computes)
    assert not report.overlap.threads_help
    assert report.overlap.picklable
    assert "Processes(os.cpu_count()) brings a step of 20 rows" in report.words["Evaluator"]
    assert report.code.startswith("import os\n")
    box = trains(report, computes)
    assert isinstance(box.evaluator, Processes)
    box.evaluator.close()


def test_a_box_that_computes_and_cannot_be_sent(several_cores):
    pytest.importorskip("cloudpickle")
    lock = threading.Lock()

    def locked(x: np.ndarray):
        with lock:
            return computes(x)

    report = short(locked)
    assert report.overlap.picklable is False
    assert "Processes(os.cpu_count(), factory)" in report.words["Evaluator"]
    assert "evaluator" not in report.reasons
    trains(report, locked)


def test_eager_for_a_box_with_a_cost_per_call(clock):
    def costs_per_call(x: torch.Tensor):
        clock.sleep(0.05)
        return torch.sin(x)

    report = probe(costs_per_call, rows(20), budget=3000)
    assert report.reasons["eager"].startswith("brings a step of 20 rows")
    assert "evaluator" not in report.reasons
    assert trains(report, costs_per_call).eager


def test_no_eager_for_a_box_that_takes_a_seed(clock):
    def seeded(x: torch.Tensor, seed=None):
        clock.sleep(0.01)
        return torch.sin(x)

    report = probe(seeded, rows(), budget=3000)
    assert report.speed.vectorised
    assert "eager" not in report.reasons


class Counting:
    """Slow, and knows how many calls were in it at the same time."""

    def __init__(self):
        self.inside = self.most = 0

    def __call__(self, x: torch.Tensor):
        self.inside += 1
        self.most = max(self.most, self.inside)
        time.sleep(LONG)
        self.inside -= 1
        return torch.sin(x)


class WithSnapshots(Counting):
    def snapshot(self):
        return 0

    def restore(self, _):
        pass


class Remembers(Counting):
    before = 0.0

    def __call__(self, x: torch.Tensor):
        y, self.before = super().__call__(x) + self.before, float(x.sum())
        return y


class Quick(Counting):
    def __call__(self, x: torch.Tensor):
        return torch.sin(x)


def test_a_slow_box_is_called_in_two_threads():
    box = Counting()
    assert short(box).overlap.safe
    assert box.most == 2


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (WithSnapshots, {}),
        (Remembers, {}),
        (Quick, {}),
        (Counting, {"evaluator": Local()}),
        (Counting, {"seconds": 0.02}),
    ],
)
def test_boxes_that_are_never_called_in_two_threads(kind, options):
    box = kind()
    report = short(box, **options)
    assert report.overlap is None
    assert box.most <= 1
    assert "Side by side" not in report.words
    if "seconds" not in options:
        assert not any("Side by side" in text for text in report.left_out)


def test_a_box_that_two_threads_cannot_share():
    class Shares:
        def __call__(self, x: torch.Tensor):
            self.x = x
            time.sleep(LONG)
            return torch.sin(self.x)

    report = short(Shares())
    assert not report.overlap.safe
    assert report.advice is None or report.advice.argument == "eager"


def test_a_box_that_raises_in_threads():
    inside = threading.Lock()

    def refuses(x: torch.Tensor):
        if not inside.acquire(blocking=False):
            raise OSError("busy")
        try:
            time.sleep(LONG)
            return torch.sin(x)
        finally:
            inside.release()

    report = short(refuses)
    assert not report.overlap.safe
    assert "threads must not share it" in report.words["Side by side"]
    assert report.flaky == 0


def test_a_quick_box_is_reported_as_ever():
    report = bondgrad.probe(torch.sin, rows())
    assert (report.overlap, report.advice) == (None, None)
    assert not {"evaluator", "eager"} & set(report.reasons)


class Computes(Counting):
    def __call__(self, x: np.ndarray):
        self.inside += 1
        self.most = max(self.most, self.inside)
        y = computes(x)
        self.inside -= 1
        return y


def test_a_box_that_computes_is_never_called_in_two_threads():
    """Libraries that are not made for that may end the program."""
    box = Computes()
    report = short(box)
    assert report.overlap.processes_help
    assert report.overlap.together is None
    assert box.most == 1


def test_quick_rows_that_make_slow_calls():
    def loop(x: np.ndarray):
        for _ in x:
            sum(range(10_000))
        return np.sin(x)

    report = probe(loop, rows(), budget=6000)
    assert report.speed.latency < 1e-3
    assert report.overlap.processes_help


def test_calls_that_fail_now_and_then_are_made_again():
    numbers = np.random.default_rng(0)

    def flaky(x: torch.Tensor):
        if numbers.random() < 0.2:
            raise OSError("busy")
        return waits(x)

    report = short(flaky)
    assert report.overlap.threads_help
    assert f"Threads(8, max_rows=1, retries={report.failures.retries})" in report.arguments["evaluator"]


def test_cost_is_that_with_the_recommended_evaluator():
    report = short(waits)
    alone = report.speed.seconds(20 * 9)
    assert report.cost(20)["central"].seconds < alone / 4
