"""The evaluators that benchmarks compare, each with what it needs around it, and boxes that can be sent to them."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bondgrad.evaluators import Evaluator, Executor, Processes, Ray, Threads


@contextlib.contextmanager
def dask(n: int, **options: Any) -> Iterator[Evaluator]:
    """A Dask cluster of n worker processes on this machine."""
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=n, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        Client(cluster) as client,
        Executor(client, n=n, **options) as evaluator,
    ):
        yield evaluator


KINDS: dict[str, Callable[..., contextlib.AbstractContextManager[Evaluator]]] = {
    "Threads": Threads,
    "Processes": Processes,
    "Dask": dask,
    "Ray": Ray,
}


def instant(x: torch.Tensor) -> torch.Tensor:
    """A box that takes no time."""
    return x


class Sleeping:
    """A box that takes a given time for each row, and for each call.

    Args:
        row: Seconds.
        call: Seconds.
    """

    def __init__(self, row: float = 0.0, call: float = 0.0) -> None:
        self.row, self.call = row, call

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Wait, and answer."""
        time.sleep(self.call + self.row * len(x))
        return torch.sin(x)
