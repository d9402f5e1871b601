"""Rows evaluated in other processes."""

import gc
import multiprocessing.spawn
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from bondgrad import BlackBox, BoxError
from bondgrad.calling._function import RowFunction
from bondgrad.evaluators import Driver, Local, Processes
from bondgrad.policies import Fixed
from bondgrad.structure import Blocks
from tests.evaluators.boxes import (
    DiesOnce,
    WhoAnswers,
    broken_factory,
    hangs_above,
    one_row,
    process_number,
    torch_threads,
)
from tests.helpers import gradient

pytest.importorskip("pebble")
pytest.importorskip("cloudpickle")


@pytest.fixture(scope="module")
def two():
    """Two processes that all tests of this module share which do not harm them."""
    with Processes(2, max_rows=1) as evaluator:
        yield evaluator


def workers_of(process):
    """The other processes that a process has started, without multiprocessing's own."""
    return [
        child
        for child in psutil.Process(process).children(recursive=True)
        if "resource_tracker" not in " ".join(child.cmdline())
    ]


@pytest.mark.parametrize("estimator", ["central", "forward", "simultaneous"])
def test_gradients_are_those_of_this_process(two, estimator):
    x, gy = torch.linspace(-1, 1, 21).view(7, 3), torch.ones(7, 3)
    layers = [BlackBox(one_row, 3, estimator=estimator, evaluator=e, seed=0) for e in (Local(max_rows=1), two)]
    for scale in (1, 0.5, 2):
        a, b = (gradient(layer, x * scale, gy) for layer in layers)
        assert torch.equal(a, b)
    assert layers[0].stats.evaluations == layers[1].stats.evaluations
    assert layers[0].stats.calls == layers[1].stats.calls


def test_closures_contexts_and_all_dtypes_travel(two):
    scale = 3.0
    seen = BlackBox(lambda x, a, b: scale * x + a[:, None] + b.float(), 2, evaluator=two, policy=Fixed(1e-2))
    x = torch.randn(4, 2, dtype=torch.float64)
    a, b = torch.arange(4), torch.ones(4, 2, dtype=torch.bfloat16)
    assert torch.equal(seen(x, a, b), scale * x + a[:, None] + 1)
    assert torch.allclose(gradient(seen, x, torch.ones(4, 2).double(), a, b), torch.full((4, 2), scale).double())


def test_the_dtype_and_rounding_of_outputs_are_learnt(two):
    layer = BlackBox(lambda x: x.double().sin(), 3, evaluator=two)
    y = layer.evaluate_rows(torch.randn(2, 3), (), None, graded=False)[0]
    assert y.dtype == layer.function.dtype == torch.float64
    assert layer.function.rounding == torch.finfo(torch.float64).eps
    assert layer.out_features == 3


def test_a_module_whose_tensors_change_is_sent_again(two):
    module = nn.Linear(3, 2)
    layer, x = BlackBox(module, 3, evaluator=two), torch.randn(4, 3)
    assert torch.allclose(layer(x), module(x))
    with torch.no_grad():
        module.weight.mul_(2)
    assert torch.allclose(layer(x), module(x))
    layer.fn = nn.Linear(3, 2)
    assert torch.allclose(layer(x), layer.fn(x))


def test_a_function_that_cannot_be_sent_is_refused(two):
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"cannot be sent to other processes.*Give a factory= "):
        BlackBox(lambda x: (lock, x)[1], 3, evaluator=two)(torch.zeros(2, 3))


def test_errors_come_with_the_traceback_of_the_other_process(two):
    def fn(x: torch.Tensor):
        if float(x[0, 0]) == 0:
            raise RuntimeError("the laser is off")
        return x

    layer = BlackBox(fn, 2, evaluator=two)
    with pytest.warns(UserWarning, match="the laser is off"), pytest.warns(UserWarning, match="no finite output"):
        y = layer(torch.tensor([[0.0, 1.0], [1.0, 1.0]]))
    assert torch.equal(y, torch.ones(2, 2))
    assert layer.stats.errors == {"RuntimeError": 3}
    assert 'raise RuntimeError("the laser is off")' in layer.stats.tracebacks["RuntimeError"]
    assert layer.last_ok.tolist() == [False, True]


def test_a_mistake_is_raised_at_once(two):
    with pytest.raises(BoxError, match="no attribute 'sine'"):
        BlackBox(lambda x: x.sine(), 2, evaluator=two)(torch.zeros(20, 2))
    with pytest.raises(BoxError, match="must return one row of outputs per row"):
        BlackBox(lambda x: x[:0], 2, evaluator=two)(torch.zeros(20, 2))


def test_memory_that_runs_out_elsewhere_halves_the_calls():
    def fn(x: torch.Tensor):
        if len(x) > 5:
            raise MemoryError
        return torch.sin(x)

    x = torch.randn(20, 3)
    with Processes(2, spares=0) as evaluator, pytest.warns(UserWarning, match="out of memory with 20 rows"):
        assert torch.equal(BlackBox(fn, 3, evaluator=evaluator)(x), x.sin())


def test_a_box_of_each_process_made_by_a_factory():
    with Processes(2, WhoAnswers, max_rows=1) as evaluator:
        assert evaluator.spares == 0  # there is no third device
        layer = BlackBox(None, 3, evaluator=evaluator)
        y = layer(torch.randn(12, 3))
        assert layer.function.name == "WhoAnswers"
    rows = {worker.worker: worker.rows for worker in layer.stats.workers}
    assert {number: int((y[:, 0] == number).sum()) for number in rows} == rows


def test_what_a_box_says_of_its_structure_is_known_here():
    def make():
        def box(x):
            return x.sin()

        box.structure = Blocks(1, 1)
        return box

    with Processes(1, make, spares=0) as evaluator:
        layer = BlackBox(None, 4, evaluator=evaluator, policy=Fixed(1e-2))
        gradient(layer, torch.randn(3, 4), torch.ones(3, 4))
    assert layer.structure.groups(4, 4).count == 1
    assert layer.stats.evaluations == 3 * (1 + 2)


def test_processes_have_one_torch_thread_unless_told():
    for threads in (1, 2):
        with Processes(1, torch_threads, torch_threads=threads, spares=0) as evaluator:
            assert float(BlackBox(None, 1, evaluator=evaluator)(torch.zeros(1, 1))) == threads


def test_a_factory_that_raises_is_an_error_when_the_layer_is_made():
    with pytest.raises(BoxError, match="could not make its box: RuntimeError: the licence server is down"):
        BlackBox(None, 3, evaluator=Processes(2, broken_factory))


def test_a_box_that_hangs_is_ended_and_costs_its_own_rows():
    points = torch.zeros(6, 2)
    points[4, 0] = 2.0
    with Processes(2, max_rows=1, timeout=0.5, retries=0) as evaluator:
        driver = Driver(evaluator)
        with pytest.warns(UserWarning, match="did not answer 1 row within"):
            y, ok = driver.ask(RowFunction(hangs_above(1), None), points)
        assert torch.equal(y[ok], points[ok].sin())
        assert torch.equal(
            driver.ask(RowFunction(one_row, None), points).y, torch.cat([one_row(x[None]) for x in points])
        )
    assert ok.tolist() == [row != 4 for row in range(6)]
    assert driver.record.errors == {"TimeoutError": 1}


def test_a_process_that_dies_costs_its_task_which_is_asked_again(tmp_path):
    points = torch.zeros(12, 2)
    points[4, 0] = 2.0
    with Processes(2, max_rows=1) as evaluator:
        driver = Driver(evaluator)
        with pytest.warns(UserWarning, match="1 row was asked again, and 0 remained without an output.*ended while"):
            y, ok = driver.ask(RowFunction(DiesOnce(tmp_path / "died"), None), points)
    assert ok is None
    assert torch.equal(y, points.sin())
    assert driver.record.evaluations == 13


def test_an_idle_process_that_is_killed_is_replaced(two):
    function, points = RowFunction(process_number, None), torch.zeros(8, 1)
    driver = Driver(two)
    before = set(driver.ask(function, points).y.flatten().tolist())
    os.kill(int(next(iter(before))), signal.SIGKILL)
    time.sleep(0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whether a task is lost depends on the moment
        y, ok = driver.ask(function, points)
    assert ok is None
    assert set(y.flatten().tolist()) != before


def test_all_processes_killed_in_the_middle_are_replaced():
    function, points = RowFunction(process_number, None), torch.zeros(60, 1)
    with Processes(2, max_rows=1) as evaluator, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        driver = Driver(evaluator)
        pids = driver.ask(function, torch.zeros(8, 1)).y.flatten().unique().tolist()
        killer = threading.Timer(0.1, lambda: [os.kill(int(pid), signal.SIGKILL) for pid in pids])
        killer.start()
        y, ok = driver.ask(function, points)
        killer.join()
    assert ok is None
    assert not set(y.flatten().tolist()) <= set(pids)


def test_no_process_is_left_after_closing():
    before = {child.pid for child in workers_of(os.getpid())}
    with Processes(2) as evaluator:
        BlackBox(one_row, 2, evaluator=evaluator, out_features=2).evaluate_rows(torch.zeros(2, 2), (), None, False)
        assert len({child.pid for child in workers_of(os.getpid())} - before) == 3  # one stands ready
    assert {child.pid for child in workers_of(os.getpid())} <= before


def test_no_process_is_left_when_the_evaluator_is_forgotten():
    before = {child.pid for child in workers_of(os.getpid())}
    layer = BlackBox(one_row, 2, evaluator=Processes(1, spares=0))
    layer(torch.zeros(1, 2))
    started = [child for child in workers_of(os.getpid()) if child.pid not in before]
    assert len(started) == 1
    del layer
    gc.collect()
    assert not psutil.wait_procs(started, timeout=10)[1]


SCRIPT = """
import os, sys, time
import torch
from bondgrad import BlackBox
from bondgrad.evaluators import Processes

def box(x: torch.Tensor):
    time.sleep(0.01)
    return torch.sin(x)

layer = BlackBox(box, 2, evaluator=Processes(2, max_rows=1))
layer(torch.zeros(4, 2))
print("ready", flush=True)
if sys.argv[1] == "raise":
    raise ValueError("in training")
if sys.argv[1] == "end":
    sys.exit(0)
while True:
    layer(torch.zeros(4, 2))
"""


UNGUARDED = """
import torch
from bondgrad import BlackBox
from bondgrad.evaluators import Processes

scale = 3.0

def shifted(x):
    return scale * x + 1

class Box:
    def __call__(self, x: torch.Tensor):
        return shifted(x)

print("begun")
with Processes(2, Box) as evaluator:
    print(BlackBox(None, 1, evaluator=evaluator)(torch.ones(2, 1)).tolist())
"""


@pytest.mark.parametrize("place", ["script", "standard input"])
def test_the_main_module_is_not_run_again_and_its_functions_are_known(tmp_path, place):
    (tmp_path / "script.py").write_text(UNGUARDED)
    command = [sys.executable, *([tmp_path / "script.py"] if place == "script" else ["-"])]
    done = subprocess.run(command, input=UNGUARDED, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == "begun\n[[4.0], [4.0]]\n"


def test_other_processes_are_started_as_ever():
    spawned = multiprocessing.get_context("spawn").Process(target=print, args=("",))
    spawned.start()  # with what is said of the main module
    spawned.join()
    assert spawned.exitcode == 0
    say = multiprocessing.spawn.get_preparation_data
    assert say("other").keys() == getattr(say, "__wrapped__", say)("other").keys()


@pytest.mark.parametrize("how", ["end", "raise", signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_survives_the_program(tmp_path, how):
    script = Path(tmp_path / "script.py")
    script.write_text(SCRIPT)
    program = subprocess.Popen(
        [sys.executable, script, str(how)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert program.stdout.readline() == "ready\n"
    children = workers_of(program.pid) if not isinstance(how, str) else []
    if not isinstance(how, str):
        assert len(children) == 3
        time.sleep(0.2)
        program.send_signal(how)
    program.wait(20)
    program.stdout.close()
    _, alive = psutil.wait_procs(children, timeout=15)
    assert not alive
