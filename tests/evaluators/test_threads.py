"""Rows evaluated in threads."""

import copy
import pickle
import threading
import time
import warnings

import numpy as np
import pytest
import torch

from bondgrad import BlackBox, BoxError
from bondgrad.calling._function import RowFunction
from bondgrad.evaluators import Driver, Local, Threads
from bondgrad.policies import Fixed
from bondgrad.structure import Sequence
from tests.evaluators.boxes import Seeded, WhoAnswers, broken_factory, hangs_above, one_row, sine, thread_number
from tests.helpers import gradient


def gradients(fn, evaluator, estimator="central", d=3, rows=7, **options):
    layer = BlackBox(fn, d, estimator=estimator, evaluator=evaluator, seed=0, **options)
    x, gy = torch.linspace(-1, 1, rows * d).view(rows, d), torch.ones(rows, d)
    return [gradient(layer, x * scale, gy) for scale in (1, 0.5, 2)], layer


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("estimator", ["central", "forward", "simultaneous"])
def test_gradients_do_not_depend_on_the_number_of_threads(n, estimator):
    expected, local = gradients(one_row, Local(max_rows=1), estimator)
    with Threads(n, max_rows=1) as evaluator:
        found, layer = gradients(one_row, evaluator, estimator)
    assert all(map(torch.equal, found, expected))
    assert layer.stats.evaluations == local.stats.evaluations


def test_rows_are_answered_in_their_order_by_all_threads():
    points = torch.randn(40, 3)
    function = RowFunction(thread_number, None)
    with Threads(4, max_rows=1) as evaluator:
        y, ok = Driver(evaluator).ask(function, points, pairs=True)
        assert torch.equal(
            Driver(evaluator).ask(RowFunction(one_row, None), points).y, torch.cat([one_row(x[None]) for x in points])
        )
    assert ok is None
    assert len(y.unique()) == 4
    assert bool((y.view(-1, 2)[:, 0] == y.view(-1, 2)[:, 1]).all())  # both ends of a pair in one thread


def test_without_max_rows_every_thread_gets_an_equal_share():
    sizes = []

    def fn(x: torch.Tensor):
        sizes.append(len(x))
        return torch.sin(x)

    with Threads(4) as evaluator:
        Driver(evaluator).ask(RowFunction(fn, None), torch.randn(80, 3), pairs=True)
    assert sizes == [20] * 4


def test_each_thread_has_a_box_of_its_own_that_knows_its_number():
    with Threads(3, WhoAnswers, max_rows=1) as evaluator:
        layer = BlackBox(None, 3, evaluator=evaluator)
        y = layer(torch.randn(30, 3))
        assert layer.out_features == 2
        assert layer.function.name == "WhoAnswers"
    workers = {worker.worker: worker.rows for worker in layer.stats.workers}
    assert {int(number): int((y[:, 0] == number).sum()) for number in y[:, 0].unique()} == workers
    assert sum(workers.values()) == layer.stats.evaluations == layer.stats.calls == 30


def test_a_box_of_the_evaluator_with_contexts_and_sequences():
    def make():
        return lambda x, shift: np.cumsum(x, 1) + shift[:, None]

    with Threads(2, make) as evaluator:
        layer = BlackBox(None, 2, evaluator=evaluator, structure=Sequence(), policy=Fixed(1e-2))
        x, shift = torch.randn(4, 5, 2), torch.randn(4, 2)
        assert torch.allclose(layer(x, shift), x.cumsum(1) + shift[:, None])
        g = gradient(layer, x, torch.ones(4, 5, 2), shift)
    assert torch.allclose(g, torch.arange(5.0, 0, -1).view(1, 5, 1).expand(4, 5, 2), atol=1e-3)


def test_seeds_reach_a_box_of_the_evaluator():
    with Threads(2, Seeded, max_rows=1) as evaluator:
        layer = BlackBox(None, 3, evaluator=evaluator, policy=Fixed(1e-2), seed=0)
        x = torch.randn(4, 3)
        assert torch.allclose(gradient(layer, x, torch.ones(4, 3)), x.cos(), atol=1e-3)  # the noise cancels


@pytest.mark.parametrize("fn", [sine, None])
def test_a_function_and_a_box_of_the_evaluator_exclude_one_another(fn):
    factory = None if fn is None else lambda: sine
    with pytest.raises(ValueError, match="fn must be"):
        BlackBox(fn, 3, evaluator=Threads(2, factory))
    with pytest.raises(ValueError, match="fn must be a function, or None with an evaluator that has a box"):
        BlackBox(None, 3)


def test_a_state_needs_a_function_of_this_process():
    with pytest.raises(ValueError, match="a box with memory is called in this process"):
        BlackBox(None, 3, evaluator=Threads(2, lambda: sine), state=torch.zeros(1, 3))


def test_a_factory_that_raises_is_an_error_when_the_layer_is_made():
    with pytest.raises(BoxError, match="Threads could not make its box: the licence server is down"):
        BlackBox(None, 3, evaluator=Threads(2, broken_factory))


def test_a_factory_must_be_callable_and_make_a_function():
    with pytest.raises(ValueError, match="factory must be a function that returns a box"):
        Threads(2, "device")
    with pytest.raises(BoxError, match="factory must return a function of rows, got int"):
        BlackBox(None, 3, evaluator=Threads(2, lambda: 5))


def test_a_row_that_hangs_is_given_up_and_the_thread_replaced():
    points = torch.zeros(8, 2)
    points[3, 0] = 2.0
    with Threads(2, max_rows=1, timeout=0.05, retries=0) as evaluator:
        driver = Driver(evaluator)
        with pytest.warns(UserWarning, match="did not answer 1 row within"):
            y, ok = driver.ask(RowFunction(hangs_above(1), None), points)
        assert evaluator.abandoned == 1
    assert ok.tolist() == [row != 3 for row in range(8)]
    assert torch.equal(y[ok], points[ok].sin())
    assert driver.record.errors == {"TimeoutError": 1}
    assert driver.record.evaluations == 8


def test_more_abandoned_threads_than_workers_are_an_error():
    with Threads(2, max_rows=1, timeout=0.02) as evaluator, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(BoxError, match="3 threads hang in the box, more than the 2 that may"):
            Driver(evaluator).ask(RowFunction(hangs_above(1), None), torch.full((8, 2), 2.0))


def test_late_answers_are_dropped():
    release = threading.Event()

    def fn(x: torch.Tensor):
        if float(x[0, 0]) == 1 and not release.is_set():
            release.wait(5)
            return torch.full_like(x, -1)
        return torch.sin(x)

    points = torch.arange(6.0).view(6, 1)
    with Threads(2, max_rows=1, timeout=0.1, retries=0) as evaluator:
        with pytest.warns(UserWarning, match="did not answer"):
            y, ok = Driver(evaluator).ask(RowFunction(fn, None), points)
        release.set()
        again = Driver(evaluator).ask(RowFunction(fn, None), points).y
    assert not ok[1]
    assert bool(y[1].isnan())
    assert torch.equal(again, points.sin())


def test_an_error_costs_the_row_that_raises_it():
    def fn(x: torch.Tensor):
        if float(x.abs().max()) > 2:
            raise RuntimeError("overvoltage")
        return torch.sin(x)

    points = torch.zeros(20, 2)
    points[7] = 3.0
    with Threads(3, retries=0) as evaluator, pytest.warns(UserWarning, match="overvoltage"):
        y, ok = Driver(evaluator).ask(RowFunction(fn, None), points)
    assert ok.tolist() == [row != 7 for row in range(20)]
    assert torch.equal(y[ok], points[ok].sin())


def test_a_mistake_in_the_code_is_raised_at_once():
    calls = []

    def fn(x: torch.Tensor):
        calls.append(len(x))
        return x.sine()

    with Threads(2, max_rows=1) as evaluator, pytest.raises(BoxError, match="no attribute 'sine'"):
        Driver(evaluator).ask(RowFunction(fn, None), torch.zeros(50, 2))
    assert len(calls) <= 10


def test_memory_that_runs_out_in_a_thread_halves_the_calls():
    def fn(x: torch.Tensor):
        if len(x) > 4:
            raise MemoryError
        return torch.sin(x)

    x = torch.randn(40, 3)
    with Threads(2) as evaluator, pytest.warns(UserWarning, match="out of memory with 40 rows"):
        assert torch.equal(BlackBox(fn, 3, evaluator=evaluator)(x), x.sin())


def test_threads_have_the_autocast_and_gradient_settings_of_the_layer():
    seen = set()

    def fn(x: torch.Tensor):
        seen.add((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return torch.sin(x)

    with Threads(2) as evaluator:
        layer = BlackBox(fn, 3, evaluator=evaluator, full_precision=False)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            layer(torch.randn(4, 3, requires_grad=True))
    assert seen == {(False, True, torch.bfloat16)}


def test_threads_have_the_default_device_of_the_layer():
    seen = set()

    def fn(x: torch.Tensor):
        seen.add(torch.empty(1).device.type)
        return torch.sin(x)

    with Threads(2) as evaluator:
        layer = BlackBox(fn, 3, evaluator=evaluator)
        for device in ("meta", "cpu"):
            with torch.device(device):
                layer(torch.randn(4, 3, device="cpu"))
    assert seen == {"meta", "cpu"}


def test_copies_share_the_workers_and_saved_ones_make_their_own():
    evaluator = Threads(2, WhoAnswers, max_rows=3, timeout=5.0, retries=None, rate=100.0, max_evaluations=99)
    layer = BlackBox(None, 3, evaluator=evaluator)
    assert copy.deepcopy(layer).evaluator is evaluator
    again = pickle.loads(pickle.dumps(layer))
    assert again.evaluator is not evaluator
    assert again.evaluator.settings() == evaluator.settings()
    assert float(again(torch.zeros(1, 3))[0, 1]) == 1  # the first call of a new box
    evaluator.close()
    again.evaluator.close()


def test_closing_ends_all_threads_and_the_next_request_starts_others():
    before = threading.active_count()
    evaluator = Threads(3)
    layer = BlackBox(sine, 3, evaluator=evaluator)
    x = torch.randn(6, 3)
    assert torch.equal(layer(x), sine(x))
    assert threading.active_count() == before + 3
    evaluator.close()
    assert threading.active_count() == before
    assert torch.equal(layer(x), sine(x))
    evaluator.close()
    assert threading.active_count() == before


def test_an_interruption_ends_the_workers():
    def fn(x: torch.Tensor):
        raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        Driver(Threads(2)).ask(RowFunction(fn, None), torch.zeros(4, 2))
    for _ in range(100):
        if threading.active_count() == before:
            break
        time.sleep(0.01)
    assert threading.active_count() == before


def test_requests_of_several_threads_share_the_workers():
    points, found = torch.randn(30, 3), []
    with Threads(3, max_rows=1) as evaluator:
        driver = Driver(evaluator)

        def ask():
            found.append(driver.ask(RowFunction(one_row, None), points).y)

        askers = [threading.Thread(target=ask) for _ in range(4)]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join()
    assert len(found) == 4
    assert all(torch.equal(y, found[0]) for y in found)
    assert driver.record.evaluations == 120
