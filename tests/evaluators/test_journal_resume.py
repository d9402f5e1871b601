"""Requests that are answered from a journal, and those that are not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bondgrad
from bondgrad import BlackBox, BoxError
from bondgrad.evaluators import Answer, Evaluator, Journal, Local, Request, Threads
from bondgrad.policies import Fixed
from tests.calling.test_memory import Device, leaky
from tests.evaluators.boxes import sine
from tests.evaluators.journals import Training, rows_of, unsure
from tests.helpers import gradient

ROOT = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "box.journal"


@pytest.mark.parametrize("inner", [Local, lambda: Threads(2, max_rows=2)])
def test_training_is_resumed_from_what_is_recorded(path, inner):
    """The noise of the box never comes again."""
    generator = torch.Generator()

    def noisy(x: torch.Tensor):
        return sine(x) + 0.01 * torch.randn(x.shape, generator=generator) + unsure(x) * 0

    with Journal(inner(), path) as journal:
        first = Training(journal, noisy).run(5)
        state = first.state()
        first.model.eval()
        answer = first.model(torch.ones(3, 4))
        first.model.train()
        first.run(7)
    made = first.box.stats.evaluations
    with Journal(inner(), path) as journal:
        second = Training(journal, noisy).load(state)
        second.model.eval()
        assert torch.equal(second.model(torch.ones(3, 4)), answer)
        second.model.train()
        second.run(7)
        assert torch.equal(first.parameters, second.parameters)
        stats = second.box.stats
        assert stats.evaluations == 0
        assert 0 < stats.recorded < made
        assert len(rows_of(path, "1")) == made
        second.run(1)
        assert len(rows_of(path, "1")) == made + second.box.stats.evaluations
    assert rows_of(path, "DISTINCT run") == [(1,), (2,)]


def test_the_first_difference_is_named_once(path):
    first = Training(Journal(Local(), path)).run(3)
    state, before = first.state(), first.run(3).box.progress.requests
    first.box.evaluator.close()
    journal = Journal(Local(), path)
    second = Training(journal).load(state).run(1)
    assert second.box.stats.evaluations == 0
    with torch.no_grad():
        second.model[0].bias[1] += 1
    number = second.box.progress.requests
    with pytest.warns(
        UserWarning, match=rf"request {number} differs .*: in row 0, input 1, it has \S+, and \S+ is"
    ) as told:
        second.run(4)
    assert len(told) == 1
    assert second.box.progress.requests > before
    ours = rows_of(path, "DISTINCT number", "run = 2")
    assert ours == [(n,) for n in range(number, second.box.progress.requests)]
    journal.close()
    with Journal(Local(), path) as journal:  # what counts is what the second run did, which was not as long at first
        third = Training(journal).load(state).run(1)
        with torch.no_grad():
            third.model[0].bias[1] += 1
        third.run(5)
        assert third.box.stats.evaluations == len(rows_of(path, "1", "run = 3")) > 0
        assert min(rows_of(path, "number", "run = 3")) == (second.box.progress.requests,)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"points": torch.zeros(3, 2), "context": (torch.zeros(3, 1),)}, "it has 3 rows, and 2 are recorded"),
        ({"points": torch.zeros(2, 3)}, r"its rows are float32\[3\], and float32\[2\] is recorded"),
        ({"points": torch.zeros(2, 2).double()}, r"its rows are float64\[2\], and float32\[2\] is recorded"),
        ({"points": torch.tensor([[0.0, 0.0], [0.0, -0.0]])}, "in row 1, input 1, it has -0.0, and 0.0 is recorded"),
        ({"context": (torch.ones(2, 1),)}, "in row 0 its context is another one than recorded"),
        ({"context": ()}, r"its context is None, and float32\[1\] is recorded"),
        ({"seed": 8}, "its seed is 8, and 7 is recorded"),
    ],
)
def test_all_that_may_differ(path, change, says):
    def fn(x, *_, seed=0):
        return x + seed

    request = Request(fn, torch.zeros(2, 2), (torch.zeros(2, 1),), seed=7, number=4)
    with Journal(Local(), path) as journal:
        y = journal.evaluate(request).y
    with Journal(Local(), path) as journal:
        assert torch.equal(journal.evaluate(request._replace(function=None)).y, y)
        with pytest.warns(UserWarning, match=f"request 4 differs .*: {says}. From here on"):
            journal.evaluate(request._replace(**change))


def test_a_layer_that_goes_back_in_the_same_program(path):
    with Journal(Local(), path) as journal:
        training = Training(journal).run(2)
        state = training.state()
        parameters, made = training.run(2).parameters, training.box.stats.evaluations
        training.load(state).run(2)
        assert torch.equal(training.parameters, parameters)
        assert training.box.stats.evaluations == made
        with torch.no_grad():
            training.load(state).model[0].bias += 1
        with pytest.warns(UserWarning, match="differs from what"):
            training.run(2)
        training.load(state).run(2)
        assert rows_of(path, "1", "1 GROUP BY run, number, attempt, row HAVING count(*) > 1") == []
        assert rows_of(path, "DISTINCT run") == [(1,), (2,), (3,)]


def test_measurements_are_recorded_and_never_answered(path):
    x = torch.randn(20, 3)
    with Journal(Local(), path) as journal:
        asked = [bondgrad.probe(sine, x, evaluator=journal, budget=300).evaluations for _ in range(2)]
        assert len(rows_of(path, "1", "purpose = 'probe'")) == sum(asked) > 0
        assert Training(journal).run(1).box.stats.recorded == 0


@pytest.mark.parametrize("options", [{"fn": leaky, "state": torch.zeros(1, 3)}, {"fn": Device()}])
def test_a_box_with_memory_is_recorded_and_always_evaluated(path, options):
    for life in (1, 2):
        with Journal(Local(), path) as journal:
            layer = BlackBox(in_features=3, evaluator=journal, policy=Fixed(1e-2), **options)
            gradient(layer, torch.ones(4, 3), torch.ones(4, 3))
            assert layer.stats.recorded == 0
            assert len(rows_of(path, "1", "run = ?", life)) == layer.stats.evaluations > 0


def test_evaluations_ahead(path):
    with Journal(Threads(2), path) as journal:
        training = Training(journal, eager=True, policy=Fixed(1e-2)).run(3)
        training.model(torch.randn(8, 4))  # its gradient is never asked for
        training.run(1)
        stats = training.box.stats
    assert sum(n for status, n in rows_of(path, "status, count(*)", "1 GROUP BY status")) == stats.evaluations
    assert stats.recorded == 0
    with Journal(Threads(2), path) as journal:
        again = Training(journal, eager=True, policy=Fixed(1e-2)).run(3)
        assert again.box.stats.evaluations == 0


def test_a_mistake_is_recorded_raised_and_not_answered(path):
    def wrong(x):
        return x.no_such_method()

    def right(x: torch.Tensor):
        return torch.sin(x)

    with Journal(Local(), path) as journal, pytest.raises(BoxError, match="no_such_method"):
        BlackBox(wrong, 3, evaluator=journal)(torch.zeros(2, 3))
    found = rows_of(path, "status, failure, outputs")
    assert [(status, outputs) for status, _, outputs in found] == [("mistake", None)] * 2
    assert found[0][1].startswith("AttributeError: ")
    with Journal(Local(), path) as journal:
        assert torch.equal(BlackBox(right, 3, evaluator=journal)(torch.zeros(2, 3)), torch.zeros(2, 3))
    assert rows_of(path, "run, number, status") == [(1, 0, "mistake")] * 2 + [(2, 0, "ok")] * 2


def test_rows_without_output_and_without_error_or_calls(path):
    class Losing(Evaluator):
        def evaluate(self, request):
            y = request.function(request.points)
            return Answer(y, None if request.attempt else torch.arange(len(y)) > 0)

    for answered in (0, 5):
        with Journal(Losing(), path) as journal:
            layer = BlackBox(sine, 3, evaluator=journal)
            assert torch.equal(layer(torch.ones(4, 3)), sine(torch.ones(4, 3)))
            assert (layer.stats.evaluations, layer.stats.recorded) == (5 - answered, answered)
    assert rows_of(path, "attempt, row, status") == [
        (0, 0, "missing"),
        *((0, row, "ok") for row in (1, 2, 3)),
        (1, 0, "ok"),
    ]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("noisy", [False, True])
def test_training_that_is_killed_and_resumed_ends_as_if_nothing_had_happened(tmp_path, noisy):
    program = f"""
import json
from pathlib import Path
from journal import compared, killed_and_resumed
folder = Path({str(tmp_path)!r})
result = killed_and_resumed(folder, {noisy}, kills=4, seed={noisy})
print(json.dumps([result, compared(folder, {noisy})]))
"""
    path = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    result, same = json.loads(done.stdout)
    assert same
    assert result["kills"] > 0
    assert result["of them twice"] == 0
    lost = result["evaluations begun"] - result["evaluations in the journal"]
    assert 0 <= lost <= result["kills"] * result["rows of the largest request"]
