"""Rows of a forward pass for which the box gave no usable output."""

import math

import torch
from torch import Tensor

from bondgrad.evaluators import Progress

MEAN_STEPS = 8  # training steps from one batch that counts for the mean of the outputs to the next
MEAN_BATCHES = 16  # over about so many of them the mean goes


def learn_mean(progress: Progress, y: Tensor, finite: Tensor | None) -> None:
    """Take the outputs y [B, d_out] of a training step into their mean; finite [B, d_out]: which are; None: all."""
    now = y.mean(0) if finite is None else torch.where(finite, y, 0).sum(0) / finite.sum(0)
    before = progress.output_mean
    if before is None or (before.shape, before.dtype, before.device) != (now.shape, now.dtype, now.device):
        progress.output_mean, progress.batches = now.nan_to_num(0, 0, 0), 1
        return
    progress.batches = min(progress.batches + 1, MEAN_BATCHES)
    now = torch.where(torch.isfinite(now), now, before)  # an output that no row has, or a sum too large, says nothing
    progress.output_mean = torch.lerp(before, now, 1 / progress.batches)


def with_substitutes(progress: Progress, y: Tensor, finite: Tensor | None, training: bool) -> Tensor:
    """The outputs y [B, d_out] of a forward pass, with the mean of an output where it is not finite; in evaluation NaN.

    finite [B, d_out] tells where outputs are; None: everywhere.
    """
    finite = None if finite is None else finite.to(y.device)
    if training and (finite is not None or progress.steps % MEAN_STEPS == 0):
        learn_mean(progress, y, finite)
    if finite is None:
        return y
    return torch.where(finite, y, progress.output_mean if training else math.nan)  # type: ignore[arg-type]
