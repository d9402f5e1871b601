"""Evaluators of one's own: what they are asked, and what becomes of their answers."""

import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import bondgrad
from bondgrad import BlackBox, BoxError, Simultaneous
from bondgrad.evaluators import Answer, Evaluator, Local, Request
from bondgrad.policies import Fixed
from bondgrad.structure import Blocks
from bondgrad.testing.boxes import Sparse
from tests.calling.test_memory import Device, expected, stream
from tests.helpers import close, gradient, same_state


class Recording(Evaluator):
    """Evaluates here, and keeps what it was asked."""

    def __init__(self):
        self.requests = []

    def evaluate(self, request):
        self.requests.append(request._replace(points=request.points.clone()))
        return Answer(request.function(request.points, *request.context, seed=request.seed))


def asked(purpose, requests):
    return [request for request in requests if request.purpose == purpose]


def test_requests_say_what_they_are_for_and_are_numbered():
    pattern = torch.eye(6, dtype=torch.bool)
    first, second = Recording(), Recording()
    layer = BlackBox(Sparse(pattern), 6, structure="auto", evaluator=first, seed=0)
    gradient(layer, torch.randn(16, 6), torch.ones(16, 6))
    assert {request.purpose for request in first.requests} == {"base", "structure", "trial", "gradient"}
    assert [request.number for request in first.requests] == list(range(len(first.requests)))
    assert len(asked("base", first.requests)) == 1
    assert sum(len(request.points) for request in first.requests) == layer.stats.evaluations
    layer.evaluator = second
    layer.eval()
    layer(torch.randn(4, 6))
    assert [(r.number, r.purpose) for r in second.requests] == [(len(first.requests), "base")]


def test_a_request_that_fails_had_its_number():
    class Small(Recording):
        def evaluate(self, request):
            if len(request.points) > 8:
                self.requests.append(request)
                raise MemoryError
            return super().evaluate(request)

    layer = BlackBox(torch.sin, 3, evaluator=Small(), policy="bond")
    with pytest.warns(UserWarning, match="out of memory with 16 rows"):
        layer(torch.randn(16, 3))
    assert [(r.number, len(r.points)) for r in layer.evaluator.requests] == [(0, 16), (1, 8), (2, 8)]


@pytest.mark.parametrize(
    ("estimator", "pairs"), [("central", True), ("forward", False), ("simultaneous", True), (Simultaneous(3), True)]
)
@pytest.mark.parametrize("structure", ["dense", Blocks(1, 1)])
def test_pairs_are_said_to_be_pairs(estimator, pairs, structure):
    evaluator = Recording()
    x = torch.randn(4, 3)
    layer = BlackBox(torch.sin, 3, estimator=estimator, policy="bond", structure=structure, evaluator=evaluator)
    gradient(layer, x, torch.ones(4, 3))
    base, *rest = evaluator.requests
    assert not base.pairs
    assert rest
    for request in rest:
        assert request.pairs == pairs
        if pairs:
            middle = request.points.view(-1, 2, 3).mean(1)
            assert (torch.cdist(middle, x).amin(1) < 1e-5).all()


def test_seeds_travel_in_requests():
    evaluator = Recording()
    layer = BlackBox(lambda x, seed: torch.sin(x), 3, policy="bond", evaluator=evaluator, seed=0)
    gradient(layer, torch.randn(4, 3), torch.ones(4, 3))
    base, up, down = evaluator.requests  # the two ends of all moves, one after the other
    assert up.seed == down.seed is not None
    assert base.seed not in (None, up.seed)
    assert not up.pairs
    layer.fn = torch.sin
    layer(torch.randn(4, 3))
    assert evaluator.requests[-1].seed is None


@pytest.mark.parametrize("estimator", ["central", "forward", "simultaneous"])
def test_boxes_that_keep_their_state_are_asked_through_the_evaluator(estimator):
    evaluator = Recording()
    layer = BlackBox(Device(), 3, estimator=estimator, policy=Fixed(1e-5), evaluator=evaluator, seed=0)
    xs, gys = stream(3)
    for x, gy, (_, g) in zip(xs, gys, expected(xs, gys), strict=True):
        found = gradient(layer, x, gy)
        assert estimator == "simultaneous" or close(found, g, 1e-4)
    assert {request.purpose for request in evaluator.requests} == {"base", "gradient"}
    assert all(request.whole and len(request.points) == len(xs[0]) for request in evaluator.requests)
    evaluator.requests.clear()
    layer.policy = "calibrated"
    gradient(layer, xs[0], gys[0])
    assert {request.purpose for request in evaluator.requests} == {"base", "gradient", "trial"}
    layer.structure = "auto"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gradient(layer, xs[0], gys[0])
    assert asked("structure", evaluator.requests)
    assert all(request.whole for request in evaluator.requests)


class Shuffled(Recording):
    """Evaluates row by row, from the last to the first, except where rows must go together."""

    def evaluate(self, request):
        if request.whole:
            return super().evaluate(request)
        rows = [slice(i, i + 1) for i in range(len(request.points))]
        parts = [
            super(Shuffled, self)
            .evaluate(request._replace(points=request.points[row], context=tuple(c[row] for c in request.context)))
            .y.clone()
            for row in reversed(rows)
        ]
        return Answer(torch.cat(parts[::-1]))


def test_states_stay_with_their_rows_whatever_the_evaluator_does():
    def leaky(x, state):
        state = 0.5 * state + x
        return torch.sin(state), state

    layers = [
        BlackBox(leaky, 3, state=torch.zeros(1, 3), policy="bond", evaluator=evaluator, seed=0)
        for evaluator in (Local(), Shuffled())
    ]
    for x in torch.randn(3, 5, 3):
        a, b = (gradient(layer, x, torch.ones(5, 3)) for layer in layers)
        assert close(a, b, 1e-5)
    assert same_state(*(layer.state_dict() for layer in layers))
    requests = layers[1].evaluator.requests
    assert all(request.whole == (request.purpose == "base") for request in requests)


def test_rows_without_an_output():
    class Losing(Recording):
        """Loses the first row of every pair."""

        def evaluate(self, request):
            answer = super().evaluate(request)
            return answer._replace(ok=torch.arange(len(answer.y)) % 2 == 1) if request.pairs else answer

    layer = BlackBox(torch.sin, 3, policy=Fixed(1e-3), evaluator=Losing())
    x = torch.randn(4, 3)
    with pytest.warns(UserWarning, match="12 perturbed rows"):
        g = gradient(layer, x, torch.ones(4, 3))
    assert close(g, x.cos(), 1e-2)
    assert layer.stats.failures == 12


@pytest.mark.parametrize(
    "wrong",
    [
        lambda y: Answer(y[:1]),
        lambda y: Answer(y[:, 0]),
        lambda y: Answer(y, torch.ones(len(y), 1, dtype=torch.bool)),
        lambda y: Answer(y, torch.ones(len(y))),
    ],
)
def test_answers_of_a_wrong_form_are_refused(wrong):
    class Wrong(Recording):
        def evaluate(self, request):
            return wrong(super().evaluate(request).y)

    with pytest.raises(BoxError, match=r"Wrong.evaluate must answer 4 rows with y \[4, out_features\]"):
        BlackBox(torch.sin, 3, evaluator=Wrong())(torch.randn(4, 3))


def test_an_evaluator_of_ones_own_in_detect():
    evaluator = Recording()
    found = bondgrad.structure.detect(torch.sin, torch.randn(50, 4), evaluator=evaluator)
    assert torch.equal(found.depends, torch.eye(4, dtype=torch.bool))
    assert {request.purpose for request in evaluator.requests} == {"base", "structure"}


def test_max_rows_of_an_evaluator_of_ones_own():
    class OneAtATime(Recording):
        max_rows = 1

    evaluator = OneAtATime()
    layer = BlackBox(torch.sin, 3, evaluator=evaluator)
    x = torch.randn(4, 3)
    assert close(gradient(layer, x, torch.ones(4, 3)), x.cos(), 1e-2)
    assert {len(request.points) for request in evaluator.requests} == {1}


def test_counters_are_right_where_threads_evaluate():
    class Pool(Recording):
        def evaluate(self, request):
            with ThreadPoolExecutor(8) as pool:
                parts = pool.map(lambda points: request.function(points, seed=request.seed), request.points.split(1))
                return Answer(torch.cat(list(parts)))

    def fn(x):  # of which nobody knows whether it is for tensors or arrays
        return np.sin(x) if isinstance(x, np.ndarray) else torch.sin(x)

    layer = BlackBox(fn, 3, policy="bond", evaluator=Pool())
    gradient(layer, torch.randn(64, 3), torch.ones(64, 3))
    assert layer.stats.calls == layer.stats.evaluations == 64 * 7


def test_what_requests_and_answers_say():
    assert Request._fields == ("function", "points", "context", "pairs", "seed", "purpose", "number", "whole")
    assert Answer._fields == ("y", "ok", "worker", "start", "duration", "attempts", "error")
