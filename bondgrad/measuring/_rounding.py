"""The effect of rounding on the outputs of a box, and on a loss of them."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

ROUNDING_UNITS = 8  # an output may change by so many units of its rounding when only the order of sums changes


class RoundingNoise(NamedTuple):
    """How much of the difference of two values of an output may come from rounding.

    It is relative to the larger of the two values, and at least to the usual size of that output, since a small value
    may be the difference of large terms.
    """

    usual: Tensor  # [d_out] the median size of each output
    relative: float  # the part of an output that rounding may change

    @staticmethod
    def of(y: Tensor, rounding: float) -> "RoundingNoise":
        """The rounding of a box with outputs like y [N, d_out], each with the relative rounding given."""
        return RoundingNoise(y.abs().nanmedian(0).values.nan_to_num(0, 0, 0), ROUNDING_UNITS * rounding)

    def between(self, y: Tensor, other: Tensor) -> Tensor:
        """The largest difference [..., d_out] between outputs y and other [..., d_out] that rounding may cause."""
        size = torch.maximum(y.abs(), other.abs()).nan_to_num(0, 0, 0)
        return torch.maximum(size, self.usual) * self.relative


class OutputRounding:
    """Learns from the outputs of a box what their rounding does to the loss gy · box(x).

    Outputs that all fit into a coarser floating-point type than their own were rounded to that. Outputs that always
    differ by at least some amount were rounded to multiples of it. Evaluating the same point again shows neither.

    Args:
        gy: [r, d_out] the weight of every output in the loss, in float64.
        d: How many inputs there are.
    """

    def __init__(self, gy: Tensor, d: int) -> None:
        self._gy = gy
        self._dtypes = [torch.bfloat16, torch.float16, torch.float32]  # types that hold all outputs so far exactly
        self._quantum = torch.full_like(gy[0], math.inf)  # [d_out] the least difference of two outputs
        self._size = torch.zeros_like(gy)  # [r, d_out] the largest output near each row
        self._moves = gy.new_zeros(len(gy), d, gy.shape[1], dtype=torch.bool)  # whether an input changes an output

    def observe(self, inputs: slice, y: Tensor) -> None:
        """Learn from the outputs y [r, k, n, 2, d_out] at both ends of n moves of each of k inputs."""
        self._dtypes = [t for t in self._dtypes if bool(((y.to(t).to(y) == y) | y.isnan()).all())]
        exact = y.double().flatten(1, 3)  # [r, k·n·2, d_out]
        gaps = exact.flatten(0, 1).sort(0).values.diff(dim=0)
        self._quantum = torch.minimum(self._quantum, torch.where(gaps > 0, gaps, math.inf).amin(0))
        self._size = torch.maximum(self._size, exact.abs().nan_to_num(0).amax(1))
        self._moves[:, inputs] |= (y[..., 0, :] != y[..., 1, :]).any(2)

    def of_outputs(self) -> Tensor:
        """Standard deviation [r, d_out] of the rounding of every output."""
        quantum = torch.where(torch.isfinite(self._quantum), self._quantum / math.sqrt(12), 0)
        eps = torch.finfo(self._dtypes[0] if self._dtypes else torch.float64).eps
        return torch.maximum(quantum, eps * self._size)

    def deviation(self, share: Tensor) -> Tensor:
        """Standard deviation [r, d, ...] of the rounding of the loss at the ends of moves.

        Outputs that an input changes count with all of their rounding. The others are equal at both ends of a move and
        cancel. Rounding can hide a slope of theirs only up to one rounding over the longest move, so they count in
        proportion to `share` [r, d, ...], the length of a move in units of the longest.
        """
        squares = (self._gy * self.of_outputs()).square()[:, None]  # [r, 1, d_out]
        moving = torch.where(self._moves, squares, 0).sum(2)  # [r, d]
        other = (squares.sum(2) - moving).clamp(min=0)
        moving, other = (part.view(*part.shape, *[1] * (share.ndim - 2)) for part in (moving, other))
        return (moving + other * share.square()).sqrt()
