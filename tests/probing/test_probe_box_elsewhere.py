"""Measurements of boxes that belong to their evaluator: probe, detect and check."""

import pytest
import torch

import bondgrad
from bondgrad import BlackBox, probe
from bondgrad.evaluators import Answer, Description, Evaluator, Processes, Threads
from bondgrad.structure import detect
from tests.helpers import close, gradient
from tests.probing.test_probe import rows


class Simulator:
    """Two blocks of two inputs each. It is made where it is called."""

    def __call__(self, x: torch.Tensor):
        a, b, c, d = x.unbind(1)
        return torch.stack((a.sin() * b, b - a, (c * d).tanh(), d.cos() + c), 1)


class Seeded:
    def __call__(self, x: torch.Tensor, seed: int):
        return torch.sin(x) + 0.01 * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))


class Broken:
    def __call__(self, x: torch.Tensor):
        raise OSError("the device is off")


PATTERN = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]).bool()


@pytest.fixture(scope="module", params=[Threads, Processes])
def evaluator(request):
    if request.param is Processes:
        pytest.importorskip("pebble")
        pytest.importorskip("cloudpickle")
    with request.param(2, Simulator) as evaluator:
        yield evaluator


def test_probe(evaluator):
    report = probe(None, rows(), evaluator=evaluator, budget=5000)
    assert report.verdict.startswith("deterministic, smooth, float32")
    assert report.name == "Simulator"
    assert report.evaluations <= 5000
    assert report.dependence.blocks == (2, 2)
    assert report.speed.latency > 0
    assert report.rounding.returned == "float32"
    assert report.overlap is None  # where it is called is decided
    assert report.reasons["evaluator"] == "put here the one that was given to probe"
    names = {"evaluator": evaluator}
    exec(report.code, names)  # noqa: S102
    x = torch.randn(6, 4)
    assert close(gradient(names["box"], x, torch.ones(6, 4)), gradient(Simulator(), x, torch.ones(6, 4)))


def test_times_are_those_of_the_wall_clock(clock):
    """What workers count for themselves may be much more: they work at the same time."""

    class Remote(Evaluator):
        def describe(self):
            return Description("remote")

        def evaluate(self, request):
            clock.sleep(0.01)
            request.function.count(1, len(request.points), 100.0)
            y = torch.sin(request.points)
            request.function.learn(request.points, y, torch.finfo(y.dtype).eps)
            return Answer(y)

    report = probe(None, rows(), evaluator=Remote(), budget=2000)
    assert report.speed.latency == pytest.approx(0.01, rel=0.01)
    assert report.speed.vectorised
    assert report.name == "remote"
    assert "    None,  # it belongs to the evaluator" in report.code
    assert "eager" not in report.reasons  # an evaluator was given


def test_probe_with_seeds():
    with Threads(2, Seeded) as evaluator:
        report = probe(None, rows(), evaluator=evaluator)
    assert "takes a seed" in report.verdict
    assert report.randomness.takes_seed


def test_detect(evaluator):
    found = detect(None, rows(), evaluator=evaluator)
    assert torch.equal(found.depends, PATTERN)
    assert found.groups == 2
    assert found.evaluations > 0
    assert torch.equal(found.depends, detect(Simulator(), rows()).depends)


def test_check(evaluator):
    layer = BlackBox(None, 4, evaluator=evaluator, structure=PATTERN)
    before = layer.stats.evaluations
    found = bondgrad.check(layer, rows(), budget=20_000, tolerance=0.05)
    assert found.verdict == "right"
    assert found.evaluations > 0
    assert layer.stats.evaluations == before
    wrong = BlackBox(None, 4, evaluator=evaluator, structure=torch.eye(4).bool())
    assert bondgrad.check(wrong, rows(), budget=20_000, tolerance=0.05).verdict == "wrong"


@pytest.mark.parametrize("measure", [probe, detect])
def test_what_is_refused(measure, evaluator):
    with pytest.raises(ValueError, match=r"None with an evaluator that has a box of its own"):
        measure(None, rows())
    with pytest.raises(ValueError, match="leave out one of the two"):
        measure(torch.sin, rows(), evaluator=evaluator)
    with Threads(2, Broken) as broken, pytest.raises(bondgrad.BoxError, match="the device is off"):
        measure(None, rows(), evaluator=broken)
