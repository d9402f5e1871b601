"""What all reservoirs have in common."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from bondgrad._arguments import checked_seed
from bondgrad.structure import Structure


class Reservoir(nn.Module):
    """A frozen module of rows, [N, in_features] -> [N, out_features]."""

    structure: "Structure | str" = "dense"

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features

    def extra_repr(self) -> str:
        """See `nn.Module`."""
        return f"{self.in_features}, {self.out_features}"


@contextlib.contextmanager
def random_numbers(seed: int | None) -> Iterator[None]:
    """Weights made in here come from this seed, and leave torch's random numbers as they were.

    None: they come from torch's own, as those of any layer do.
    """
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(checked_seed(seed))  # on the CPU only, where weights are made
        yield
