"""The levels of outputs that take few values: are they as far apart as those of rounded numbers?"""

import math

import torch
from torch import Tensor

KEPT = 2**18  # numbers of every output that are looked at
LARGEST = 50.0  # distances of up to so many times the least are looked at
OFF = 0.05  # by which such a distance may miss a whole number of the least one
SHARE = 0.9  # part of the distances that must be whole numbers


class Levels:
    """Collects outputs of a box."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._room = KEPT

    def observe(self, y: Tensor) -> None:
        """Take in outputs y [..., d_out]."""
        if self._room > 0:
            self._kept.append(y.detach().flatten(0, -2)[: self._room].clone())
            self._room -= len(self._kept[-1])

    def even(self, outputs: Tensor) -> bool:
        """Whether levels of some outputs, bool [d_out], are whole multiples of one distance apart, as if rounded.

        Those of a tree are not. Of two levels nothing is known.
        """
        y = torch.cat(self._kept)[:, outputs]  # [n, some of d_out]
        unit = 64 * torch.finfo(y.dtype).eps * y.double().abs().nan_to_num(0, 0, 0).amax(0)
        gaps = y.double().sort(0).values.diff(dim=0)  # [n - 1, d_out]
        gaps = torch.where(gaps > unit, gaps, math.inf)  # those of rounding are none
        ratio = gaps / gaps.amin(0)
        few = ratio <= LARGEST  # false for infinity, and for NaN
        whole = few & ((ratio - ratio.round()).abs() <= OFF)
        least = few.any(0).sum()  # the least distance of every output is once itself
        return int(few.sum() - least) > 0 and bool(whole.sum() - least >= SHARE * (few.sum() - least))
