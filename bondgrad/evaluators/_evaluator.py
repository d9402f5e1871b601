"""What every evaluator answers: the box at these points."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Function = Callable[..., Tensor]  # (points [N, d], *rows [N, ...]) -> [N, d_out]
Answer = tuple[Tensor, Tensor | None]  # (y, ok); None: all rows were answered


class Evaluator(ABC):
    """Decides where and in which portions rows are evaluated."""

    version = 0  # to be raised when portions change

    @abstractmethod
    def portion(self, row_bytes: int, wanted: int, device: torch.device) -> int:
        """How many of the `wanted` points of one gradient may exist at a time, `row_bytes` each with their outputs."""

    @abstractmethod
    def evaluate(self, function: Function, points: Tensor, context: tuple[Tensor, ...]) -> Answer:
        """The box at points [N, d], in order: the outputs [N, d_out], and ok [N], False where none came for a row.

        Whether an output that came is of use, finite for a start, is not judged here.

        Consecutive rows 2k and 2k + 1 may be the two signs of one perturbation: they go to the same place, next to each
        other.
        """

    def answers(self, function: Function, points: Tensor, context: tuple[Tensor, ...]) -> Tensor:
        """As `evaluate`, with NaN where no answer came."""
        y, ok = self.evaluate(function, points, context)
        return y if ok is None else y.masked_fill(~ok[:, None], math.nan)

    @abstractmethod
    def run(self, work: Callable[[], T]) -> T:
        """Run `work`, which asks for `portion` and calls `evaluate`; again with less, if it was too much at once."""
