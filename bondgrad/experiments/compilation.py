"""Networks compiled by torch.compile, once for all commands."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

CACHE = "TORCHINDUCTOR_CACHE_DIR"  # the variable by which torch is told where compiled code is kept


def compiled(network: nn.Module) -> Callable[[Tensor], Tensor]:
    """The network's forward pass, compiled when it is first called; parameters and buffers stay the network's own.

    Compiled code is kept in the user's cache folder rather than in a temporary one, so that the next command finds it.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    os.environ.setdefault(CACHE, str(Path(home) / "bondgrad" / "compiled"))
    fast: Callable[[Tensor], Tensor] = torch.compile(network, dynamic=False, fullgraph=True)
    return fast
