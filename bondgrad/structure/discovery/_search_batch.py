"""The box at the rows of a batch, for a search of its structure."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from bondgrad.measuring._spread import Spread


class SearchBatch(NamedTuple):
    """Rows of a batch, and a function that evaluates the box at points near them."""

    x: Tensor  # [N, d] the rows, inside the limits
    y: Tensor  # [N, d_out] the outputs of the box there
    evaluate: Callable[[Tensor, Tensor], Tensor]  # (points [r, j, ends, d], rows [r]) -> [r, j, ends, d_out]
    max_points: int  # how many points may exist at a time
    noise: float  # half-width of the noise on the outputs, as far as it is known
    rounding: float  # relative rounding of the outputs
    low: Tensor | None = None  # [d] no point may be below this; None: there are no limits
    high: Tensor | None = None  # [d] no point may be above this; None: there are no limits
    features: int = 0  # the number of inputs of a time step, where rows are sequences
    whole: bool = False  # whether every request must contain all rows, because the box has a memory

    def choose_rows(self, count: int, generator: torch.Generator) -> Tensor:
        """Numbers [count] of random rows, different ones as far as there are; of all rows, if `whole`."""
        n = self.x.shape[0]
        if self.whole:
            return torch.arange(n, device=self.x.device)
        order = torch.randperm(n, generator=generator, device="cpu").to(self.x.device)
        return order[torch.arange(count, device=self.x.device) % n]

    def ask(self, points: Tensor, rows: Tensor) -> Tensor:
        """The outputs [r, j, ends, d_out] at points [r, j, ends, d] near rows [r]; NaN where they are not finite."""
        r, j, ends, _ = points.shape
        moves = max(1, self.max_points // (ends * (r if self.whole else 1)))  # of a row in one request
        at_once = r if self.whole else max(1, moves // j)
        parts = []
        for i in range(0, r, at_once):
            some = slice(i, i + at_once)
            # Points are copied, since the box may write into what it is given.
            answers = [self.evaluate(points[some, k : k + moves].clone(), rows[some]) for k in range(0, j, moves)]
            parts.append(torch.cat(answers, 1))
        y = torch.cat(parts)
        return torch.where(torch.isfinite(y), y, math.nan)

    def farthest(self, rows: Tensor) -> Tensor:
        """For each input of these rows, the farthest value that it has in the batch: [r, d].

        An input that hardly varies goes farther: as far as the step (3 b)^(1/3) that minimises the error of a central
        difference for noise of half-width b, relative to the root mean square of the input.
        """
        x = self.x[rows]
        lowest, highest = self.x.aminmax(dim=0)
        target = torch.where(x - lowest > highest - x, lowest, highest)
        size = Spread.of(self.x).size  # [d]
        step = torch.where(size > 0, math.cbrt(3 * self.noise) * size, math.sqrt(self.noise)).expand_as(x)
        near = x + step
        if self.low is not None and self.high is not None:
            up, down = self.high - x, x - self.low  # the step goes to the side with more room
            near = torch.where(up >= down, torch.minimum(near, self.high), torch.maximum(x - step, self.low))
        return torch.where((target - x).abs() > step, target, near)


def between(x: Tensor, target: Tensor, fraction: Tensor) -> Tensor:
    """The point at a fraction of the way from x to a target, never beyond either, whatever rounding does."""
    point = x + fraction * (target - x)
    return torch.minimum(torch.maximum(point, torch.minimum(x, target)), torch.maximum(x, target))
