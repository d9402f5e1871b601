"""Recorded trainings again, without their box."""

import copy
import io

import pytest
import torch

from bondgrad import BlackBox, BoxError
from bondgrad.evaluators import Journal, Local, Replay, Threads
from bondgrad.policies import Fixed
from tests.calling.test_memory import leaky
from tests.evaluators.boxes import Seeded, sine
from tests.evaluators.journals import Training, rows_of, unsure
from tests.helpers import gradient

STEPS = 30


@pytest.fixture
def path(tmp_path):
    return tmp_path / "box.journal"


class Flaky:
    """Noise that never comes again; raises, and answers with NaN, whenever it likes to."""

    def __init__(self):
        self.generator = torch.Generator()
        self.generator.seed()

    def luck(self, share):
        return bool(torch.rand((), generator=self.generator) < share)

    def __call__(self, x: torch.Tensor, *context: torch.Tensor):
        if self.luck(0.05):
            raise RuntimeError("laser is off")
        y = sine(x) + 0.01 * torch.randn(x.shape, generator=self.generator) + sum(c[:, :1] for c in context)
        return y.masked_fill(torch.rand(len(x), 1, generator=self.generator) < 0.05, torch.nan)


@pytest.mark.parametrize("inner", [Local, lambda: Local(max_rows=3), lambda: Threads(2, max_rows=2)])
def test_a_noisy_and_flaky_box(path, inner):
    with Journal(inner(), path) as journal:
        recorded = Training(journal, Flaky()).run(STEPS)
    replayed = Training(Replay(path), None).run(STEPS)
    assert torch.equal(recorded.parameters, replayed.parameters)
    for name, value in recorded.box.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, replayed.box.state_dict()[name])
    before, stats = recorded.box.stats, replayed.box.stats
    assert before.errors["RuntimeError"] > 0
    assert (stats.errors, stats.failures, stats.recorded) == (before.errors, before.failures, before.evaluations)
    assert stats.evaluations == stats.calls == 0
    assert replayed.box.function.name == "Flaky"


@pytest.mark.parametrize(
    ("fn", "options"),
    [
        (Seeded(), {}),
        (unsure, {"structure": "auto", "noise": 1e-3}),
        (Flaky(), {"estimator": "simultaneous"}),
        (Flaky(), {"policy": "bond", "noise": "auto", "estimator": "forward"}),
    ],
)
def test_other_boxes_and_layers(path, fn, options):
    with Journal(Local(), path) as journal:
        recorded = Training(journal, fn, **options).run(STEPS)
    replayed = Training(Replay(path), None, **options).run(STEPS)
    assert torch.equal(recorded.parameters, replayed.parameters)
    assert replayed.box.stats.recorded == len(rows_of(path, "1")) == recorded.box.stats.evaluations


def test_structure_that_is_found_out_of_a_noisy_box_with_a_context(path):
    def gradients(layer):
        generator = torch.Generator().manual_seed(0)
        batches = [torch.randn(2, 16, 3, generator=generator) for _ in range(8)]
        return torch.stack([gradient(layer, x, torch.ones(16, 3), context) for x, context in batches])

    def fn(x: torch.Tensor, context: torch.Tensor):
        return sine(x) * context + 0.01 * torch.randn(x.shape)

    options = {"structure": "auto", "noise": 0.05, "seed": 0}
    with Journal(Local(), path) as journal:
        recorded = BlackBox(fn, 3, evaluator=journal, **options)
        before = gradients(recorded)
    replayed = BlackBox(None, 3, evaluator=Replay(path), **options)
    assert torch.equal(gradients(replayed), before)
    assert str(replayed.structure) == str(recorded.structure)


def test_evaluations_ahead_and_double_precision(path):
    options = {"eager": True, "policy": Fixed(1e-2)}
    with Journal(Threads(2), path) as journal:
        recorded = Training(journal, Flaky(), **options).run(STEPS)
    replay = Replay(path)
    assert replay.overlaps
    assert torch.equal(Training(replay, None, **options).run(STEPS).parameters, recorded.parameters)
    other = path.with_name("other")
    x = torch.randn(4, 3, dtype=torch.float64)
    with Journal(Local(), other) as journal:
        y = BlackBox(Flaky(), 3, evaluator=journal)(x)
    assert torch.equal(BlackBox(None, 3, evaluator=Replay(other))(x), y)


def test_memory_that_ran_out_runs_out_again(path):
    def small(x: torch.Tensor):
        if len(x) > 20:
            raise MemoryError
        return torch.sin(x)

    x, grads = torch.randn(17, 5), []
    for make, fn in ((lambda: Journal(Local(), path), small), (lambda: Replay(path), None)):
        layer = BlackBox(fn, 5, policy=Fixed(1e-2), evaluator=make(), seed=0)
        with pytest.warns(UserWarning, match="out of memory with 170 rows at a time: going on with at most 85"):
            grads.append(gradient(layer, x, torch.ones(17, 5)))
    assert torch.equal(*grads)
    assert rows_of(path, "DISTINCT status") == [("ok",), ("memory",)]


def test_a_mistake_is_raised_again(path):
    def wrong(x):
        return x.no_such_method()

    errors = []
    with Journal(Local(), path) as journal, pytest.raises(BoxError, match="no_such_method") as raised:
        BlackBox(wrong, 3, evaluator=journal)(torch.zeros(2, 3))
    errors.append(str(raised.value))
    with pytest.raises(BoxError, match="no_such_method") as raised:
        BlackBox(None, 3, evaluator=Replay(path))(torch.zeros(2, 3))
    assert [str(raised.value)] == errors


def test_the_first_difference_is_named(path):
    with Journal(Local(), path) as journal:
        Training(journal).run(3)
    replayed = Training(Replay(path), None).run(1)
    with torch.no_grad():
        replayed.model[0].bias[2] += 1
    number = replayed.box.progress.requests
    says = rf"request {number} differs from what .*box.journal has recorded: in row 0, input 2, it has .*seeds and arg"
    with pytest.raises(BoxError, match=says):
        replayed.run(1)


def test_beyond_the_end(path):
    with Journal(Local(), path) as journal:
        recorded = Training(journal).run(2)
    replayed = Training(Replay(path), None).run(2)
    last = recorded.box.progress.requests - 1
    with pytest.raises(BoxError, match=rf"request {last + 1}, attempt 0, is not in .*, which ends with request {last}"):
        replayed.run(1)


def test_a_resumed_training_is_replayed_as_one(path):
    with Journal(Local(), path) as journal:
        first = Training(journal, Flaky()).run(4)
        state = first.state()
        first.run(3)
    with Journal(Local(), path) as journal:
        second = Training(journal, Flaky()).load(state).run(6)
    assert torch.equal(Training(Replay(path), None).run(10).parameters, second.parameters)


def test_it_starts_again_and_can_be_copied_and_saved(path):
    with Journal(Local(), path) as journal:
        recorded = Training(journal, Flaky()).run(4)
    replay = Replay(path)
    file = io.BytesIO()
    torch.save(BlackBox(None, 3, evaluator=replay), file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False).evaluator
    for evaluator in (replay, replay, copy.deepcopy(replay), loaded):
        assert torch.equal(Training(evaluator, None).run(4).parameters, recorded.parameters)
    assert repr(replay) == f"Replay('{path}')"


def test_what_cannot_be_replayed(path):
    with pytest.raises(FileNotFoundError, match="there is no journal"):
        Replay(path)
    with Journal(Local(), path):
        pass
    with pytest.raises(ValueError, match="has no evaluations yet: train with Journal"):
        Replay(path)
    with Journal(Local(), path) as journal:
        layer = BlackBox(leaky, 3, state=torch.zeros(1, 3), evaluator=journal)
        gradient(layer, torch.ones(4, 3), torch.ones(4, 3))
    with pytest.raises(ValueError, match="a box with memory, which cannot be replayed"):
        Replay(path)
