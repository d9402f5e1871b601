"""Means and their variances, quantiles, and degrees of freedom."""

import math

import torch
from torch import Tensor

FALSE_ALARM = 1e-3  # probability of any false alarm in a check, for normal noise
LOOKS = 10  # times at most that growing evidence is tested; the probability of a false alarm is divided among them


def mean(samples: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean of finite samples [copies, ...], its variance, and whether two samples or more are finite, [...] each."""
    finite = torch.isfinite(samples)
    samples, count = torch.where(finite, samples, math.nan), finite.sum(0)
    mean = samples.nanmean(0)
    variance = (samples - mean).square().nansum(0) / (count - 1).clamp(min=1) / count.clamp(min=1)
    return mean, variance, count >= 2


def normal_quantile(p: float) -> float:
    """The quantile of the standard normal distribution with probability p."""
    return float(torch.special.ndtri(torch.tensor(p, dtype=torch.float64, device="cpu")))


def student(z: float, freedom: Tensor) -> Tensor:
    """The quantile of Student's distribution that has the probability of z in the normal one (Cornish and Fisher)."""
    terms = (z, (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return sum((term / freedom**n for n, term in enumerate(terms)), torch.zeros_like(freedom))


def freedom(of_s: Tensor, copies_s: int, of_g: Tensor, copies_g: int) -> Tensor:
    """Degrees of freedom [d + 1] of sums over rows of variances [r, d] (Welch and Satterthwaite).

    The last entry, for the sum over all inputs, is the least of the others. Where all variances are zero, the result
    is the least number of copies, less one.
    """
    squares = of_s.square() / (copies_s - 1) + of_g.square() / (copies_g - 1)
    total = (of_s + of_g).sum(0).square() / squares.sum(0).clamp(min=torch.finfo(squares.dtype).tiny)
    total = total.clamp(min=min(copies_s, copies_g) - 1)
    return torch.cat((total, total.min().view(1)))
