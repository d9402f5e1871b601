"""A box at the rows of a batch, for those who want to find out about it."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

ROUNDING = 8  # units of rounding that an output may change by for no reason


class SearchBatch(NamedTuple):
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

    def ask(self, points: Tensor, rows: Tensor) -> Tensor:
        """The box at points [r, j, ends, d] near rows [r]: [r, j, ends, d_out], NaN where it gave nothing finite."""
        r, j, ends, _ = points.shape
        moves = max(1, self.most // (ends * (r if self.whole else 1)))  # of a row at a time
        at_once = r if self.whole else max(1, moves // j)
        parts = []
        for i in range(0, r, at_once):
            some = slice(i, i + at_once)
            # Copies, since the box may write into what it is given.
            answers = [self.evaluate(points[some, k : k + moves].clone(), rows[some]) for k in range(0, j, moves)]
            parts.append(torch.cat(answers, 1))
        y = torch.cat(parts)
        return torch.where(torch.isfinite(y), y, math.nan)

    def rounding_noise(self) -> Callable[[Tensor, Tensor], Tensor]:
        """A function of two answers [..., d_out] that says how much of their difference may come from rounding.

        It goes by their size, and by the usual size of that output: small ones may come of large terms that cancel.
        """
        usual = self.y.abs().nanmedian(0).values.nan_to_num(0, 0, 0)
        unit = ROUNDING * self.rounding

        def noise(y: Tensor, other: Tensor) -> Tensor:
            return torch.maximum(torch.maximum(y.abs(), other.abs()).nan_to_num(0, 0, 0), usual) * unit

        return noise

    def far(self, rows: Tensor) -> Tensor:
        """For each input of these rows, the farthest value that the batch has of it: [r, d].

        At least as far away as the policy itself might go, which is farther where the rows of a batch are alike.
        """
        x = self.x[rows]
        lowest, highest = self.x.aminmax(dim=0)
        target = torch.where(x - lowest > highest - x, lowest, highest)
        scale = self.x.square().mean(0).sqrt()
        step = torch.where(scale > 0, math.cbrt(3 * self.noise) * scale, math.sqrt(self.noise)).expand_as(x)
        near = x + step
        if self.low is not None and self.high is not None:
            up, down = self.high - x, x - self.low  # the side with more room
            near = torch.where(up >= down, torch.minimum(near, self.high), torch.maximum(x - step, self.low))
        return torch.where((target - x).abs() > step, target, near)


def between(x: Tensor, target: Tensor, fraction: Tensor) -> Tensor:
    """That fraction of the way from x to a target; never beyond either, whatever rounding does."""
    point = x + fraction * (target - x)
    return torch.minimum(torch.maximum(point, torch.minimum(x, target)), torch.maximum(x, target))


def deviation(differences: Tensor, dim: tuple[int, ...]) -> Tensor:
    """Standard deviation of outputs, from differences between two answers to the same question."""
    return differences.square().nanmean(dim).nan_to_num(0, 0, 0).div(2).sqrt()
