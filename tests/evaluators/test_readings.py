"""Several readings of every point: in which order, with which seeds, and what is left out of their mean."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from bondgrad import BlackBox, BoxError
from bondgrad.calling._function import RowFunction
from bondgrad.errors import EvaluationLimitError
from bondgrad.evaluators import Driver, Executor, Journal, Local, Processes, Replay, Threads
from bondgrad.evaluators._readings import in_turns, mean_in_turns, mean_of_readings, reading_seed
from bondgrad.policies import Fixed
from tests.evaluators.boxes import one_row, sine
from tests.evaluators.journals import Training, rows_of
from tests.helpers import gradient, noisy

EVALUATORS = {
    "local": Local,
    "one row": lambda: Local(max_rows=1),
    "odd calls": lambda: Local(max_rows=7),
    "little memory": lambda: Local(memory=100),
    "threads": lambda: Threads(3, max_rows=2),
    "processes": lambda: Processes(2, max_rows=5),
    "executor": lambda: Executor(ThreadPoolExecutor(2), max_rows=2),
}


class Recording:
    """Keeps the first inputs of the rows of every call, and its seed; fails at the calls with these numbers."""

    def __init__(self, *failing):
        self.calls, self.seeds, self.failing = [], [], failing

    def __call__(self, x: torch.Tensor, seed: int | None = None):
        self.calls.append(x[:, 0].tolist())
        self.seeds.append(seed)
        if len(self.calls) - 1 in self.failing:
            raise ValueError("out of range")
        return x + len(self.calls)


def asked(fn, n, readings, retries=2, max_rows=None, **options):
    driver = Driver(Local(max_rows=max_rows, retries=retries), repeats=readings)
    points = torch.arange(float(n))[:, None]
    return driver, driver.ask(RowFunction(fn, None), points, **options)


def test_the_ends_of_a_pair_take_turns():
    rows = torch.arange(5)
    assert in_turns(rows, 3, pairs=False).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    assert in_turns(rows[:4], 3, pairs=True).tolist() == [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3]
    assert in_turns(rows, 2, pairs=True).tolist() == [0, 1, 0, 1, 2, 3, 2, 3, 4, 4]  # the last one is alone


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("n", [1, 4, 5])
@pytest.mark.parametrize("known", [False, True])
def test_means_are_those_of_the_points(pairs, n, known):
    y = torch.randn(n, 3, 2, dtype=torch.float64)  # [point, reading, output]
    turns = in_turns(torch.arange(n), 3, pairs).tolist()
    count = [0] * n
    ordered = []
    for point in turns:
        ordered.append(y[point, count[point]])
        count[point] += 1
    assert torch.allclose(mean_in_turns(torch.stack(ordered), 3, pairs, known), y.mean(1))


def test_a_failed_reading_is_left_out_at_both_ends():
    y = torch.tensor([[1.0, 10.0], [2.0, math.nan], [3.0, 30.0]])[None, :, :, None]
    assert mean_of_readings(y).flatten().tolist() == [2.0, 20.0]


def test_ends_without_a_common_reading_have_what_they_have():
    y = torch.tensor([[1.0, math.nan], [math.inf, 20.0], [3.0, math.nan]])[None, :, :, None]
    assert mean_of_readings(y).flatten().tolist() == [2.0, 20.0]


def test_outputs_fail_one_by_one():
    y = torch.tensor([[1.0, math.nan], [3.0, math.nan], [math.nan, math.nan]])[None, :, None]
    mean = mean_of_readings(y).flatten()
    assert mean[0] == 2
    assert mean[1].isnan()


def test_a_device_sees_plus_and_minus_in_turns():
    fn = Recording()
    _, (y, ok) = asked(fn, 4, 3, max_rows=1, pairs=True, purpose="gradient")
    assert [row for call in fn.calls for row in call] == [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3]
    assert y.flatten().tolist() == [0 + 3, 1 + 4, 2 + 9, 3 + 10]  # as much drift at both ends
    assert ok is None


@pytest.mark.filterwarnings("ignore:.* rows? got no output")
def test_only_a_point_without_any_reading_fails():
    driver, (y, ok) = asked(Recording(0, 2, 3, 4), 3, 2, retries=0, max_rows=1)
    assert y.flatten()[:1].tolist() == [2]  # the second reading
    assert y[1].isnan()
    assert y[2] == 2 + 6
    assert ok.tolist() == [True, False, True]
    assert driver.record.evaluations == 6
    assert driver.record.errors == {"ValueError": 4}


def test_every_reading_has_a_seed_of_its_own():
    fn = Recording()
    _, (y, _) = asked(fn, 4, 3, pairs=True, seed=7)
    assert fn.calls == [[0, 2], [1, 3]] * 3
    assert fn.seeds == [s for j in range(3) for s in [reading_seed(7, j)] * 2]
    assert len(set(fn.seeds)) == 3
    assert fn.seeds[0] == 7
    assert y.flatten().tolist() == [0 + 3, 1 + 4, 2 + 3, 3 + 4]


@pytest.mark.filterwarnings("ignore:.* rows? (was|were) asked again")
def test_a_seeded_reading_that_fails_is_left_out():
    _, (y, ok) = asked(Recording(1), 1, 3, seed=7, retries=0)
    assert y.tolist() == [[2.0]]  # of the first and the third call
    assert ok is None
    with pytest.raises(BoxError, match="out of range"):
        asked(Recording(0, 1, 2), 1, 3, seed=7, retries=0)


def test_a_request_may_ask_for_another_number_of_readings():
    fn = Recording()
    asked(fn, 2, 3, repeats=1)
    assert fn.calls == [[0, 1]]


@pytest.mark.parametrize("kind", EVALUATORS)
@pytest.mark.parametrize("estimator", ["central", "forward", "simultaneous"])
def test_every_evaluator_gives_the_same_gradients(kind, estimator):
    options = {"in_features": 3, "estimator": estimator, "seed": 0}
    x, gy = torch.randn(5, 3), torch.randn(5, 3)
    once = BlackBox(sine, **options)
    with EVALUATORS[kind]() as evaluator:
        layer = BlackBox(sine, **options, evaluator=evaluator, repeats=3)
        for _ in range(2):
            assert torch.allclose(gradient(layer, x, gy), gradient(once, x, gy), atol=2e-3)
        assert layer.stats.evaluations == 3 * once.stats.evaluations


def test_outputs_that_are_a_view():
    layer = BlackBox(lambda x: torch.sin(x).T.contiguous().T, 3, policy=Fixed(0.01), repeats=2)
    x = torch.randn(4, 3)
    assert torch.allclose(gradient(layer, x, torch.ones(4, 3)), x.cos(), atol=1e-3)


def test_chunks_do_not_change_a_bit():
    x, gy = torch.randn(16, 5), torch.randn(16, 5)
    found = []
    for evaluator in (Local(), Local(max_rows=1), Local(memory=1), Local(max_rows=7, memory=500)):
        layer = BlackBox(lambda x: (3 * x) ** 3, 5, policy=Fixed(0.01), seed=0, repeats=5, evaluator=evaluator)
        found.append(gradient(layer, x, gy))
    assert all(torch.equal(g, found[0]) for g in found)


def test_a_box_of_single_rows_gets_them():
    layer = BlackBox(one_row, 3, repeats=2, evaluator=Local(max_rows=1), policy=Fixed(0.01))
    gradient(layer, torch.randn(4, 3), torch.randn(4, 3))
    assert layer.stats.calls == layer.stats.evaluations == 2 * 4 * 7


def test_the_limit_on_evaluations_counts_readings():
    layer = BlackBox(sine, 3, repeats=4, evaluator=Local(max_evaluations=20))
    layer(torch.randn(5, 3))
    with pytest.raises(EvaluationLimitError, match="20 of max_evaluations=20"):
        layer(torch.randn(1, 3))


def test_memory_is_that_of_all_readings():
    sizes = []

    def fn(x: torch.Tensor):
        sizes.append(len(x))
        return torch.sin(x)

    row_bytes = 2 * 3 * 4
    layer = BlackBox(fn, 3, repeats=4, policy=Fixed(0.1), evaluator=Local(memory=48 * row_bytes))
    gradient(layer, torch.randn(16, 3), torch.randn(16, 3))
    assert sizes[0] == 16 * 4
    assert max(sizes[1:]) <= 48
    assert sum(sizes[1:]) == 16 * 6 * 4


@pytest.mark.parametrize("inner", [Local, lambda: Threads(2, max_rows=2)])
def test_a_journal_has_every_reading_and_replays_them(tmp_path, inner):
    path = tmp_path / "box.journal"
    with Journal(inner(), path) as journal:
        recorded = Training(journal, noisy(sine, 0.1), repeats=3).run(8)
    assert len(rows_of(path, "number")) == recorded.box.stats.evaluations
    replayed = Training(Replay(path), None, repeats=3).run(8)
    assert torch.equal(recorded.parameters, replayed.parameters)
    assert replayed.box.stats.recorded == recorded.box.stats.evaluations
    with pytest.raises(BoxError, match="differs from what"):
        Training(Replay(path), None, repeats=2).run(1)


def test_a_journal_of_a_box_with_seeds(tmp_path):
    def fn(x: torch.Tensor, seed: int):
        return torch.sin(x) + torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))

    path = tmp_path / "box.journal"
    with Journal(Local(), path) as journal:
        recorded = Training(journal, fn, repeats=2).run(4)
    replayed = Training(Replay(path), None, repeats=2).run(4)
    assert torch.equal(recorded.parameters, replayed.parameters)
