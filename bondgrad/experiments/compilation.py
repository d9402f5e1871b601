"""Networks compiled by torch.compile, once for all runs and all commands."""

import functools
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

MOST_VARIANTS = 64  # of compiled networks in one process, beyond which torch.compile gives up
CACHE = "TORCHINDUCTOR_CACHE_DIR"  # the variable by which torch is told where compiled code is kept


def compiled(network: nn.Module) -> Callable[[Tensor], Tensor]:
    """The network's forward pass, compiled when it is first called; parameters and buffers stay the network's own.

    Networks of the same architecture share their code. It is kept in the user's cache folder rather than in a temporary
    one, so that the next command finds it.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    os.environ.setdefault(CACHE, str(Path(home) / "bondgrad" / "compiled"))
    return functools.partial(_compiled_forward(), network)


@functools.cache
def _compiled_forward() -> Callable[[nn.Module, Tensor], Tensor]:
    # One for each architecture, precision and batch size, and for SPSA two: more than the usual eight.
    torch._dynamo.config.recompile_limit = max(MOST_VARIANTS, torch._dynamo.config.recompile_limit)
    return torch.compile(_forward, dynamic=False, fullgraph=True)


def _forward(network: nn.Module, x: Tensor) -> Tensor:
    """A function of the network, whose parameters torch.compile then takes for inputs, not for constants."""
    y: Tensor = network(x)
    return y
