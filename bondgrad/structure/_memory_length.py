"""How long a box of sequences remembers an input."""

import torch
from torch import Tensor

from bondgrad.structure._scene import Scene

STARTS = 4  # time steps at which an input is moved
SEQUENCES = 2
STEP = 0.05  # of the root mean square of an input: well above the noise, one hopes
TAIL = 0.003  # of the response (its root mean square) that may come after the horizon


def memory_length(scene: Scene, generator: torch.Generator) -> int:
    """Time steps after which next to nothing is left of the change that one input made; 0: nothing was seen of it.

    Each input is moved at a few time steps, one at a time and to both sides, and the outputs from there on are watched.
    What comes before shows the noise, since nothing can change there.
    """
    rows = scene.choose(SEQUENCES, generator)
    x = scene.x[rows]  # [r, T·d]
    (r, width), d = x.shape, scene.features
    time = width // d
    starts = sorted({time * i // STARTS for i in range(STARTS)})
    scale = scene.x.view(-1, d).square().mean(0).sqrt()  # [d]
    step = STEP * torch.where(scale > 0, scale, 1)
    power = x.new_zeros(time)  # of the response, by lag
    seen = x.new_zeros(time)
    silence: list[Tensor] = []
    for start in starts:
        points = x[:, None, None].expand(r, d, 2, width).clone(memory_format=torch.contiguous_format)
        at = slice(start * d, start * d + d)
        points[:, :, 0, at].diagonal(0, 1, 2).add_(step)
        points[:, :, 1, at].diagonal(0, 1, 2).sub_(step)
        if scene.low is not None:
            points = points.clamp(scene.low, scene.high)
        y = scene.ask(points, rows)  # [r, d, 2, T·d_out]
        change = (y[:, :, 0] - y[:, :, 1]).view(r, d, time, -1).square().mean(3) / step[:, None].square()  # [r, d, T]
        change = change[torch.isfinite(change).all(2)]  # [some of r·d, T]
        power[: time - start] += change[:, start:].sum(0)
        seen[: time - start] += len(change)
        silence.append(change[:, :start].flatten())
    if seen[0] < r * d * len(starts) / 2 or bool((seen == 0).any()):  # too many evaluations failed
        return 0
    power /= seen
    quiet = torch.cat(silence)
    noise = quiet.mean() if len(quiet) else power.new_zeros(())
    power = torch.where(power > 2 * noise, power - noise, 0)
    left = power.flip(0).cumsum(0).flip(0)  # from each lag on
    return int((left > TAIL**2 * left[0]).sum())
