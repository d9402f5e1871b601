"""Evaluation by executors: threads, loky, and Dask with two processes."""

import copy
import gc
import os
import pickle
import signal
import threading
import time
import warnings
import weakref
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pytest
import torch

from bondgrad import BlackBox, BoxError
from bondgrad.calling._function import RowFunction
from bondgrad.evaluators import Driver, Executor, Local
from bondgrad.policies import Fixed
from tests.helpers import gradient

X, GY = torch.linspace(-1, 1, 12).view(4, 3), torch.linspace(1, 2, 12).view(4, 3)


@pytest.fixture(scope="module")
def client():
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def loky_executor():
    loky = pytest.importorskip("loky")
    with loky.ProcessPoolExecutor(2) as executor:
        yield executor


@pytest.fixture(scope="module")
def threads():
    with ThreadPoolExecutor(2) as executor:
        yield executor


@pytest.fixture(params=["threads", "loky_executor", "client"])
def executor(request):
    return request.getfixturevalue(request.param)


def sine(limit=10.0):
    """A box that is sent by value, since it is a closure."""

    def box(x: torch.Tensor):
        if x.max() > limit:
            raise RuntimeError("overvoltage")
        return torch.sin(x)

    return box


def once(path, action):
    """A box that does something else at its very first call, of all processes."""

    def box(x: torch.Tensor):
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            return torch.sin(x)
        return action(x)

    return box


def kill_process(x):
    os.kill(os.getpid(), signal.SIGKILL)


GO_ON = threading.Event()


def wait_for_signal(x: torch.Tensor):
    """A box that is sent by name, so that threads of this process see the same event."""
    GO_ON.wait(60)  # at most: a test that fails must not hang
    return x


def eventually(condition):
    """Wait until something holds that other threads or processes bring about."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def gradient_of(evaluator, fn, x=X):
    layer = BlackBox(fn, 3, evaluator=evaluator, policy="bond", seed=0)
    return gradient(layer, x, GY), layer


def ask(evaluator, fn, points=X):
    return Driver(evaluator).ask(RowFunction(fn, None), points, pairs=True)


@pytest.mark.parametrize("max_rows", [1, None])
def test_gradients_are_those_of_local(executor, max_rows):
    evaluator = Executor(executor, max_rows=max_rows)
    g, layer = gradient_of(evaluator, sine())
    expected, _ = gradient_of(Local(max_rows=1), sine())
    assert torch.equal(g, expected)
    assert evaluator.n == 2
    assert layer.stats.evaluations == 4 + 4 * 6
    assert {worker.worker for worker in layer.stats.workers} <= {0, 1}
    assert layer.stats.failures == 0


def test_a_factory_makes_the_boxes(executor):
    g, layer = gradient_of(Executor(executor, sine, max_rows=1), None)
    expected, _ = gradient_of(Local(max_rows=1), sine())
    assert torch.equal(g, expected)
    assert layer.function.name == "box"


def test_rows_that_raise_are_left_out(executor):
    x = X + 0.9995  # the last input is so close to the limit that one end of its move fails
    results = []
    for evaluator in (Executor(executor, max_rows=1), Local(max_rows=1)):
        layer = BlackBox(sine(2.0), 3, evaluator=evaluator, policy=Fixed(1e-2), seed=0)
        layer(X)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # rows were lost
            results.append((gradient(layer, x, GY), layer.stats.failures))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1] > 0


def test_outputs_keep_their_precision_where_other_rows_fail(threads, tmp_path):
    marker = tmp_path / "once"

    def box(x: torch.Tensor):
        if x[0, 0] == -1 and marker.exists():
            marker.unlink()
            raise RuntimeError("overvoltage")
        return x.double().sin()

    driver, function = Driver(Executor(threads, n=1, max_rows=1)), RowFunction(box, None)
    assert torch.equal(driver.ask(function, X).y, X.double().sin())
    marker.touch()
    with pytest.warns(UserWarning, match="1 row was asked again, and 0 remained without an output"):
        outcome = driver.ask(function, X)
    assert torch.equal(outcome.y, X.double().sin())


def test_a_mistake_is_raised_at_once(executor):
    def box(x: torch.Tensor):
        return x.no_such_method()

    with pytest.raises(BoxError, match=r"raised AttributeError.*no_such_method") as raised:
        ask(Executor(executor, retries=None), box)
    assert raised.value.__cause__.kind == "AttributeError"


def test_a_factory_that_fails_is_told_when_the_layer_is_made(executor):
    def factory():
        raise ValueError("no licence")

    with pytest.raises(BoxError, match="could not make its box: ValueError: no licence"):
        BlackBox(None, 3, evaluator=Executor(executor, factory))


def test_more_layers_than_a_worker_keeps_boxes_lose_no_rows(executor):
    evaluator = Executor(executor, max_rows=1)
    layers = [BlackBox(sine(10.0 + i), 3, evaluator=evaluator) for i in range(6)]
    for _ in range(2):
        assert all(torch.equal(layer(X), X.sin()) for layer in layers)
    assert all(layer.stats.failures == 0 and not layer.stats.errors for layer in layers)


def test_equal_questions_get_fresh_answers(client):
    def box(x: torch.Tensor):
        return torch.rand(len(x), 1)

    evaluator = Executor(client.get_executor(), n=2, max_rows=1)  # which takes functions for pure ones
    driver, function = Driver(evaluator), RowFunction(box, None)
    points = torch.zeros(4, 3)
    answers = torch.cat([driver.ask(function, points).y for _ in range(2)])
    assert len(answers.unique()) == 8


@pytest.mark.parametrize("kind", ["threads", "client"])
def test_a_task_that_takes_too_long_is_asked_again_elsewhere(kind, request, tmp_path):
    release = tmp_path / "release"

    def hang(x):
        while not release.exists():
            time.sleep(0.01)
        return x

    evaluator = Executor(request.getfixturevalue(kind), max_rows=1, timeout=1.0)
    with pytest.warns(UserWarning, match="did not answer 2 rows within"):
        outcome = ask(evaluator, once(tmp_path / "once", hang))
    assert torch.equal(outcome.y, X.sin())
    assert outcome.ok is None
    assert evaluator.abandoned == 1
    release.touch()
    eventually(lambda: evaluator.abandoned == 0)
    assert torch.equal(ask(evaluator, sine()).y, X.sin())


def test_more_tasks_than_workers_that_hang_are_an_error():
    GO_ON.clear()
    with ThreadPoolExecutor(2) as executor:
        layer = BlackBox(wait_for_signal, 3, evaluator=Executor(executor, timeout=0.1, retries=None))
        for _ in range(2):  # after the first error it is asked again
            with pytest.raises(BoxError, match=r"\d tasks hang in the box, more than the 2 that may.* timeout="):
                layer(X)
        GO_ON.set()
    assert layer.evaluator.abandoned == 0


def test_an_evaluator_that_the_loop_of_dask_collects_cancels_its_task(client, tmp_path):
    """A finalizer may run in any thread; there, the cancellation is only a coroutine that nobody awaits."""
    release, held, collected = tmp_path / "release", [], threading.Event()

    def hang(x: torch.Tensor):
        while not release.exists():
            time.sleep(0.01)
        return x

    def drop():
        held.clear()
        gc.collect()  # errors refer to the evaluator, and it to them
        collected.set()

    held.append(Executor(client, n=1, max_rows=1, timeout=0.1, retries=0))
    with pytest.raises(BoxError, match="did not answer"):
        ask(held[0], hang, X[:2])
    reference = weakref.ref(held[0])
    client.loop.add_callback(drop)
    assert collected.wait(60)
    assert reference() is None
    release.touch()
    assert torch.equal(ask(Executor(client, max_rows=1), sine()).y, X.sin())


def test_dask_replaces_a_worker_that_dies(client, tmp_path):
    outcome = ask(Executor(client, max_rows=1), once(tmp_path / "once", kill_process))
    assert torch.equal(outcome.y, X.sin())
    assert outcome.ok is None


def test_a_broken_executor_is_an_error_and_another_one_goes_on(loky_executor, tmp_path):
    loky = pytest.importorskip("loky")
    layer = BlackBox(once(tmp_path / "once", kill_process), 3)
    with loky.ProcessPoolExecutor(1) as executor:
        layer.evaluator = Executor(executor, max_rows=1, retries=None)
        for _ in range(2):
            with pytest.raises(BoxError, match=r"(?s)does not work any more: .*Set box.evaluator to an"):
                layer(X)
    layer.evaluator = Executor(loky_executor, max_rows=1)
    assert torch.equal(layer(X), X.sin())


def test_a_process_pool_of_the_standard_library(tmp_path):
    import multiprocessing

    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        evaluator = Executor(executor, max_rows=1, retries=None)
        assert torch.equal(ask(evaluator, sine()).y, X.sin())
        with pytest.raises(BoxError, match="executor does not work any more"):
            ask(evaluator, once(tmp_path / "once", kill_process))


def test_an_executor_that_was_shut_down():
    executor = ThreadPoolExecutor(1)
    evaluator = Executor(executor)
    assert torch.equal(ask(evaluator, sine()).y, X.sin())
    executor.shutdown()
    with pytest.raises(BoxError, match="does not work any more: cannot schedule new futures after shutdown"):
        ask(evaluator, sine())
    with pytest.raises(BoxError, match="could not make its box: cannot schedule new futures after shutdown"):
        BlackBox(None, 3, evaluator=Executor(executor, sine))


def test_it_leaves_the_executor_as_it_is(threads):
    with Executor(threads) as evaluator:
        assert torch.equal(ask(evaluator, sine()).y, X.sin())
    assert threads.submit(int).result() == 0
    assert torch.equal(ask(evaluator, sine()).y, X.sin())  # it starts again
    evaluator, reference = None, weakref.ref(evaluator)
    gc.collect()
    assert reference() is None


def test_copies_of_a_layer_share_it_and_it_cannot_be_saved(threads):
    layer = BlackBox(torch.sin, 3, evaluator=Executor(threads))
    assert copy.deepcopy(layer).evaluator is layer.evaluator
    with pytest.raises(TypeError, match=r"save model.state_dict\(\)"):
        pickle.dumps(layer)
    assert repr(layer.evaluator) == "Executor(ThreadPoolExecutor, n=2, max_rows=None, timeout=None)"


def test_arguments():
    with ThreadPoolExecutor(3) as executor:
        assert Executor(executor).n == 3
        assert Executor(executor, n=7).n == 7
        with pytest.raises(ValueError, match="n must be a positive integer, got 0"):
            Executor(executor, n=0)
        with pytest.raises(ValueError, match=r"factory must have no parameters.* use evaluators.Ray"):
            Executor(executor, lambda number: torch.sin)
    with pytest.raises(ValueError, match="executor must have a method submit, got 4"):
        Executor(4)

    class Plain:
        def submit(self, fn, *arguments):
            raise NotImplementedError

    assert Executor(Plain()).n == os.cpu_count()
