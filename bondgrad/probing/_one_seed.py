"""Outputs at both ends of moves, which a box that takes a seed evaluates under the same one."""

import torch
from torch import Tensor

from bondgrad.measuring._sampler import Sampler


def ask_ends(sampler: Sampler, rows: Tensor, inputs: Tensor, ends: Tensor, seed: int = 0) -> Tensor:
    """Outputs [m, ..., 2, d_out] at rows [m] of x, in each of which one of inputs [m] has values `ends` [m, ..., 2].

    As in a layer, a box that takes a seed gets the same one at both ends, in a call for each, in which every row has
    the same place. What the box draws then cancels in the difference.
    """
    if sampler.function.seed_position is None:
        return sampler.ask_moved(rows, inputs, ends)
    try:
        sampler.seed = seed
        return torch.cat([sampler.ask_moved(rows, inputs, end) for end in torch.split(ends, 1, -1)], -2)
    finally:
        sampler.seed = None
