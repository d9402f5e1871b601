"""Jumps of a box, near which a gradient of a layer is not the slope at a point.

They are located by bisection, from the ladder of steps on that a check begins with, at those entries only at which the
gradient differs from the slope.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bondgrad.checking._slopes import LossSlopes
from bondgrad.measuring._jumps import JumpEvidence


@dataclass(frozen=True)
class JumpSettings:
    """The thresholds of what counts as a jump, found on benchmarks/foreign_boxes.py."""

    rounding_units: int = 64  # a loss has changed if it did by so many units of its rounding
    intervals: int = 2  # intervals of the ladder on either side that are bisected at every entry
    halvings: int = 12  # of an interval
    noise: float = 8.0  # a jump is larger than so many standard deviations of the loss
    explained: float = 0.8  # part of an error that jumps must explain
    long_steps: int = 3  # rungs of the ladder, from the longest on, with which the gradient of a layer is compared
    alike: float = 0.5  # cosine of the angle, over rows, from which on it is like the slopes over one of them


SETTINGS = JumpSettings()


class Ladder(NamedTuple):
    """The loss near r rows, with one of d inputs moved at a time."""

    base: Tensor  # [r, 1] the loss at the rows themselves
    moves: Tensor  # [r, d, rungs, 2] up and down, from the longest to the shortest, in units of the spread
    losses: Tensor  # [r, d, rungs, 2]; NaN: an output is not finite
    eps: float  # relative rounding of the outputs


def inputs_moved_far(gradient: Tensor, quotients: Tensor, noise: Tensor) -> Tensor:
    """The inputs [d] that a layer seems to move as far as they vary, since the box jumps along them.

    The box jumps, or is piecewise constant, on that scale, and the gradient varies from row to row as slopes over the
    longest steps do. Such a gradient is of use in training, but it is not the slope at a point.

    Args:
        gradient: [r, d] the gradient of the layer.
        quotients: [r, d, rungs] slopes over steps from the spread of the inputs on, each a quarter of the one before.
        noise: h² times the variance that noise brings to slopes over steps h.
    """
    slopes = quotients.permute(2, 0, 1).flip(0)  # [rungs, r, d] from the shortest steps on
    rungs, _, d = slopes.shape
    steps = 4.0 ** torch.arange(1 - rungs, 1, dtype=torch.float64, device=slopes.device)  # in units of the spread
    evidence = JumpEvidence.on_ladder(steps.new_ones(d), noise, steps[:, None].expand(-1, d), slopes)
    g, q = gradient.nan_to_num(0), slopes[-SETTINGS.long_steps :].nan_to_num(0)
    cosine_times_size = (g * q).sum(1)  # [long_steps, d]
    size = (g.square().sum(0) * q.square().sum(1)).sqrt()
    return evidence.jumps() & (cosine_times_size > SETTINGS.alike * size).any(0)


def explained_by_jumps(
    slopes: LossSlopes, ladder: Ladder, slope: Tensor, error: Tensor, suspect: Tensor, noise: Tensor
) -> Tensor:
    """Entries [r, d] at which jumps of the box explain why the gradient is not the slope at the row.

    A difference quotient over a step that crosses a jump J at a distance p is off by J / p at most. So an error is
    explained if the jumps that bisection finds have at least this sum.

    Args:
        slopes: Measures the loss near the rows.
        ladder: The loss on the ladder.
        slope: [r, d] the slope at each row.
        error: [r, d] gradient less slope.
        suspect: [r, d] bool: the entries in question.
        noise: [r, d] standard deviation of the loss.
    """
    explained = torch.zeros_like(suspect)
    rows, inputs = suspect.nonzero(as_tuple=True)  # [m] each
    intervals = _intervals(ladder, slope, error)  # [r, d, k, 2] ends, and [r, d, k, 2] losses there
    most = slopes.sampler.left // (SETTINGS.halvings * intervals.ends.shape[2])
    order = error[rows, inputs].abs().argsort(descending=True)[:most]
    rows, inputs = rows[order], inputs[order]
    if len(rows) == 0:
        return explained
    ends, losses = intervals.ends[rows, inputs], intervals.losses[rows, inputs]  # [m, k, 2]
    own, off = slope[rows, inputs][:, None], error[rows, inputs][:, None]  # [m, 1]
    deviation = noise[rows, inputs][:, None]
    for _ in range(SETTINGS.halvings):
        # Where even all of the change at the nearer end would not explain the error, there is no such jump.
        left = _effect(ends.abs().amin(2), losses, off, deviation, ladder.eps) >= SETTINGS.explained * off[:, 0].abs()
        rows, inputs, ends, losses, own, off, deviation = (
            t[left] for t in (rows, inputs, ends, losses, own, off, deviation)
        )
        if len(rows) == 0:
            return explained
        middle = ends.mean(2)  # [m, k]
        here = slopes.losses_at(rows, inputs, middle) - own * middle
        first = off.sign() * (2 * here - losses.sum(2)) >= 0  # into the half with the larger change
        ends = torch.where(first[..., None], _pairs(ends[..., 0], middle), _pairs(middle, ends[..., 1]))
        losses = torch.where(first[..., None], _pairs(losses[..., 0], here), _pairs(here, losses[..., 1]))
    effect = _effect(ends.abs().amax(2), losses, off, deviation, ladder.eps)
    explained[rows, inputs] = effect >= SETTINGS.explained * off[:, 0].abs()
    return explained


def _effect(distance: Tensor, losses: Tensor, off: Tensor, deviation: Tensor, eps: float) -> Tensor:
    """How far off [m] difference quotients may be by changes of the loss [m, k, 2] at a distance [m, k]."""
    jump = off.sign() * losses.diff(dim=2).squeeze(2)
    size = losses.abs().amax(2)
    clear = jump > torch.maximum(SETTINGS.rounding_units * eps * size, SETTINGS.noise * deviation)
    return torch.where(clear, jump / distance.clamp(min=torch.finfo(distance.dtype).tiny), 0).nan_to_num(0).sum(1)


class _Intervals(NamedTuple):
    ends: Tensor  # [r, d, k, 2] in units of the spread
    losses: Tensor  # [r, d, k, 2] at the ends, less the part in proportion to the move


def _intervals(ladder: Ladder, slope: Tensor, error: Tensor) -> _Intervals:
    """The k intervals between neighbouring steps of the ladder in which jumps explain an error best."""
    found = []
    for side in (0, 1):
        at, loss = ladder.moves[..., side], ladder.losses[..., side]  # [r, d, rungs] from far to near
        loss = loss - slope[..., None] * at
        ends = torch.stack((at[..., 1:], at[..., :-1]), 3)  # [r, d, rungs - 1, 2] near, far
        losses = torch.stack((loss[..., 1:], loss[..., :-1]), 3)
        if side == 1:
            ends, losses = ends.flip(3), losses.flip(3)  # in the direction of the input
        effect = error.sign()[..., None] * losses.diff(dim=3).squeeze(3) / at[..., :-1].abs()
        best = effect.nan_to_num(-math.inf).topk(min(SETTINGS.intervals, effect.shape[2]), 2).indices
        best = best[..., None].expand(*best.shape, 2)
        found.append((ends.gather(2, best), losses.gather(2, best)))
    return _Intervals(*(torch.cat(parts, 2) for parts in zip(*found, strict=True)))


def _pairs(one: Tensor, two: Tensor) -> Tensor:
    return torch.stack((one, two), -1)
