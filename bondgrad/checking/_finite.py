"""Gradients that are not finite, at more rows than there are slopes measured at."""

import torch
from torch import Tensor

from bondgrad.checking._slopes import Slopes

FEW = 4  # rows at which it is made sure that the box has answers nearby


def not_finite(slopes: Slopes, reserve: int, generator: torch.Generator) -> Tensor:
    """Which inputs, bool [d], have a gradient that is not finite, at any row, where the box is.

    The box has to be so on both sides of the row: where its domain ends, as that of a root, the slope may be infinite.

    Args:
        slopes: The loss at these rows.
        reserve: Evaluations that are to be left.
        generator: Of random numbers.
    """
    bad = slopes.gradients(1, generator)[0].isinf()  # [r, d]
    rows = bad.any(1).nonzero().squeeze(1)[:FEW]
    rows = rows[: max(0, slopes.asker.left - reserve) // (2 * bad.shape[1])]
    if len(rows) == 0:
        return torch.zeros_like(bad[0])
    there = slopes.at(rows)
    quotients = there.quotients(there.ladder()[..., -1:])[0].squeeze(2)  # [FEW, d]
    return (bad[rows] & torch.isfinite(quotients)).any(0)
