"""How long a box of sequences remembers an input."""

import math

import torch
from torch import Tensor

from bondgrad.structure._scene import Scene

STARTS = 4  # time steps at which an input is moved, in the first half of the sequence
SEQUENCES = 2
TAIL = 0.003  # of the response (its root mean square) that may come after the horizon


def memory_length(scene: Scene, generator: torch.Generator) -> int:
    """Time steps after which next to nothing is left of the change that one input made.

    Each input is moved at a few time steps, one at a time and to both sides, and the outputs from there on are watched.
    What comes before shows the noise, since nothing can change there.
    """
    rows = scene.choose(SEQUENCES, generator)
    x = scene.x[rows]  # [r, T·d]
    (r, width), d = x.shape, scene.features
    time = width // d
    starts = sorted({time * i // (2 * STARTS) for i in range(STARTS)})
    scale = x.view(-1, d).square().mean(0).sqrt()  # [d]
    step = math.cbrt(3 * scene.noise) * torch.where(scale > 0, scale, 1)
    moved = [start * d + i for start in starts for i in range(d)]
    power = x.new_zeros(time)  # of the response, by lag
    seen = x.new_zeros(time)
    silence: list[Tensor] = []
    at_once = max(1, scene.most // (2 * r))
    for first in range(0, len(moved), at_once):
        part = moved[first : first + at_once]
        points = x[:, None, None].expand(r, len(part), 2, width).clone()
        for j, entry in enumerate(part):
            points[:, j, 0, entry] += step[entry % d]
            points[:, j, 1, entry] -= step[entry % d]
        if scene.low is not None:
            points = points.clamp(scene.low, scene.high)
        y = scene.evaluate(points, rows)  # [r, j, 2, T·d_out]
        change = (
            (y[:, :, 0] - y[:, :, 1]).view(r, len(part), time, -1).square().nan_to_num(0, 0, 0).mean((0, 3))
        )  # [j, T]
        for j, entry in enumerate(part):
            start = entry // d
            power[: time - start] += change[j, start:] / step[entry % d] ** 2
            seen[: time - start] += 1
            silence.append(change[j, :start] / step[entry % d] ** 2)
    power /= seen
    quiet = torch.cat(silence)
    noise = quiet.mean() if len(quiet) else power.new_zeros(())
    power = torch.where(power > 2 * noise, power - noise, 0)
    left = power.flip(0).cumsum(0).flip(0)  # from each lag on
    return max(1, int((left > TAIL**2 * left[0]).sum()))
