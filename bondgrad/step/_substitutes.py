"""Rows of a forward pass for which the box gave no usable output."""

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


def with_substitutes(progress: Progress, y: Tensor, finite: Tensor) -> Tensor:
    """The outputs y [B, d_out], with the mean of an output in place of those that are not finite [B, d_out]."""
    assert progress.output_mean is not None  # it was learnt from the same outputs
    return torch.where(finite, y, progress.output_mean)
