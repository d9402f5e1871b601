"""Coroutine functions as boxes: awaited on a loop of their own, many rows at a time, with nothing left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from bondgrad import BlackBox, BoxError, per_row
from bondgrad.calling import _event_loop as event_loop
from bondgrad.calling._function import RowFunction
from bondgrad.evaluators import Local, Processes, Threads
from bondgrad.policies import Fixed
from tests.helpers import close, gradient

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))  # only row 4 begins with a number above 1


async def rows(x: np.ndarray):
    await asyncio.sleep(1e-3)
    return np.sin(x)


async def sample(x):
    await asyncio.sleep(1e-3)
    if x[0] > 1:
        raise ValueError("too hot")
    return np.sin(x)


def in_flight(at_once=32):
    """A box that remembers the most rows that were awaited at a time."""
    now = most = 0

    async def f(x):
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(1e-3)
        now -= 1
        return x

    return per_row(f, at_once), lambda: most


def tasks_left():
    """The tasks on the loop of boxes, once they had a moment to end."""

    async def others():
        for _ in range(100):
            if len(asyncio.all_tasks()) == 1:
                break
            await asyncio.sleep(1e-2)
        return len(asyncio.all_tasks()) - 1

    return event_loop.settled(others())


def loops():
    return sum(thread.name == "bondgrad coroutines" for thread in threading.enumerate())


@pytest.mark.parametrize("box", [rows, per_row(rows)])
@pytest.mark.parametrize("evaluator", [Local, lambda: Local(max_rows=2), lambda: Threads(2), lambda: Processes(2)])
def test_with_every_evaluator(box, evaluator):
    with evaluator() as place:
        layer = BlackBox(box, 3, policy=Fixed(1e-2), evaluator=place)
        assert torch.allclose(layer(X), X.sin())
        assert close(gradient(layer, X, torch.ones(6, 3)), X.cos(), 1e-2)
    assert loops() <= 1


@pytest.mark.filterwarnings("ignore:.*(asked again|no finite output)")
@pytest.mark.parametrize("evaluator", [Local, lambda: Threads(2), lambda: Processes(2)])
def test_an_error_costs_its_row(evaluator):
    with evaluator() as place:
        layer = BlackBox(per_row(sample), 3, policy=Fixed(1e-3), evaluator=place)
        layer(X)
    assert layer.last_ok.tolist() == [True, True, True, True, False, True]
    assert dict(layer.stats.errors) == {"ValueError": 3}
    assert layer.stats.calls == layer.stats.evaluations == 8
    assert tasks_left() == 0


def test_inside_of_a_running_loop_as_in_a_notebook():
    async def notebook():
        layer = BlackBox(per_row(rows), 3, policy=Fixed(1e-2))
        return gradient(layer, X, torch.ones(6, 3)), asyncio.get_running_loop().is_running()

    g, runs = asyncio.run(notebook())
    assert runs
    assert close(g, X.cos(), 1e-2)


@pytest.mark.parametrize(("at_once", "most"), [(32, 20), (4, 4), (1, 1)])
def test_so_many_rows_are_in_flight_and_no_more(at_once, most):
    box, seen = in_flight(at_once)
    x = torch.randn(20, 3)
    assert torch.equal(RowFunction(box, None)(x), x)
    assert seen() == most


def test_whatever_is_to_be_awaited_is():
    class Client:
        async def read(self, x: np.ndarray):
            return await rows(x)

        async def __call__(self, x):
            return [float(x.sum())]

    client = Client()
    for box in (client.read, lambda x: rows(np.asarray(x)), per_row(lambda x: client.read(x))):
        assert torch.allclose(RowFunction(box, None)(X), X.sin())
    assert torch.allclose(RowFunction(per_row(client), None)(X)[:, 0].float(), X.sum(1))


def test_a_client_may_stay_with_its_loop():
    seen = []

    async def f(x):
        seen.append((asyncio.get_running_loop(), threading.current_thread()))
        return x

    for _ in range(3):
        BlackBox(per_row(f), 3)(X)
    assert len(set(seen)) == 1
    assert seen[0][1] is not threading.current_thread()


def test_what_remembers_has_its_rows_one_after_the_other():
    class Device:
        def __init__(self):
            self.now = 0

        def snapshot(self):
            return self.now

        def restore(self, now):
            self.now = now

        async def __call__(self, x):
            before = self.now
            await asyncio.sleep(1e-3)
            self.now = before + 1
            return [float(self.now)]

    assert BlackBox(per_row(Device()), 3)(X)[:, 0].tolist() == [1, 2, 3, 4, 5, 6]


# ---- when things go wrong


def test_errors_have_their_causes():
    async def wrong(x):
        return x.nothing()

    async def cancelled(x):
        asyncio.current_task().cancel()
        await asyncio.sleep(1)

    for box in (wrong, per_row(wrong)):
        with pytest.raises(BoxError, match="raised AttributeError") as caught:
            BlackBox(box, 3)(X)
        assert isinstance(caught.value.__cause__, AttributeError)
    for box in (cancelled, per_row(cancelled)):
        with pytest.raises(BoxError, match="raised CancelledError"):
            BlackBox(box, 3, evaluator=Local(retries=0))(X)
    assert tasks_left() == 0


def test_a_coroutine_that_ends_the_program_ends_it_and_not_the_loop():
    async def leaves(x):
        raise SystemExit(3)

    for box in (leaves, per_row(leaves)):
        with pytest.raises(SystemExit):
            BlackBox(box, 3)(X)
        assert torch.allclose(BlackBox(rows, 3)(X), X.sin())
    assert loops() == 1


@pytest.mark.filterwarnings("ignore:.*(asked again|no finite output)")
def test_a_row_that_hangs_is_cancelled_and_its_thread_is_free():
    async def hangs(x):
        if x[0] > 1:
            await asyncio.sleep(600)
        return np.sin(x)

    with Threads(2, timeout=0.1) as place:
        layer = BlackBox(per_row(hangs), 3, evaluator=place)
        layer(X)
        assert layer.last_ok.tolist() == [True] * 4 + [False] + [True]
        assert layer.stats.errors["TimeoutError"] >= 3
        deadline = time.monotonic() + 10
        while place.abandoned and time.monotonic() < deadline:
            time.sleep(0.01)
        assert place.abandoned == 0
    assert tasks_left() == 0


def test_ctrl_c_cancels_what_is_awaited():
    async def hangs(x):
        if x.ndim == 2 or x[0] == X[5, 0]:  # the last one
            os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(600)

    for box in (per_row(hangs), hangs):
        with pytest.raises(KeyboardInterrupt):
            BlackBox(box, 3)(X)
        assert tasks_left() == 0
    assert torch.allclose(BlackBox(rows, 3)(X), X.sin())


def test_a_coroutine_that_waits_for_another_box_is_told_so():
    inner = BlackBox(rows, 3)

    async def outer(x):
        return inner(torch.as_tensor(x))

    with pytest.raises(BoxError, match="must not wait for another box whose function is a coroutine"):
        BlackBox(outer, 3)(X)


PROGRAM = """
import asyncio, sys, torch
from bondgrad import BlackBox, per_row

async def f(x):
    asyncio.get_running_loop().create_task(asyncio.sleep(600))
    return x

async def generator():
    try:
        yield 1
    finally:
        print("closed")

async def opens(x):
    opens.kept = generator()
    await anext(opens.kept)
    return x

BlackBox(per_row(f), 3)(torch.zeros(2, 3))
BlackBox(opens, 3)(torch.zeros(2, 3))
print("done")
"""


def test_a_program_ends_without_a_word():
    ended = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error::ResourceWarning", "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout) == (0, "done\nclosed\n")
    assert "never awaited" not in ended.stderr
    assert "pending" not in ended.stderr
    assert "Error" not in ended.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_that_was_forked_has_a_loop_of_its_own():
    assert torch.allclose(BlackBox(rows, 3)(X), X.sin())
    child = os.fork()
    if child == 0:
        right = torch.allclose(RowFunction(per_row(lambda x: rows(x)), None)(X[:2]), X[:2].sin())
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# ---- a real client


def test_a_service_over_http():
    aiohttp = pytest.importorskip("aiohttp")
    web = pytest.importorskip("aiohttp.web")
    served = most = now = 0

    async def answer(request):
        nonlocal served, most, now
        x = (await request.json())["x"]
        served, now = served + 1, now + 1
        number = served
        most = max(most, now)
        await asyncio.sleep(2e-3)
        now -= 1
        if number % 10 == 0:
            return web.Response(status=503)
        return web.json_response({"y": [v * v for v in x]})

    address, stop = [], threading.Event()

    async def serve():
        app = web.Application()
        app.router.add_post("/", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address.append(f"http://127.0.0.1:{runner.addresses[0][1]}/")
        while not stop.is_set():
            await asyncio.sleep(1e-2)
        await runner.cleanup()

    server = threading.Thread(target=asyncio.run, args=(serve(),))
    server.start()
    while not address:
        time.sleep(1e-2)
    sessions = []

    async def ask(x):
        if not sessions:
            sessions.append(aiohttp.ClientSession())
        async with sessions[0].post(address[0], json={"x": x.tolist()}) as response:
            response.raise_for_status()
            return (await response.json())["y"]

    async def close_session():
        await sessions[0].close()

    try:
        layer = BlackBox(per_row(ask, at_once=8), 3, policy=Fixed(1e-2))
        with pytest.warns(UserWarning, match="raised ClientResponseError on row"):
            g = gradient(layer, X, torch.ones(6, 3))
        assert close(g, 2 * X, 1e-2)
        assert most == 8
        assert served == layer.stats.calls == layer.stats.evaluations
        assert layer.stats.errors["ClientResponseError"] == served // 10
        assert layer.stats.failures == 0
    finally:
        event_loop.settled(close_session())
        stop.set()
        server.join()
