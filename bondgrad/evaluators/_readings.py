"""Readings: the same points evaluated several times, and the mean of the outputs."""

import torch
from torch import Tensor

SEED_STRIDE = 15_485_863  # between the seeds of readings; a prime, and another one than between those of requests


def reading_seed(seed: int | None, reading: int) -> int | None:
    """The seed of a reading of a request with that seed: another one for each, since equal noise does not average."""
    return None if seed is None else (seed + SEED_STRIDE * reading) % 2**31


def in_turns(t: Tensor, readings: int, pairs: bool) -> Tensor:
    """Rows [N, ...], each as often as there are readings: [N · readings, ...].

    The readings of a row follow one another. Those of the two ends of a pair take turns, + - + - and so on, so that a
    slow drift of the box is the same at both.
    """
    unit = 2 if pairs else 1
    paired = len(t) - len(t) % unit
    rows = t[:paired].reshape(paired // unit, unit, *t.shape[1:]).repeat_interleave(readings, 0).flatten(0, 1)
    return rows if paired == len(t) else torch.cat((rows, t[paired:].repeat_interleave(readings, 0)))


def mean_in_turns(y: Tensor, readings: int, pairs: bool, finite: bool) -> Tensor:
    """The means [N, d_out] of outputs y [N · readings, d_out] at rows in the order of `in_turns`.

    With `finite`, all outputs are known to be so: see `mean_of_readings`.
    """
    unit = 2 if pairs else 1
    rows = len(y) // readings
    paired = rows - rows % unit
    y = y.contiguous()
    units = y[: paired * readings].view(-1, readings, unit, y.shape[1])
    mean = mean_of_readings(units, finite).flatten(0, 1)
    if paired == rows:
        return mean
    return torch.cat((mean, mean_of_readings(y[paired * readings :].view(-1, readings, 1, y.shape[1]), finite)[:, 0]))


def mean_of_readings(y: Tensor, finite: bool = False) -> Tensor:
    """The means [n, ends, d_out] of outputs y [n, readings, ends, d_out], without the readings that failed.

    Where one end of a pair failed, the reading is left out at the other as well, since what both had in common, such as
    the offset of a device or a seed, would not cancel. If every reading failed at one end or the other, each end has
    the mean of what it has. Without any reading the mean is NaN.

    Args:
        y: The outputs; not finite where there are none.
        finite: Whether all are known to be finite.
    """
    if finite:
        return y.mean(1)
    answered = torch.isfinite(y)
    together = answered.all(2, keepdim=True)  # [n, readings, 1, d_out]
    used = torch.where(together.any(1, keepdim=True), together, answered)
    return torch.where(used, y, 0).sum(1) / used.sum(1)
