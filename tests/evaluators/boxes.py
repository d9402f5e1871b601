"""Boxes for evaluators: slow, flaky, hanging, of one row at a time. They are importable in other processes."""

import os
import sys
import threading
import time

import torch


def sine(x: torch.Tensor):
    return torch.sin(x) + x[:, :1]


def one_row(x: torch.Tensor):
    assert len(x) == 1, "one row at a time"
    return torch.sin(x) * x.sum(1, keepdim=True)


class WhoAnswers:
    """Answers with the number of its worker, and with a count of its calls."""

    def __init__(self, number):
        self.number, self.calls = number, 0

    def __call__(self, x: torch.Tensor):
        self.calls += 1
        return torch.stack([torch.full((len(x),), float(self.number)), torch.full((len(x),), float(self.calls))], 1)


def process_number(x: torch.Tensor):
    time.sleep(0.01)
    return torch.full((len(x), 1), float(os.getpid()))


def thread_number(x: torch.Tensor):
    time.sleep(0.01)
    return torch.full((len(x), 1), float(threading.get_native_id() % 2**20))


def torch_threads():
    return lambda x: torch.full((len(x), 1), float(torch.get_num_threads()))


def broken_factory():
    raise RuntimeError("the licence server is down")


def hangs_above(limit):
    """A factory of boxes that hang on rows whose first input is above a limit."""

    def box(x: torch.Tensor):
        if bool((x[:, 0] > limit).any()):
            time.sleep(60)
        return torch.sin(x)

    return box


class DiesOnce:
    """Ends its process at the first row above 1, and leaves a file that says so; from then on it answers."""

    def __init__(self, path):
        self.path = path

    def __call__(self, x: torch.Tensor):
        if bool((x[:, 0] > 1).any()) and not self.path.exists():
            self.path.touch()
            os.kill(os.getpid(), 9)
        return torch.sin(x)


def leaving_factory():
    sys.exit("the licence server is down")


class Leaves:
    """Ends the program at rows above 1, in one of the ways that are no `Exception`."""

    def __init__(self, error=SystemExit):
        self.error = error

    def __call__(self, x: torch.Tensor):
        if bool((x[:, 0] > 1).any()):
            raise self.error("the box leaves")
        return torch.sin(x)


class Seeded:
    """A noisy box that takes a seed."""

    def __call__(self, x: torch.Tensor, seed: int = 0):
        return torch.sin(x) + torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
