"""Evaluating a box without changing its state or the random numbers of the process."""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from bondgrad.calling._function import snapshot_owner
from bondgrad.calling._modules import entries


@contextlib.contextmanager
def no_trace(fn: object) -> Iterator[None]:
    """A context that restores global random states, the buffers of a module, and the internal state of a box.

    Running statistics of batch normalisation are buffers, and change with every call in training mode.
    """
    module = fn if isinstance(fn, nn.Module) else nn.Module()
    owner: Any = snapshot_owner(fn)
    with contextlib.ExitStack() as stack:
        stack.callback(RandomStates().restore)
        if owner is not None:
            stack.callback(owner.restore, owner.snapshot())
        for tensors, name in entries([m._buffers for m in module.modules()]):
            stack.callback(tensors.__setitem__, name, tensors[name])  # if the module replaces it
        for buffer in module.buffers():
            stack.callback(torch.no_grad()(buffer.copy_), buffer.detach().clone())
        yield


class RandomStates:
    """The states of the global random number generators of torch, numpy and Python."""

    def __init__(self) -> None:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        self._states: dict[str, list[tuple[Callable[[Any], None], Any]]] = {  # setter, and saved state
            "python": [(random.setstate, random.getstate())],
            "numpy": [(np.random.set_state, np.random.get_state())],
            "torch": [(torch.set_rng_state, torch.get_rng_state()), (torch.cuda.set_rng_state_all, cuda)],
        }

    def restore(self, *which: str) -> None:
        """Restore the generators named, out of "torch", "numpy" and "python"; all of them, if none is named."""
        for name in which or self._states:
            for set_state, state in self._states[name]:
                set_state(state)
