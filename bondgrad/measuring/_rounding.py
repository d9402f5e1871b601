"""What rounding does to the outputs of a box."""

from typing import NamedTuple

import torch
from torch import Tensor

ROUNDING_UNITS = 8  # of its relative rounding that an output may change by, when nothing changes but the order of sums


class RoundingNoise(NamedTuple):
    """How much of the difference of two answers may come from rounding.

    It is relative to the larger of the two answers, and at least to the usual size of that output, since a small answer
    may be the difference of large terms.
    """

    usual: Tensor  # [d_out] the median size of each output
    relative: float  # the part of an output that rounding may change

    @staticmethod
    def of(y: Tensor, rounding: float) -> "RoundingNoise":
        """The rounding of a box with outputs like y [N, d_out], each with the relative rounding given."""
        return RoundingNoise(y.abs().nanmedian(0).values.nan_to_num(0, 0, 0), ROUNDING_UNITS * rounding)

    def between(self, y: Tensor, other: Tensor) -> Tensor:
        """The largest difference between two answers [..., d_out] that may come from rounding, [..., d_out]."""
        size = torch.maximum(y.abs(), other.abs()).nan_to_num(0, 0, 0)
        return torch.maximum(size, self.usual) * self.relative
