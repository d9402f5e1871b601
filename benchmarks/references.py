"""The slopes that gradients through foreign boxes are compared with; foreign_boxes.py says which is for which box."""

import math

import numpy as np
import torch
from foreign_boxes import ForeignBox
from torch import Tensor

CENTRES = 32  # of smoothed slopes
CERTAIN = 2.0  # standard errors of a smoothed slope, below which its sign is not known and it counts as zero


def difference(box: ForeignBox, x: Tensor, gy: Tensor) -> Tensor:
    """Slopes [B, d] of gy·y: central differences over a short step, or over one deviation for boxes with jumps."""
    wide, h = x.double().numpy(), (1.0 if box.jumps else box.reference_step) * box.deviation
    moves = h * np.eye(box.d)[:, None]  # [d, 1, d]
    points = np.concatenate((wide + moves, wide - moves)).reshape(-1, box.d)
    y = np.asarray((box.smooth or box.answers)(points)).reshape(2, box.d, len(x), box.d_out)
    return torch.from_numpy(np.einsum("dbo,bo->bd", (y[0] - y[1]) / (2 * h), gy.double().numpy()))


def smoothed(box: ForeignBox, x: Tensor, gy: Tensor, seed: int = 0, centres: int = CENTRES) -> Tensor:
    """Slopes [B, d] of gy·y for the box smoothed by a Gaussian of the deviation s of its inputs.

    In one dimension, with z normal, the slope of E y(x + s z) is E y(x + s z) z / s (Stein), which is the mean of
    (y(x + s r) - y(x - s r)) / (s sqrt(2 pi)) over r with the density r exp(-r²/2). The other inputs are moved by
    s times normal numbers, and r is drawn from equal parts of its distribution in turn. A slope whose sign is not
    certain is 0.
    """
    random = np.random.default_rng(seed)
    wide, s, (b, d) = x.double().numpy(), box.deviation, x.shape
    z = random.normal(size=(centres, d, b, d))
    parts = (random.permuted(np.tile(np.arange(centres), (d, b, 1)), axis=2) + random.random((d, b, centres))) / centres
    r = np.sqrt(-2 * np.log1p(-parts)).transpose(2, 0, 1)  # [centres, d, B]
    own = np.eye(d, dtype=bool)[None, :, None].repeat(centres, 0).repeat(b, 2)  # [centres, d, B, d]
    up, down = (wide + s * np.where(own, sign * r[..., None], z) for sign in (1, -1))
    change = sum(
        sign * np.asarray((box.smooth or box.answers)(points.reshape(-1, d))).reshape(centres, d, b, box.d_out)
        for sign, points in ((1, up), (-1, down))
    )
    slopes = np.einsum("cdbo,bo->cbd", change, gy.double().numpy()) / (s * math.sqrt(2 * math.pi))
    mean, error = slopes.mean(0), slopes.std(0, ddof=1) / math.sqrt(centres)
    return torch.from_numpy(np.where(np.abs(mean) > CERTAIN * error, mean, 0.0))
