"""Evaluators of one's own: what they are asked, and what becomes of their answers."""

import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import bondgrad
from bondgrad import BlackBox, BoxError, Simultaneous
from bondgrad.evaluators import Answer, Call, Evaluator, Local, Request, evaluate_rows
from bondgrad.policies import Fixed
from bondgrad.structure import Blocks
from bondgrad.testing.boxes import Sparse
from tests.calling.test_memory import Device, expected, stream
from tests.helpers import close, gradient, same_state


class Recording(Evaluator):
    """Evaluates here, and keeps what it was asked."""

    def __init__(self):
        super().__init__()
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
            self.requests.append(request)
            if request.max_rows is None or request.max_rows > 4:
                raise MemoryError
            return evaluate_rows(request)

    layer = BlackBox(torch.sin, 3, evaluator=Small(), policy="bond")
    with pytest.warns(UserWarning, match="out of memory with 16 rows"):
        layer(torch.randn(16, 3))
    requests = layer.evaluator.requests
    assert [(r.number, len(r.points), r.max_rows) for r in requests] == [(0, 16, None), (1, 16, 8), (2, 16, 4)]
    assert layer.stats.calls == 4


def test_requests_know_the_step_and_the_attempt():
    class Losing(Recording):
        """Loses the first row of everything that it is asked for the first time."""

        def evaluate(self, request):
            y = super().evaluate(request).y
            return Answer(y, None if request.attempt else torch.arange(len(y)) > 0)

    layer = BlackBox(torch.sin, 3, evaluator=Losing(), policy=Fixed(1e-2))
    for _ in range(2):
        gradient(layer, torch.randn(4, 3), torch.ones(4, 3))
    requests = layer.evaluator.requests
    assert [(r.number, r.attempt, r.step, len(r.points)) for r in requests] == [
        (0, 0, 0, 4),
        (0, 1, 0, 1),
        (1, 0, 0, 24),
        (1, 1, 0, 2),  # both ends of a pair
        (2, 0, 1, 4),
        (2, 1, 1, 1),
        (3, 0, 1, 24),
        (3, 1, 1, 2),
    ]
    assert layer.stats.retried == 2 * 3
    assert layer.stats.failures == 0


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
    base, moved = evaluator.requests
    assert moved.seed is not None
    assert base.seed not in (None, moved.seed)
    assert moved.pairs
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
        """Loses the first row of every pair, whatever the attempt."""

        def evaluate(self, request):
            answer = super().evaluate(request)
            return answer._replace(ok=torch.arange(len(answer.y)) % 2 == 1) if request.pairs else answer

    layer = BlackBox(torch.sin, 3, policy=Fixed(1e-3), evaluator=Losing())
    x = torch.randn(4, 3)
    with pytest.warns(UserWarning, match="12 rows got no finite output"):
        g = gradient(layer, x, torch.ones(4, 3))
    assert close(g, x.cos(), 1e-2)
    assert layer.stats.failures == 12
    assert layer.stats.retried == 2 * 24  # both ends of all pairs, twice
    assert [(r.attempt, len(r.points)) for r in layer.evaluator.requests] == [(0, 4), (0, 24), (1, 24), (2, 24)]


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


@pytest.mark.parametrize("largest", [1, 5])
def test_max_rows_of_an_evaluator_of_ones_own(largest):
    class Cutting(Recording):
        max_rows = largest

        def __init__(self):  # without the arguments of all evaluators, and their checks
            self.requests = []

        def evaluate(self, request):
            self.requests.append(request)
            return evaluate_rows(request, worker=3)

    sizes = []

    def fn(x: torch.Tensor):
        sizes.append(len(x))
        return torch.sin(x)

    layer = BlackBox(fn, 3, evaluator=Cutting(), policy=Fixed(1e-2))
    x = torch.randn(7, 3)
    assert close(gradient(layer, x, torch.ones(7, 3)), x.cos(), 1e-2)
    assert [(r.max_rows, len(r.points)) for r in layer.evaluator.requests] == [(largest, 7), (largest, 42)]
    assert max(sizes) == largest
    assert [(worker.worker, worker.rows) for worker in layer.stats.workers] == [(3, 7 + 42)]
    assert sum(sizes) == 7 + 42


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
    before = ("function", "points", "context", "pairs", "seed", "purpose", "number", "whole")
    assert Request._fields == (*before, "max_rows", "attempt", "step", "cancelled", "begun")
    assert Answer._fields == ("y", "ok", "calls")
    assert Call._fields == ("first", "rows", "worker", "start", "duration", "error")
