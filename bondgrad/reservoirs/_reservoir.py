"""What all reservoirs have in common."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bondgrad.errors import checked_seed, positive_int
from bondgrad.structure import Structure


class Reservoir(nn.Module, ABC):
    """A frozen module of rows, [N, in_features] -> [N, out_features]."""

    structure: "Structure | str" = "dense"

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features = positive_int("the number of inputs", in_features)
        self.out_features = positive_int("the number of outputs", out_features)

    def forward(self, x: Tensor, *state: Tensor) -> Any:  # noqa: ANN401
        """See `answer`."""
        if x.shape[-1] != self.in_features:
            raise ValueError(f"{type(self).__name__} has {self.in_features} inputs, got rows of {x.shape[-1]}")
        return self.answer(x, *state)

    @abstractmethod
    def answer(self, x: Tensor) -> Any:  # noqa: ANN401
        """Rows [N, in_features] -> [N, out_features]."""

    def extra_repr(self) -> str:
        """See `nn.Module`."""
        return f"{self.in_features}, {self.out_features}"


def part(box: nn.Module, in_time: bool = False) -> "Structure | str":
    """Take a module to build on: freeze it, and return its structure.

    Args:
        box: With `in_features` and `out_features`.
        in_time: Whether it may be one of sequences.
    """
    if not all(isinstance(getattr(box, name, None), int) for name in ("in_features", "out_features")):
        raise TypeError(f"box must be a module with in_features and out_features, got {type(box).__name__}")
    structure = getattr(box, "structure", "dense")
    if not in_time and isinstance(structure, Structure) and structure.in_time:
        raise ValueError(f"box must take rows, and {type(box).__name__} takes sequences: put the wrapper inside of it")
    box.requires_grad_(False)
    result: Structure | str = structure
    return result


@contextlib.contextmanager
def random_numbers(seed: int | None) -> Iterator[None]:
    """Weights made in here come from this seed, on the CPU, and leave torch's random numbers as they were.

    None: they come from torch's own, as those of any layer do.
    """
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(checked_seed(seed))
        yield
