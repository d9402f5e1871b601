"""Looking now and then whether a pattern that was found still holds."""

import math

import torch
from torch import Tensor

from bondgrad.structure._detect import AGAIN, CERTAIN, FRACTIONS, SCREEN, SQRT2, responses, rounding_noise
from bondgrad.structure._scene import Scene

CHECKS = 16  # at a time


def missed(depends: Tensor, noise: Tensor, scene: Scene, generator: torch.Generator) -> Tensor | None:
    """Dependencies [d_out, d] that a pattern does not have, if a quick look finds any.

    Half of the inputs are moved at once. By the pattern some outputs depend on none of them; those must stay as they
    are. So one pair of evaluations looks at a good part of the pattern, and not at one input. When an output does
    change, the inputs that were moved are tried one by one.

    Args:
        depends: [d_out, d] the pattern.
        noise: [d_out] standard deviation of the outputs.
        scene: The box.
        generator: For the choice of rows and inputs.
    """
    device, d_out = scene.x.device, depends.shape[0]
    rows = scene.choose(CHECKS, generator)
    k = len(rows)
    moving = torch.stack([_half(depends, torch.randperm(d_out, generator=generator).to(device)) for _ in range(k)])
    quiet = (depends.float() @ moving.float().T).T == 0  # [k, d_out]
    fraction = scene.x.new_tensor(FRACTIONS)[torch.randint(len(FRACTIONS), (k,), generator=generator).to(device)]
    way = scene.far(rows) * fraction[:, None]  # [k, d]
    noise = torch.maximum(noise, rounding_noise(scene))
    points = torch.stack((scene.x[rows] + way * moving, scene.x[rows]), 1)  # [k, 2, d]

    y = scene.evaluate(points.unsqueeze(1), rows).squeeze(1)  # [k, 2, d_out]
    suspected = ((y[:, 0] - y[:, 1]).abs() > SCREEN * SQRT2 * noise) & quiet
    if not bool(suspected.any()):
        return None
    again = slice(None) if scene.whole else suspected.any(1)
    rows, points, moving, way, suspected = rows[again], points[again], moving[again], way[again], suspected[again]
    y = scene.evaluate(points.unsqueeze(1).expand(-1, AGAIN, -1, -1).contiguous(), rows)  # [k, AGAIN, 2, d_out]
    # The noise may have grown since it was measured.
    noise = torch.maximum(noise, y.diff(dim=1).square().nan_to_num(0, 0, 0).mean((0, 1, 2)).div(2).sqrt())
    seen = (y[:, :, 0] - y[:, :, 1]).nanmean(1).abs() * math.sqrt(AGAIN) > CERTAIN * SQRT2 * noise
    reacting = suspected & seen  # [k, d_out]
    if not bool(reacting.any()):
        return None
    found = torch.zeros_like(depends)
    for j in reacting.any(1).nonzero().squeeze(1).tolist():
        if bool(((found & moving[j]).any(1) | ~reacting[j]).all()):
            continue  # by what is known already
        which = slice(None) if scene.whole else slice(j, j + 1)
        single = responses(scene, rows[which], way[which] * moving[which], noise, paired=True).largest > CERTAIN
        unexplained = reacting[j] & ~(single & moving[j]).any(1)  # only several inputs together move it
        found |= single | (unexplained[:, None] & moving[j])
    return found & ~depends


def _half(depends: Tensor, order: Tensor) -> Tensor:
    """About half of the inputs [d] bool, such that the first outputs in `order` [d_out] depend on none of them."""
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    first = torch.where(depends, rank[:, None], len(order)).amin(0)  # [d] the first output that needs each input
    return first >= first.sort().values[len(first) // 2]
