"""Sharing work: how requests are divided into tasks, and which worker gets them."""

import threading
import time
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bondgrad import BlackBox, BoxError
from bondgrad.calling._function import RowFunction
from bondgrad.errors import RequestCancelled
from bondgrad.evaluators import Driver, Request, Threads
from bondgrad.evaluators._evaluator import Cancellation
from bondgrad.evaluators._tasks import divide, pack, unpack
from bondgrad.evaluators._worker import takes_number


@given(
    rows=st.integers(0, 600), workers=st.integers(1, 12), max_rows=st.none() | st.integers(1, 50), pairs=st.booleans()
)
def test_tasks_have_all_rows_once_and_whole_pairs(rows, workers, max_rows, pairs):
    units = (rows + 1) // 2 if pairs else rows
    tasks = divide(rows, workers, max_rows, pairs)
    assert [row for task in tasks for row in range(task.start, task.stop)] == list(range(rows))
    sizes = [task.stop - task.start for task in tasks]
    if pairs:
        assert all(task.start % 2 == 0 for task in tasks)
    if max_rows is not None:
        assert max(sizes) <= max(max_rows, 2 if pairs else 1)
    assert len(tasks) >= min(workers, max(1, units))
    assert max(sizes) - min(sizes) <= (2 + rows % 2 if pairs else 1)


@pytest.mark.parametrize(("max_rows", "sizes"), [(None, [10, 10]), (4, [4] * 5), (1, [2] * 10), (3, [2] * 10)])
def test_sizes_of_tasks(max_rows, sizes):
    assert [task.stop - task.start for task in divide(20, 2, max_rows, pairs=True)] == sizes


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
@pytest.mark.parametrize("shape", [(4,), (4, 3), (0, 3), (2, 0), (2, 3, 4)])
def test_tensors_are_the_same_after_a_journey(dtype, shape):
    t = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    again = unpack(pack(t))
    assert again.dtype == dtype
    assert torch.equal(again, t)
    assert torch.equal(unpack(pack(t.mT if t.ndim > 1 else t)), t.mT if t.ndim > 1 else t)


@pytest.mark.parametrize(
    ("factory", "takes"),
    [
        (lambda: 1, False),
        (lambda number: 1, True),
        (lambda number=0: 1, False),
        (lambda *, number: 1, False),
        (lambda *numbers: 1, False),
        (int, False),
        (None, False),
    ],
)
def test_a_factory_with_a_parameter_is_given_the_number_of_its_worker(factory, takes):
    assert takes_number(factory) == takes


def test_a_free_worker_takes_the_next_task():
    started = threading.Event()

    def make(number):
        def box(x: torch.Tensor):
            if number == 0:
                started.wait(5)  # until the others have done all the rest
            return torch.full((len(x), 1), float(number))

        return box

    with Threads(3, make, max_rows=1) as evaluator:
        driver = Driver(evaluator)
        layer = BlackBox(None, 1, evaluator=evaluator)

        def release():
            while driver.record.evaluations == 0 and not started.is_set():
                time.sleep(0.05)
                started.set()

        helper = threading.Thread(target=release)
        helper.start()
        y = driver.ask(layer.function, torch.zeros(60, 1)).y
        helper.join()
    assert int((y == 0).sum()) < 20


def test_a_worker_that_keeps_failing_is_set_aside_while_others_work():
    calls = [0, 0]

    def make(number):
        def box(x: torch.Tensor):
            calls[number] += 1
            time.sleep(0.001)
            if number == 1:
                raise RuntimeError("loose cable")
            return torch.sin(x)

        return box

    points = torch.randn(100, 2)
    with Threads(2, make, max_rows=1) as evaluator:
        layer = BlackBox(None, 2, evaluator=evaluator)
        with pytest.warns(UserWarning, match="loose cable"):
            y, ok = layer.driver.ask(layer.function, points)
    assert ok is None
    assert torch.equal(y, points.sin())
    assert calls[1] == 3  # and then not for a second
    assert calls[0] == 100


def test_when_all_workers_fail_they_are_still_asked():
    failures = iter([True] * 12)

    def fn(x: torch.Tensor):
        if next(failures, False):
            raise RuntimeError("outage")
        return torch.sin(x)

    points = torch.randn(4, 2)
    with Threads(2, max_rows=1, retries=None) as evaluator, pytest.warns(UserWarning, match="outage"):
        y, ok = Driver(evaluator).ask(RowFunction(fn, None), points)
    assert ok is None
    assert torch.equal(y, points.sin())


def test_a_worker_that_answers_again_is_set_aside_no_longer():
    both = threading.Barrier(2)

    def fn(x: torch.Tensor):
        both.wait(60)
        return x

    with Threads(2, max_rows=1) as evaluator:
        layer = BlackBox(fn, 2, evaluator=evaluator)
        layer(torch.zeros(2, 2))  # from now on both threads have the box
        source = evaluator.source(layer.function)
        with evaluator.changed:
            first = evaluator.take_worker(source, 2)
            for _ in range(10):
                evaluator.judge(first, failed=True)
            evaluator.judge(first, failed=False)
            evaluator.give_back(first, True, source)
            taken = [evaluator.take_worker(source, 2) for _ in range(2)]
            for worker in taken:
                evaluator.give_back(worker, True, source)
    assert {worker.number for worker in taken} == {0, 1}


def test_a_worker_may_fail_thousands_of_times_in_a_row():
    def fn(x: torch.Tensor):
        if x[0, 0] < 1100:
            raise RuntimeError("out of range")
        return x

    points = torch.arange(1101.0)[:, None]
    with Threads(1, max_rows=1, retries=0) as evaluator, pytest.warns(UserWarning, match="out of range"):
        ok = Driver(evaluator).ask(RowFunction(fn, None), points).ok
    assert ok.tolist() == [False] * 1100 + [True]


def test_a_request_that_is_cancelled_starts_no_more_tasks():
    cancelled, calls = Cancellation(), []

    def fn(x: torch.Tensor):
        calls.append(len(x))
        if len(calls) == 6:
            cancelled.set()
        return torch.sin(x)

    with Threads(2, max_rows=1) as evaluator:
        driver = Driver(evaluator)
        with pytest.raises(RequestCancelled) as caught:
            driver.ask(RowFunction(fn, None), torch.zeros(200, 2), cancelled=cancelled)
    assert caught.value.rows == len(calls) == driver.record.evaluations < 20


def test_those_who_wait_are_told_when_all_rows_are_with_workers():
    release, begun = threading.Event(), []

    def fn(x: torch.Tensor):
        release.wait(5)
        return torch.sin(x)

    def begin():
        begun.append(True)
        release.set()

    with Threads(4, max_rows=1) as evaluator:
        Driver(evaluator).ask(RowFunction(fn, None), torch.zeros(4, 2), begun=begin)
    assert begun == [True]


def test_a_box_with_memory_is_called_here_or_refused():
    here = []

    def fn(x: torch.Tensor):
        here.append(threading.current_thread() is threading.main_thread())
        return torch.sin(x)

    request = Request(RowFunction(fn, None), torch.zeros(4, 2), whole=True)
    with Threads(2) as evaluator:
        evaluator.evaluate(request)
    assert here == [True]
    with (
        Threads(2, lambda: fn) as evaluator,
        pytest.raises(BoxError, match="a box with memory is called in this process"),
    ):
        evaluator.evaluate(request)


def test_a_box_whose_start_keeps_failing_is_an_error_that_says_so():
    broken = []

    def make():
        if broken:
            raise OSError("no such device")
        return torch.sin

    with Threads(2, make) as evaluator, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = BlackBox(None, 2, evaluator=evaluator)
        evaluator.close()
        broken.append(True)
        with pytest.raises(BoxError, match="could not make its box: no such device"):
            layer(torch.zeros(4, 2))
        broken.clear()
        assert torch.equal(layer(torch.zeros(4, 2)), torch.zeros(4, 2))


def test_statistics_of_workers():
    both = threading.Barrier(2, timeout=60)

    def fn(x: torch.Tensor):
        both.wait()
        return torch.sin(x)

    with Threads(2, max_rows=1) as evaluator:
        layer = BlackBox(fn, 2, 2, evaluator=evaluator)
        layer(torch.randn(50, 2))
    assert [worker.worker for worker in layer.stats.workers] == [0, 1]
    assert sum(worker.rows for worker in layer.stats.workers) == layer.stats.evaluations == 50
    for worker in layer.stats.workers:
        assert 0 <= worker.busy <= 1
        assert worker.failures == 0
        assert 0 < worker.latency[0] <= worker.latency[1] <= worker.latency[2]
