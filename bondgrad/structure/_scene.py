"""A box at the rows of a batch, for those who want to find out about it."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Scene(NamedTuple):
    """Rows, and a way to ask the box about points near them."""

    x: Tensor  # [N, d] the rows, inside the limits
    y: Tensor  # [N, d_out] the box there
    evaluate: Callable[[Tensor, Tensor], Tensor]  # (points [r, j, ends, d], rows [r]) -> [r, j, ends, d_out]
    most: int  # points at a time
    noise: float  # half-width of the noise on the outputs, as far as known
    rounding: float  # of the outputs, relative
    low: Tensor | None = None  # [d] the points stay within these
    high: Tensor | None = None  # [d]
    features: int = 0  # of a time step, where rows are sequences
    whole: bool = False  # whether every request must be about all rows

    def choose(self, count: int, generator: torch.Generator) -> Tensor:
        """Some of the rows, [count]: different ones as far as there are; all of them, if need be."""
        n = self.x.shape[0]
        if self.whole:
            return torch.arange(n, device=self.x.device)
        order = torch.randperm(n, generator=generator, device="cpu").to(self.x.device)
        return order[torch.arange(count, device=self.x.device) % n]

    def far(self, rows: Tensor) -> Tensor:
        """How far, and to which side, each input of these rows [r] can go within what the batch has seen: [r, d].

        Inputs that are alike in all rows go a hundredth of their size, or of one.
        """
        x = self.x[rows]
        lowest, highest = self.x.aminmax(dim=0)
        way = torch.where(x - lowest > highest - x, lowest - x, highest - x)
        step = 0.01 * x.abs().clamp(min=1)
        if self.high is not None and self.low is not None:
            step = torch.where(x + step > self.high, -torch.minimum(step, x - self.low), step)
        return torch.where(highest > lowest, way, step)
