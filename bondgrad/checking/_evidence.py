"""The comparison of a gradient with measured slopes.

There are two tests of every input, at a level that is divided by their number and by that of looks at growing evidence
(Bonferroni). One is whether the factor between gradient and slope is one, by quantiles of Student's distribution (the
expansion of Cornish and Fisher) with degrees of freedom after Welch and Satterthwaite. The other is whether the sum of
squares that no factor explains is that of noise around an error that is tolerated (Birgé's bounds for noncentral
chi-squared variables).

References:
    B. L. Welch, "The generalization of 'Student's' problem", Biometrika, 1947.
    E. A. Cornish and R. A. Fisher, "Moments and cumulants in the specification of distributions", 1938.
    L. Birgé, "An alternative point of view on Lepski's method", 2001, Lemma 8.1.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from bondgrad.checking._slopes import SETTINGS, SlopeSamples
from bondgrad.measuring._statistics import FALSE_ALARM, LOOKS, freedom, mean, normal_quantile, student


class Entries(NamedTuple):
    """Slopes s and gradients g at r rows, as means over copies; zero where one of them is not known."""

    s: Tensor  # [r, d]
    g: Tensor  # [r, d]
    var_s: Tensor  # [r, d] variance of s
    var_g: Tensor  # [r, d] variance of g
    known: Tensor  # [r, d] bool: both s and g are known, and can be compared
    bend: Tensor  # [r, d] error of s that extrapolation leaves
    at_kink: Tensor  # [r, d] bool: the function has a kink


class Evidence(NamedTuple):
    """Results of the tests of every input. Of d + 1 entries, the last is for all inputs together."""

    entries: Entries
    factor: Tensor  # [d + 1] the gradient in units of the slope; NaN: the slope does not exceed the noise
    standard_error: Tensor  # [d + 1] standard error of the factor
    unexplained: Tensor  # [d] relative error that no factor explains
    error: Tensor  # [d] root mean square error over rows, in units of that of the slope
    visible: Tensor  # [d] the least relative error that would have been called wrong
    enough: Tensor  # [d] bool: an error of twice the tolerance would have been called wrong
    wrong: Tensor  # [d + 1] bool: the error is certainly larger than the tolerance
    uniform: Tensor  # [d + 1] bool: one factor explains most of the error
    missing: Tensor  # [d] bool: the gradient is not finite where the box is
    bending: Tensor  # [d] bool: uncertainty is mostly due to steps that are too long, not to noise


def compare(gradients: Tensor, samples: SlopeSamples, at_kink: Tensor, tolerance: float) -> Evidence:
    """Compare gradients [copies, r, d] with slopes, without entries known to be `at_kink`, bool [r, d]."""
    entries = _entries(gradients, samples, at_kink, tolerance)
    s, g, var_s, var_g, known, bend, _ = entries
    e, var, n = g - s, var_s + var_g, known.sum(0).clamp(min=1)
    # Corrected for the noise of s, which makes its squares too large, and its products with g - s too small.
    along, squares, noise_s = (_totals(t) for t in (e * s + var_s, s.square() - var_s, var_s))  # [d + 1]
    clear = squares > SETTINGS.clear * noise_s  # else factors are unknown
    factor = torch.where(clear, along / squares, 0)
    # Errors are relative to `norm`, which is large enough for its square not to underflow.
    own = (squares[:-1].clamp(min=0) / n).sqrt()  # [d] root mean square
    usual = n.sqrt() * torch.maximum(own, SETTINGS.weak * own.square().mean().sqrt()).clamp(min=1e-77)
    norm = torch.where(clear[:-1], n.sqrt() * own, usual)  # [d]
    # The term 2 / (copies_s - 1) is for the variance of var_s, an estimate that was subtracted.
    copies_s, copies_g = len(samples.slope), len(gradients)
    spread = _totals(s.square() * var + var_s * (var_s * (2 + 2 / (copies_s - 1)) + var_g)).sqrt()
    tests = (2 * len(n) + 1) * LOOKS
    z, x = normal_quantile(1 - FALSE_ALARM / (2 * tests)), math.log(tests / FALSE_ALARM)
    t = student(z, freedom(s.square() * var_s, copies_s, s.square() * var_g, copies_g))  # [d + 1]
    parts = t * spread, _totals(bend * s).abs(), along
    noise, bias, along = (part / _totals(norm.square()[None]) for part in parts)
    off = clear & (along.abs() > tolerance + noise + bias)  # [d + 1]

    rest, systematic = (e - factor[:-1] * s).square().sum(0), bend.norm(dim=0)
    allowed, wide = (norm * tolerance + systematic).square(), var * (t[:-1] / z).square()
    scatter = 2 * (x * (wide.square().sum(0) + 2 * wide.amax(0) * allowed)).sqrt() + 2 * x * wide.amax(0)
    visible = torch.maximum(tolerance + noise[:-1] + bias[:-1], (allowed + scatter).sqrt() / norm)
    visible = torch.where(known.any(0), visible, math.inf)
    missing = (mean(samples.slope)[2] & gradients.isinf().any(0)).any(0)  # in any copy
    noisy = torch.maximum(noise[:-1], scatter.sqrt() / norm).clamp(min=tolerance / 4)
    return Evidence(
        entries,
        factor=torch.where(clear, 1 + factor, math.nan),
        standard_error=torch.where(clear, spread / squares, math.inf),
        unexplained=(rest - wide.sum(0)).clamp(min=0).sqrt() / norm,
        error=(e.square() - var).sum(0).clamp(min=0).sqrt() / norm,
        visible=visible,
        enough=visible * norm / usual <= 2 * tolerance,
        wrong=torch.cat((off[:-1] | (rest > allowed + wide.sum(0) + scatter) | missing, off[-1:])),
        uniform=torch.cat(((e * s).sum(0).square() > e.square().sum(0) * s.square().sum(0) / 2, off[-1:])),
        missing=missing,
        bending=(systematic / norm > noisy) | ~known.any(0),
    )


def _entries(gradients: Tensor, samples: SlopeSamples, at_kink: Tensor, tolerance: float) -> Entries:
    """Means over copies, with zeros for entries where slope and gradient cannot be compared."""
    (s, var_s, known), (g, var_g, given) = mean(samples.slope), mean(gradients)
    kink, var_kink, _ = mean(samples.kink)
    rounding = (SETTINGS.noise_gain * samples.rounding / samples.step).square()  # [r, d] its part of var_s
    # Where the function has a kink, there is no slope to compare with.
    var_kink = torch.maximum(var_kink, var_kink.nanmean(0)) + SETTINGS.kink_gain * rounding
    least = torch.maximum(SETTINGS.kink_z**2 * var_kink, tolerance**2 * s.square().nanmean(0))
    at_kink = at_kink | (kink.square() > least)
    known = known & given & ~at_kink
    # A row with outputs larger by orders of magnitude than others has as much more rounding, which would hide them.
    squares = torch.where(known, s.square(), math.nan)
    total = squares.nansum(0)  # [d]
    total = torch.maximum(total, SETTINGS.weak**2 * total.mean())
    part = rounding / squares
    known &= (rounding <= tolerance**2 * total / SETTINGS.rounding_margin) | (part <= part.nanmedian(0).values)
    # Slopes of a wave much shorter than the steps are aliased: they scatter by far more than noise explains.
    noise = mean(samples.loss)[1] * (SETTINGS.noise_gain / samples.step).square() + rounding
    beyond = torch.where(known, len(samples.slope) * (var_s - SETTINGS.scatter * noise), 0).sum(0)
    known &= beyond <= SETTINGS.scatter_part**2 * torch.where(known, s.square(), 0).sum(0)
    # Where drawn steps differ by several levels of rounding, rounding is random, and already part of the scatter.
    levels = (s * samples.step).abs() * SETTINGS.jitter / 4 / (math.sqrt(12) * samples.rounding)
    var_s = var_s + torch.where(levels.nanmedian(0).values > SETTINGS.levels, 0, rounding)
    parts = s, g, var_s, var_g, mean(samples.change)[0] / SETTINGS.safety
    s, g, var_s, var_g, bend = (torch.where(known, part, 0) for part in parts)
    n = known.sum(0).clamp(min=1)
    # A variance of few copies may be far too small by chance.
    var_s, var_g = (torch.where(known, torch.maximum(v, v.sum(0) / n), 0) for v in (var_s, var_g))
    return Entries(s, g, var_s, var_g, known, bend, at_kink)


def _totals(t: Tensor) -> Tensor:
    """Sums over rows of t [r, d], and over everything: [d + 1]."""
    sums = t.sum(0)
    return torch.cat((sums, sums.sum(0, keepdim=True)))
