"""How long a box of sequences remembers an input."""

import math

import torch
from torch import Tensor

from bondgrad.structure.discovery._search_batch import SearchBatch

STARTS = 4  # time steps at which an input is moved
SEQUENCES = 2
STEP = 0.05  # of the root mean square of an input; more if the noise needs it
TAIL = 0.003  # of the response (its root mean square) that may come after the horizon
VISIBLE = 4.0  # standard deviations above the noise
FIT = 3  # lags that it takes to see how a response decays


def memory_length(batch: SearchBatch, generator: torch.Generator) -> int:
    """Time steps after which next to nothing is left of the change that one input made; 0: nothing was seen of it.

    Each input is moved at a few time steps, one at a time and to both sides, and the outputs from there on are watched.
    What comes before shows the noise, since nothing can change there. Where the response disappears in the noise before
    it is small enough, it is taken to decay on as it did. A box that does not forget, or about which that cannot be
    said, remembers as long as its sequences are.
    """
    power, noise, sure = response(batch, generator)
    time = len(power)
    if not bool((power > noise + sure).any()):
        return 0
    visible = power > noise + sure
    last = int(visible.nonzero().max())  # of the lags at which the response is seen
    power = torch.where(visible, power - noise, 0)
    total = float(power.sum())
    allowed = TAIL**2 * total
    if float(sure[last:].sum()) <= allowed or last == time - 1:  # what is not seen is small enough
        left = power.flip(0).cumsum(0).flip(0)  # from each lag on
        return int((left > allowed).sum())
    lags = visible.nonzero().squeeze(1)
    if len(lags) < FIT:
        return time
    x, y = lags.to(power.dtype), power[lags].log()
    x, y = x - x.mean(), y - y.mean()
    rate = float((x * y).sum() / x.square().sum())  # of the decay, per time step
    if not rate < 0:
        return time
    # The sum of a geometric series from some lag on.
    beyond = float(power[last]) * math.exp(rate) / -math.expm1(rate)
    return min(time, last + 1 + max(0, math.ceil(math.log(allowed / beyond) / rate)))


def response(batch: SearchBatch, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """The mean square of the response, by lag [T], that of the noise, and how much that may vary by chance [T]."""
    rows = batch.choose(SEQUENCES, generator)
    x = batch.x[rows]  # [r, T·d]
    (r, width), d = x.shape, batch.features
    time = width // d
    starts = sorted({time * i // STARTS for i in range(STARTS)})
    scale = batch.x.view(-1, d).square().mean(0).sqrt()  # [d]
    step = max(STEP, math.cbrt(3 * batch.noise)) * torch.where(scale > 0, scale, 1)
    power = x.new_zeros(time)
    seen = x.new_zeros(time)
    silence: list[Tensor] = []
    for start in starts:
        points = x[:, None, None].expand(r, d, 2, width).clone(memory_format=torch.contiguous_format)
        at = slice(start * d, start * d + d)
        points[:, :, 0, at].diagonal(0, 1, 2).add_(step)
        points[:, :, 1, at].diagonal(0, 1, 2).sub_(step)
        if batch.low is not None:
            points = points.clamp(batch.low, batch.high)
        y = batch.ask(points, rows)  # [r, d, 2, T·d_out]
        change = (y[:, :, 0] - y[:, :, 1]).view(r, d, time, -1).square() / step[:, None, None].square()
        change = change[torch.isfinite(change).all(3).all(2)]  # [some of r·d, T, d_out]
        power[: time - start] += change[:, start:].mean(2).sum(0)
        seen[: time - start] += len(change)
        silence.append(change[:, :start].flatten())
    if seen[0] < r * d * len(starts) / 2 or bool((seen == 0).any()):  # too many evaluations failed
        return torch.zeros_like(power), power.new_zeros(()), torch.zeros_like(power)
    quiet = torch.cat(silence)
    noise = quiet.mean() if len(quiet) else power.new_zeros(())
    samples = seen * (batch.y.shape[1] // time)
    return power / seen, noise, VISIBLE * noise * (2 / samples).sqrt()
