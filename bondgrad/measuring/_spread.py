"""How far the inputs of a box vary: the scale on which they may be moved."""

from typing import NamedTuple

import torch
from torch import Tensor

NEGLIGIBLE = 1e-14  # a variance below this part of the mean square is what rounding leaves of equal numbers


class Spread(NamedTuple):
    """How far each input varies over the rows of a batch."""

    deviation: Tensor  # [d] standard deviation; exactly zero where all rows are equal
    size: Tensor  # [d] root mean square

    @staticmethod
    def of(x: Tensor, sums: Tensor | None = None, rows: int = 0) -> "Spread":
        """The spread of the rows x [B, d], or of a joint batch of `rows` rows in several processes.

        Args:
            x: [B, d]. Entries that are not finite make their input count as zero.
            sums: [2·d] `input_sums` of the joint batch; None: x is the whole batch.
            rows: How many rows there are in the joint batch.
        """
        if sums is None:
            sums, rows = input_sums(x), x.shape[0]
        mean, square = (sums / rows).nan_to_num(0, 0, 0).view(2, -1)
        variance = (square - mean.square()).clamp_min(0) * (rows / max(rows - 1, 1))
        deviation = torch.where(variance > NEGLIGIBLE * square, variance, 0).sqrt()
        return Spread(deviation.to(x.dtype), square.sqrt().to(x.dtype))

    @property
    def reach(self) -> Tensor:
        """[d] the longest sensible move: the deviation, or half the size if that is more; one where all is zero."""
        reach = torch.maximum(self.deviation, self.size / 2)
        return torch.where(reach > 0, reach, 1)

    @property
    def typical(self) -> Tensor:
        """[d] a typical move: the deviation; half the size where rows are equal; one where all is zero."""
        return torch.where(self.deviation > 0, self.deviation, self.reach)


def input_sums(x: Tensor) -> Tensor:
    """Sums [2·d] over the rows of x [B, d] and of its squares; in double precision, since large numbers cancel."""
    wide = x if x.device.type == "mps" else x.double()
    return torch.cat((wide.sum(0), wide.square().sum(0)))
