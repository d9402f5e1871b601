"""A thread whose answers are not waited for without end."""

import threading

import pytest
import torch

from bondgrad.calling._function import RowFunction
from bondgrad.evaluators import Driver
from bondgrad.measuring._watched_thread import CallAbandoned, WatchedThread

LONG = 60  # seconds


def asked(fn, seconds=LONG):
    thread = WatchedThread(lambda rows: seconds)
    try:
        return Driver(thread, once=True).ask(RowFunction(fn, None), torch.zeros(3, 2)).y
    finally:
        thread.close()


def test_answers_come_from_another_thread():
    threads = []

    def fn(x: torch.Tensor):
        threads.append(threading.current_thread())
        return x + 1

    assert torch.equal(asked(fn), torch.ones(3, 2))
    assert threads != [threading.main_thread()]


def test_a_call_that_does_not_come_back_is_given_up():
    over = threading.Event()

    def fn(x: torch.Tensor):
        over.wait(LONG)
        return x

    with pytest.raises(CallAbandoned) as caught:
        asked(fn, 0.1)
    over.set()
    assert (caught.value.rows, caught.value.seconds) == (3, 0.1)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError])
def test_what_is_raised_in_the_thread_is_raised_here(kind):
    def fn(x: torch.Tensor):
        raise kind

    with pytest.raises(kind):
        asked(fn)


def test_settings_of_the_caller_hold_in_the_thread():
    seen = []

    def fn(x: torch.Tensor):
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        return x

    with torch.autocast("cpu", torch.bfloat16):
        asked(fn)
    assert seen == [(False, True)]
