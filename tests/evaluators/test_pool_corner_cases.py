"""Pools of workers in unusual situations, each of which went wrong once."""

import os
import signal
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from bondgrad import BlackBox, BoxError, EvaluationLimitError
from bondgrad.calling._function import RowFunction
from bondgrad.evaluators import Driver, Executor, Local, Processes, Threads
from bondgrad.policies import Fixed
from tests.helpers import gradient


class SameMemory:
    """A box that answers every call in the same memory."""

    def __init__(self):
        self.y = torch.zeros(1, 2)

    def __call__(self, x: torch.Tensor):
        torch.mul(x, 2, out=self.y)
        return self.y


def test_a_task_that_ends_at_its_deadline_is_not_lost():
    def fn(x: torch.Tensor):
        time.sleep(0.005)
        return 2 * x

    points = torch.ones(6, 2)
    with Threads(2, max_rows=1, timeout=0.05, rate=20, retries=0) as evaluator:  # the next tasks wait for their turn
        driver = Driver(evaluator)
        y, ok = driver.ask(RowFunction(fn, None), points)
    assert ok is None
    assert torch.equal(y, 2 * points)
    assert driver.record.evaluations == 6


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("kind", ["threads", "executor"])
def test_boxes_that_answer_in_the_same_memory(kind, eager):
    with ThreadPoolExecutor(2) as pool:
        options = {"max_rows": 1, "factory": SameMemory}
        evaluator = Threads(2, **options) if kind == "threads" else Executor(pool, n=4, **options)
        layer = BlackBox(None, 2, evaluator=evaluator, eager=eager, policy=Fixed(1e-2))
        for x in torch.randn(20, 8, 2):
            x.requires_grad_()
            y = layer(x)
            assert torch.equal(y, 2 * x)
            y.sum().backward()
            assert torch.allclose(x.grad, torch.full((8, 2), 2.0), atol=1e-3)
        evaluator.close()


def test_a_retry_in_another_precision_keeps_what_came_before():
    fails = iter([True])

    def fn(x: torch.Tensor):
        if float(x[0, 0]) == 3 and next(fails, False):
            raise RuntimeError("once")
        return 2 * x.double() if float(x[0, 0]) == 3 else 2 * x

    points = torch.arange(5.0).view(5, 1)
    with pytest.warns(UserWarning, match="once"):
        y, ok = Driver(Local(max_rows=1)).ask(RowFunction(fn, None), points)
    assert ok is None
    assert torch.equal(y, 2 * points.double())


def test_a_retry_that_raises_keeps_the_outputs_that_are_finite():
    answers = iter([torch.tensor([[2.0, torch.inf]])])

    def fn(x: torch.Tensor):
        try:
            return next(answers)
        except StopIteration:
            raise RuntimeError("gone") from None

    with pytest.warns(UserWarning, match="gone"):
        y, _ = Driver(Local()).ask(RowFunction(fn, None), torch.zeros(1, 2))
    assert y.tolist() == [[2, torch.inf]]


def test_an_error_that_may_come_by_chance_is_asked_again_in_the_first_call_too():
    fails = iter([True])

    def fn(x):
        if next(fails, False):
            raise ValueError("out of range")
        return torch.sin(x)

    with pytest.warns(UserWarning, match="out of range"):
        assert torch.equal(BlackBox(fn, 2)(torch.ones(3, 2)), torch.ones(3, 2).sin())


def test_a_request_that_cannot_be_sent_leaves_the_worker_free():
    with Processes(1, spares=0) as evaluator:
        layer = BlackBox(lambda x, c: 2 * x, 2, evaluator=evaluator)
        with pytest.raises(TypeError):
            layer(torch.ones(2, 2), torch.ones(2).to(torch.float8_e4m3fn))
        assert torch.equal(layer(torch.ones(2, 2), torch.ones(2)), torch.full((2, 2), 2.0))


def test_an_idle_process_that_was_killed_and_eager():
    with Processes(2, max_rows=1, spares=0) as evaluator, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = BlackBox(lambda x: x * 0 + os.getpid() % 2**16, 2, evaluator=evaluator, eager=True, policy=Fixed(1e-2))
        x = torch.ones(4, 2)
        gradient(layer, x, torch.ones(4, 2))
        for process in evaluator_processes():
            os.kill(process, signal.SIGKILL)
        time.sleep(0.3)
        gradient(layer, x, torch.ones(4, 2))
    assert layer.stats.failures == 0


def evaluator_processes():
    import psutil

    children = psutil.Process().children(recursive=True)
    return [child.pid for child in children if "spawn_main" in " ".join(child.cmdline())]


def test_a_box_in_a_box_of_the_same_threads():
    with Threads(2, max_rows=1) as evaluator:
        inner = BlackBox(torch.sin, 2, evaluator=evaluator)
        outer = BlackBox(lambda x: 2 * inner(x), 2, evaluator=evaluator)
        x = torch.randn(8, 2)
        assert torch.allclose(outer(x), 2 * x.sin())


@pytest.mark.parametrize("limit", [28, 40, 56, 57])
def test_the_limit_of_evaluations_holds_for_requests_side_by_side(limit):
    with Threads(2, max_rows=1, max_evaluations=limit) as evaluator:
        layer = BlackBox(torch.sin, 3, evaluator=evaluator, eager=True, policy=Fixed(1e-2))
        with pytest.raises(EvaluationLimitError):
            for _ in range(3):
                gradient(layer, torch.randn(4, 3), torch.ones(4, 3))
        time.sleep(0.05)  # what is under way may end
        assert layer.stats.evaluations <= limit


def test_memory_that_runs_out_beside_the_gradient():
    def fn(x: torch.Tensor):
        if len(x) > 2:
            raise MemoryError
        return torch.sin(x)

    with Threads(2) as evaluator, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = BlackBox(fn, 3, 3, evaluator=evaluator, eager=True, policy=Fixed(1e-2))
        x = torch.randn(8, 3)
        assert torch.allclose(gradient(layer, x, torch.ones(8, 3)), x.cos(), atol=1e-3)
        assert torch.allclose(gradient(layer, x, torch.ones(8, 3)), x.cos(), atol=1e-3)


def test_memory_that_runs_out_in_the_forward_pass_alone():
    def fn(x: torch.Tensor):
        if len(x) > 2 and torch.equal(x, x.round()):
            raise MemoryError
        return torch.sin(x)

    with Threads(2) as evaluator, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = BlackBox(fn, 3, 3, evaluator=evaluator, eager=True, policy=Fixed(1e-2))
        x = torch.arange(24.0).view(8, 3)
        assert torch.allclose(gradient(layer, x, torch.ones(8, 3)), x.cos(), atol=1e-3)
    assert layer.stats.wasted == 0  # what was planned with more memory is used


def test_closing_during_a_request_of_another_thread_ends_it():
    with Processes(2, max_rows=1, spares=0) as evaluator, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        driver, function = Driver(evaluator), RowFunction(lambda x: (time.sleep(0.05), x)[1], None)
        driver.ask(function, torch.zeros(2, 1))
        outcome = []
        asker = threading.Thread(target=lambda: outcome.append(driver.ask(function, torch.ones(12, 1))))
        asker.start()
        time.sleep(0.1)
        evaluator.close()
        asker.join(60)
    assert torch.equal(outcome[0].y, torch.ones(12, 1))


def test_what_was_answered_is_kept_when_too_many_threads_hang():
    def fn(x: torch.Tensor):
        if float(x[0, 0]) > 3:
            time.sleep(60)
        return torch.sin(x)

    with Threads(1, max_rows=1, timeout=0.05) as evaluator, pytest.raises(BoxError, match="2 threads hang in the box"):
        driver = Driver(evaluator)
        driver.ask(RowFunction(fn, None), torch.arange(8.0).view(8, 1))
    assert driver.record.evaluations == 6  # four that were answered, two that hang; two were not begun
