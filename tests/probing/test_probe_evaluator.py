"""A probe through an evaluator: every row goes there, in requests that it takes."""

import pytest
import torch

import bondgrad
from bondgrad import probe
from bondgrad.evaluators import Answer, Evaluator, Local
from bondgrad.probing import Session
from tests.probing.test_probe import D, rows


class Counting(Evaluator):
    def __init__(self, max_rows=None):
        self.max_rows = max_rows
        self.requests = []

    def evaluate(self, request):
        self.requests.append(request)
        return Answer(request.function(request.points, *request.context, seed=request.seed))

    @property
    def rows(self):
        return sum(len(request.points) for request in self.requests)


class Elsewhere(Counting):
    """Evaluates in another place, where the function's own counters are not seen."""

    def evaluate(self, request):
        self.requests.append(request)
        y = torch.sin(request.points)
        return Answer(y.masked_fill(request.points[:, :1] > 2, 0), ok=request.points[:, 0] <= 2)


def test_every_row_goes_to_the_evaluator():
    evaluator, asked = Counting(), 0

    def fn(x: torch.Tensor):
        nonlocal asked
        asked += len(x)
        return torch.sin(x)

    report = probe(fn, rows(), evaluator=evaluator)
    assert report.verdict.startswith("deterministic, smooth, float32")
    assert evaluator.rows == report.evaluations == asked
    assert len(evaluator.requests) == report.calls
    assert {request.purpose for request in evaluator.requests} == {"probe"}
    assert [request.number for request in evaluator.requests] == list(range(report.calls))


@pytest.mark.parametrize("max_rows", [1, 3, 20, 600])
def test_no_request_has_more_rows_than_the_evaluator_takes(max_rows):
    evaluator = Counting(max_rows)
    report = probe(torch.sin, rows(), evaluator=evaluator)
    assert max(len(request.points) for request in evaluator.requests) <= max_rows
    assert report.verdict.startswith("deterministic, smooth, float32")
    assert report.speed.max_rows is None  # the box refused nothing
    assert report.left_out == []


def test_through_a_session():
    evaluator = Counting(50)
    session = Session(torch.sin, rows(), (), evaluator=evaluator, limits=(-1, 1), budget=2000)
    assert next(session.run()) == "First questions"
    assert evaluator.requests == []
    for _ in session.run():
        assert evaluator.rows == session.sampler.evaluations
    assert session.report().evaluations == evaluator.rows <= 2000
    assert all(bool((request.points.abs() <= 1).all()) for request in evaluator.requests)


def test_rows_that_are_evaluated_elsewhere_are_counted():
    evaluator = Elsewhere()
    report = probe(torch.sin, rows(), evaluator=evaluator, budget=5000)
    assert report.evaluations == evaluator.rows <= 5000
    assert report.calls == len(evaluator.requests)
    assert "fails in places" in report.verdict
    assert (report.ranges.failures[0].input, report.ranges.failures[0].how) == (0, "NaN")
    assert report.speed.latency > 0


def test_the_recommended_code_keeps_the_evaluator():
    report = probe(torch.sin, rows(), evaluator=Local())
    assert report.reasons["evaluator"] == "put here the one that was given to probe"

    def few(x):
        if len(x) > 20:
            raise ValueError("too many")
        return torch.sin(x)

    report = probe(few, rows(), evaluator=Local())
    assert f"with max_rows={report.speed.max_rows}" in report.reasons["evaluator"]
    names = {"few": few, "evaluator": Local(report.speed.max_rows)}
    exec(report.code, names)  # noqa: S102
    assert isinstance(names["box"], bondgrad.BlackBox)
    assert names["box"](rows()).shape == (200, D)
