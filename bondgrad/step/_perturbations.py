"""The perturbations of a step: what the policy wants, as far as it can be told apart and set."""

import torch
from torch import Tensor

from bondgrad.calling._grid import Grid
from bondgrad.policies import Batch, State, Steps
from bondgrad.step._records import Parts


def draw(parts: Parts, state: State, batch: Batch, noise: float) -> tuple[Steps, Tensor]:
    """The steps of the policy, and the perturbations [n, B·T, d] by which rows are moved."""
    policy, grid = parts.policy, parts.grid
    steps = policy.steps(state, batch, parts.estimator.draws, noise)
    if grid is not None:
        steps = steps._replace(size=grid.moves(steps.size, policy.resolution_steps))
    return steps, perturbations(batch.x, steps.size, steps.sign, policy.least_ulps, grid)


def perturbations(x: Tensor, size: Tensor, sign: Tensor, ulps: float, grid: Grid | None = None) -> Tensor:
    """Steps [n, r, d] of the given size and sign [n, r, d], made longer by `ulps` rounding units of x [r, d].

    With a grid they are whole steps of it, and one at least.
    """
    size = torch.add(size, x.abs(), alpha=ulps * torch.finfo(x.dtype).eps)
    return torch.copysign(size if grid is None else grid.moves(size), sign)
