"""What it takes for two runs of the same settings to have the same numbers, to the last bit."""

import contextlib
from collections.abc import Iterator

import torch


def choose_vector_code() -> None:
    """Let oneMKL choose the code of its vectorised functions while one thread alone asks for it.

    It chooses in the first call in a process. If two threads make that call at the same time, one of them may run code
    of low accuracy for its part of the tensor, once (PyTorch's issue 188792, oneMKL 2024; benchmarks/first_calls.py
    counts how often). One element is never divided among threads.
    """
    torch.tanh(torch.zeros(1))


@contextlib.contextmanager
def deterministic_convolutions() -> Iterator[None]:
    """Convolutions that give the same numbers each time, so that a resumed run is the one that was interrupted."""
    cudnn = torch.backends.cudnn  # whose `flags` would change the precision of all else, too
    before = cudnn.deterministic, cudnn.benchmark
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before
