"""Outputs that are to be compared, which a box that takes a seed evaluates under the same one."""

from collections.abc import Callable

import torch
from torch import Tensor

from bondgrad.measuring._sampler import Sampler


def ask_ends(sampler: Sampler, rows: Tensor, inputs: Tensor, ends: Tensor, seed: int = 0) -> Tensor:
    """Outputs [m, ..., n, d_out] at rows [m] of x, in each of which one of inputs [m] has values `ends` [m, ..., n].

    They are compared along n, the two ends of a move, or more. As in a layer, a box that takes a seed gets the same one
    for all, in a call for each, in which every row has the same place. What the box draws then cancels in differences.
    """
    return _under_one_seed(sampler, lambda some: sampler.ask_moved(rows, inputs, some), ends, -1, seed)


def ask_points(sampler: Sampler, rows: Tensor, points: Tensor) -> Tensor:
    """Outputs [m, ..., n, d_out] at points [m, ..., n, d] near rows [m], which are compared along n: see `ask_ends`."""
    return _under_one_seed(sampler, lambda some: sampler.ask(some, rows), points, -2)


def _under_one_seed(
    sampler: Sampler, ask: Callable[[Tensor], Tensor], points: Tensor, dim: int, seed: int = 0
) -> Tensor:
    if sampler.function.seed_position is None:
        return ask(points)
    try:
        sampler.seed = seed
        return torch.cat([ask(some) for some in torch.split(points, 1, dim)], -2)
    finally:
        sampler.seed = None
