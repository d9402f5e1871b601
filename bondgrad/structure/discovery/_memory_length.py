"""Measuring for how many time steps an input affects the outputs of a box of sequences."""

import math

import torch
from torch import Tensor

from bondgrad.measuring._moves import one_input_moved
from bondgrad.measuring._spread import Spread
from bondgrad.structure.discovery._search_batch import SETTINGS, SearchBatch


def memory_length(power: Tensor, noise: Tensor, uncertainty: Tensor) -> int:
    """The number of time steps after which a change of one input has next to no effect; 0: no effect was seen.

    Where the response of the outputs disappears in the noise before it is small enough, it is extrapolated as an
    exponential decay, fitted to the logarithms of the visible part. If the response does not decay, or too few lags are
    visible, the memory is as long as the sequences.

    Args:
        power: [T] the mean square response by lag, as `response` returns it.
        noise: The part of it that is noise.
        uncertainty: [T] the amount by which noise may exceed that part by chance.
    """
    visible = power > noise + uncertainty
    lags, time = visible.nonzero().squeeze(1), len(power)
    if len(lags) == 0:
        return 0
    last = int(lags[-1])
    power = torch.where(visible, power - noise, 0)
    allowed = SETTINGS.tail**2 * float(power.sum())
    if float(uncertainty[last:].sum()) <= allowed:  # the invisible part is small enough
        left = power.flip(0).cumsum(0).flip(0)  # [T] from each lag on
        return int((left > allowed).sum())
    if len(lags) < SETTINGS.least_lags:
        return time
    x, y = lags.to(power.dtype), power[lags].log()
    x, y = x - x.mean(), y - y.mean()
    rate = float((x * y).sum() / x.square().sum())  # of the decay per time step, by least squares
    if not rate < 0:
        return time
    beyond = float(power[last]) * math.exp(rate) / -math.expm1(rate)  # the sum of a geometric series after `last`
    return min(time, last + 1 + max(0, math.ceil(math.log(allowed / beyond) / rate)))


def response(batch: SearchBatch, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """The response of the outputs to a change of an input, by the lag between them.

    Each input is moved at a few time steps, one at a time and to both sides, and the changes of the outputs from there
    on are measured. Changes of outputs before that time step are noise.

    Returns:
        Its mean square [T], relative to the square of the step; the part of it that is noise; and the amount [T] by
        which noise may exceed that part by chance. If too many evaluations failed, the mean square is zero or NaN.
    """
    rows = batch.choose_rows(SETTINGS.sequences, generator)
    x = batch.x[rows]  # [r, T·d]
    (r, width), d = x.shape, batch.features
    time = width // d
    starts = sorted({time * i // SETTINGS.starts for i in range(SETTINGS.starts)})
    size = Spread.of(batch.x.view(-1, d)).size  # [d]
    step = max(SETTINGS.step, math.cbrt(3 * batch.noise)) * torch.where(size > 0, size, 1)
    step = step if batch.grid is None else batch.grid.moves(step)
    power, seen = x.new_zeros(time), x.new_zeros(time)
    before: list[Tensor] = []  # changes of outputs before the time step that was moved
    for start in starts:
        inputs = slice(start * d, start * d + d)
        ends = torch.stack((x[:, inputs] + step, x[:, inputs] - step), 1)  # [r, 2, d]
        ends = ends.clamp(batch.low[inputs], batch.high[inputs])
        y = batch.ask(one_input_moved(x, inputs, ends), rows)  # [r, d, 2, T·d_out]
        change = (y[:, :, 0] - y[:, :, 1]).view(r, d, time, -1).square() / step[:, None, None].square()
        change = change[torch.isfinite(change).all(3).all(2)]  # [some of r·d, T, d_out]
        power[: time - start] += change[:, start:].mean(2).sum(0)
        seen[: time - start] += len(change)
        before.append(change[:, :start].flatten())
    if seen[0] < r * d * len(starts) / 2 or bool((seen == 0).any()):
        power = torch.zeros_like(power)
    noise = torch.cat(before).mean().nan_to_num(0)
    samples = seen * (batch.y.shape[1] // time)
    return power / seen, noise, noise * (mean_square_quantile(samples, SETTINGS.suspicion) - 1)


def mean_square_quantile(samples: Tensor, deviations: float) -> Tensor:
    """The value that a mean of so many squares of standard normal numbers exceeds as rarely as one number exceeds this.

    References:
        E. Wilson and M. Hilferty, "The distribution of chi-square", Proceedings of the National Academy of Sciences,
        1931.
    """
    variance = 2 / (9 * samples)
    return (1 - variance + deviations * variance.sqrt()) ** 3
