"""Asking a box without leaving a trace in it, or in the random numbers of the process."""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from bondgrad.calling._function import snapshot_owner
from bondgrad.calling._modules import entries


@contextlib.contextmanager
def no_trace(fn: object) -> Iterator[None]:
    """Afterwards all is as it was: global random states, buffers of a module, what a box keeps for itself.

    Running statistics of batch normalisation are buffers, and move with every call in training mode.
    """
    randomness, module = RandomStates(), fn if isinstance(fn, nn.Module) else nn.Module()
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    places = [(tensors, name, tensors[name]) for tensors, name in entries([m._buffers for m in module.modules()])]
    owner: Any = snapshot_owner(fn)
    kept = None if owner is None else owner.snapshot()
    try:
        yield
    finally:
        for buffer, before in buffers:
            with torch.no_grad():
                buffer.copy_(before)
        for tensors, name, buffer in places:  # where a module has put another
            tensors[name] = buffer
        if owner is not None:
            owner.restore(kept)
        randomness.restore()


class RandomStates:
    """The states of the random numbers that a whole process shares: torch's, numpy's and Python's."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]

    def restore(self, *which: str) -> None:
        """Bring them back: those named, of "torch", "numpy" and "python"; all, if none is."""
        which = which or ("torch", "numpy", "python")
        if "python" in which:
            random.setstate(self._python)
        if "numpy" in which:
            np.random.set_state(self._numpy)
        if "torch" in which:
            torch.set_rng_state(self._torch)
            if self._cuda:
                torch.cuda.set_rng_state_all(self._cuda)
