"""What a probe may do, what comes of it, and the command."""

import functools
import inspect
import json
import math
import random

import numpy as np
import pytest
import torch
from torch import nn

from bondgrad import BoxError, probe
from bondgrad.probing import Session
from bondgrad.testing.boxes import TanhNetwork
from tests.helpers import noisy
from tests.probing.test_probe import D, network, rows, simulator

# ---- what a probe may do


@pytest.mark.parametrize("budget", [16, 30, 100, 333, 1000, 4000])
@pytest.mark.parametrize("kind", ["plain", "noisy", "single rows", "a few rows", "raises"])
def test_never_more_than_the_budget(budget, kind):
    asked = 0

    def fn(x):
        nonlocal asked
        asked += len(x)
        most = {"single rows": 1, "a few rows": 3}.get(kind, 10_000)
        if len(x) > most or (kind == "raises" and bool((np.asarray(x)[:, 0] > 1).any())):
            raise ValueError("no")
        return np.sin(x) + (1e-2 * np.random.rand(*x.shape) if kind == "noisy" else 0)

    report = probe(fn, rows(), budget=budget)
    assert 1 < asked <= budget
    assert report.evaluations == asked
    assert report.left_out or budget == 4000
    assert report.verdict
    json.dumps(report.as_dict(), allow_nan=False)


@pytest.mark.parametrize("limits", [(0.1, 0.3), (-1, [0.1, 0.7, 2.0, 1e3]), (-math.inf, 0.5)])
def test_nothing_outside_the_limits(limits):
    lowest, highest = torch.full((D,), math.inf), torch.full((D,), -math.inf)

    def fn(x):
        torch.minimum(lowest, x.amin(0), out=lowest)
        torch.maximum(highest, x.amax(0), out=highest)
        return torch.sin(3 * x)

    report = probe(fn, rows(), limits=limits)
    low, high = (torch.as_tensor(limit, dtype=torch.float64) for limit in limits)
    assert bool((lowest.double() >= low).all())
    assert bool((highest.double() <= high).all())
    compile(report.code, "code", "exec")
    assert report.limits == tuple(limit.expand(D).tolist() for limit in (low, high))


def test_no_trace():
    module = network(nn.BatchNorm1d(30), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    probe(module, rows(generator=torch.Generator().manual_seed(0)))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(m.training for m in module.modules())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()
    assert random.getstate() == states[2]
    assert all(p.requires_grad for p in module.parameters())


def test_the_same_seed_gives_the_same_report():
    x = rows()
    one, other = (probe(simulator, x, seed=3).as_dict() for _ in range(2))
    for report in (one, other):
        for name in ("speed", "seconds", "evaluations", "calls", "history", "cost", "words", "verdict"):  # of time
            del report[name]
    assert one == other


def test_context():
    found = probe(lambda x, wind: torch.sin(x) * wind, rows(), torch.rand(200, 1) + 0.5)
    assert found.verdict.startswith("deterministic, smooth")


def test_another_default_device():
    seen = set()

    def fn(x):
        seen.add(torch.empty(1).device.type)
        return torch.sin(x)

    x = rows()
    torch.set_default_device("meta")
    try:
        report = probe(fn, x, limits=(-3, 3))
    finally:
        torch.set_default_device(None)
    assert report.verdict.startswith("deterministic, smooth, float32")
    assert seen == {"meta"}


def test_few_rows_and_other_kinds():
    assert probe(torch.sin, rows(1)).steps.best is not None
    assert probe(torch.sin, rows(3).half()).dtype == "float32"
    assert probe(torch.sin, torch.zeros(5, 2)).verdict.startswith("deterministic")


def test_what_a_probe_may_spend_by_default():
    for made in (probe, Session):
        defaults = {name: parameter.default for name, parameter in inspect.signature(made).parameters.items()}
        assert (defaults["budget"], defaults["seconds"], defaults["seed"]) == (20_000, 60, 0)


def test_mistakes_are_named():
    for arguments, message in [
        ({"x": torch.zeros(3)}, "x must be rows"),
        ({"x": torch.full((3, 2), math.nan)}, "x must be finite"),
        ({"budget": 15}, "budget must be at least 16"),
        ({"seconds": -1}, "seconds must be"),
        ({"limits": (1, 0)}, "limits"),
    ]:
        with pytest.raises(ValueError, match=message):
            probe(torch.sin, **({"x": rows()} | arguments))
    with pytest.raises(BoxError, match="one row of outputs per row"):
        probe(lambda x: x.sum(), rows())
    nothing = probe(lambda x: x * math.nan, rows())
    assert "no finite answer" in nothing.left_out[0]
    assert nothing.verdict == "nothing could be found out"
    for budget in (16, 17, 1000):
        with pytest.raises(BoxError, match="raised KeyError"):
            probe(broken, rows(), budget=budget)


def broken(x):
    raise KeyError("out of order")


def test_one_call_longer_than_the_time(clock):
    def slow(x):
        clock.sleep(0.02)
        return torch.sin(x)

    report = probe(slow, rows(), seconds=0.01)
    assert report.evaluations == 1
    assert report.out_features == D
    assert "in the time left" in report.left_out[0]
    compile(report.code, "code", "exec")


def test_a_box_that_runs_out_of_memory():
    def fn(x):
        if len(x) > 20:
            raise torch.OutOfMemoryError("out of memory")
        return torch.sin(x)

    report = probe(fn, rows())
    assert report.verdict.startswith("deterministic, smooth")
    assert list(report.speed.batches) == [1, 8]


def test_strong_noise_hides_what_it_hides():
    report = probe(noisy(torch.sin, 0.2), rows())
    assert report.sensitivity.dead is None
    assert report.dependence is None
    assert "structure" not in report.reasons
    assert any("would hide it" in text for text in report.left_out)


# ---- what comes of it


def test_json():
    found = probe(noisy(TanhNetwork(), 1e-3), rows(), limits=(-math.inf, 5)).as_dict(batch=25, steps=9)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["cost"]["batch"] == 25
    assert found["cost"]["central"]["evaluations"] == 25 * (1 + 1.04 * 8)


def test_a_session_can_be_watched():
    session = Session(simulator, rows())
    names = list(session.run())
    assert names[0] == "First questions"
    assert names[-1] == "History"
    assert session.report().verdict.startswith("deterministic")


def test_what_is_left_out_is_left_out_for_the_right_reason(clock):
    for seconds in (1e-9, 1e-5, 1e-4):
        assert probe(torch.sin, rows(), seconds=seconds).left_out

    def slow(x):
        clock.sleep(0.06)
        return torch.sin(x)

    hasty = probe(slow, rows(), seconds=0.1).left_out
    assert "in the time left" in hasty[0]
    assert hasty[0].startswith("First questions and all that follow")
    alone = probe(lambda x: x.sum(1, keepdim=True), rows(1)).left_out
    assert any(text.startswith("Smoothness: there is one row") for text in alone)
    assert not any("do not reach" in text for text in alone)


def test_the_name_in_the_code_is_that_of_a_function():
    assert probe(simulator, rows()).name == "simulator"
    assert probe(Reader(), rows()).name == "fn"
    assert probe(functools.partial(simulator), rows()).name == "fn"
    assert probe(nn.Sequential(nn.Linear(D, 2)), rows()).name == "fn"


class Reader:
    def __call__(self, x):
        return torch.sin(x)
