"""What the slopes of trials say about the errors of a slope: noise, bending, and growth common to all rows."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bondgrad.measuring._step_trial import WEIGHTS, Differences, StepTrial, noise_covariance

LENGTHS = (0.25, 0.5, 1.0)  # of D(h/2), D(h) and D(2h), relative to that of D(2h)
TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class ErrorSettings:
    """How errors of slopes are judged. The values were found on the boxes of `benchmarks/calibrated.py`."""

    largest: float = 1e15  # units; larger slopes, the squares of which might overflow, count as not known
    material: float = 1e-3  # part of squared slopes that is added to the difference of D(h) and D(2h) in roughness
    doubt: float = 2.0  # factor on the noise that is subtracted: that of rounding falls more slowly with h
    one_sided_noise: float = 4.0  # factor on the variance of a slope where one of the two ends failed
    saturation: int = 8  # power of the ratio of slopes by which bending is larger than it seems
    most_saturated: float = 1.5  # largest ratio of slopes for which that was seen
    certain: float = 2.0  # standard errors that are certain enough
    reached_end: float = 2.0  # factor on the usual shrinking from h/2 to h from which on outputs have reached their end
    passed: float = 2.0  # D(h/2) over D(h), in the mean over inputs alike, from which on h is too long


SETTINGS = ErrorSettings()


class TrialSums(NamedTuple):
    """Sums over the rows of trials, [d] each.

    Sums of slopes are weighted, so that rows with large slopes do not decide for all others: signs need a small error
    relative to the slope of each row. Where noise is larger than the slopes all rows have the same weight. The two that
    say how rough the box is are relative to moves of the outputs, so that rows which meet a jump count alike, whichever
    of the three steps is the first to reach it.
    """

    weight: Tensor  # of the rows with slopes at all three steps
    square: Tensor  # D(h)²
    cross: Tensor  # (D(2h) - D(h))·D(h)
    change: Tensor  # (D(2h) - D(h))²
    half_cross: Tensor  # (D(h/2) - D(h))·D(h)
    rough_half: Tensor  # (D(h/2) - D(h))², over the square of the row's largest move, and not weighted otherwise
    rough_twice: Tensor  # the same of D(2h)
    rough_random: Tensor  # the part of `rough_half` that the noise of repeated answers explains
    rows: Tensor  # the number of rows with slopes at all three steps
    sound: Tensor  # the number of rows at which no evaluation failed
    noise: Tensor  # the variance of D(h) at those rows

    @staticmethod
    def of(trial: StepTrial, unit: Tensor, step: Tensor) -> Tensor:
        """The sums of a trial over steps `step` [d], stacked: [9, d]. Its slopes are divided by the unit."""
        slopes = trial.slopes / unit
        known = (slopes.abs() < SETTINGS.largest).all(0)  # [r, d]
        slopes = torch.where(known, slopes, 0)
        half, one, two = slopes
        sound = known & trial.sound
        noise = torch.where(sound, trial._replace(slopes=slopes).noise(), 0)
        typical = ((noise.sum(0) / sound.sum(0)) * step.square()).nanmedian().nan_to_num(0) / step.square()  # [d]
        square = torch.where(known, slopes.square().mean(0), math.nan)  # [r, d]
        middle = square.nanmedian(0).values.nan_to_num(0)  # [d]
        least = (WEIGHTS.noise * typical + WEIGHTS.least * middle).clamp_min(TINY)
        weight = torch.where(known, least / (square + least), 0)
        change, half_change = two - one, half - one
        weighted = (one * one, change * one, change * change, half_change * one)
        move = (slopes * slopes.new_tensor(LENGTHS)[:, None, None]).square().amax(0) + least
        rough = (part.square() / move for part in (half_change, change, _by_noise(trial, unit)))
        trusted = torch.where(sound, weight, 0)  # noise counts likewise, since it may grow with the outputs
        noise = noise * trusted * (sound.sum(0) / trusted.sum(0).clamp_min(TINY))
        parts = (weight, *(weight * part for part in weighted), *(known * part for part in rough), known, sound, noise)
        return torch.stack([part.sum(0) for part in parts]).float()


COUNT = len(TrialSums._fields)


def _by_noise(trial: StepTrial, unit: Tensor) -> Tensor:
    """The standard deviation [r, d] that the noise of repeated answers brings to D(h/2) - D(h)."""
    covariance = noise_covariance(trial.differences)
    change = float(covariance[0, 0] - 2 * covariance[0, 1] + covariance[1, 1])  # in variances of D(h)
    return (change * trial.random).sqrt() / (trial.step * unit)


def _alike(values: Tensor, jumps: Tensor) -> Tensor:
    """For every input, the sum of values [..., d] over the inputs along which the box jumps, or does not, as there."""
    with_jumps, others = (torch.where(kind, values, 0).sum(-1, keepdim=True) for kind in (jumps, ~jumps))
    return torch.where(jumps, with_jumps, others)


class Growth(NamedTuple):
    """The growth with which (1 + growth)·D(h) fits slopes over another step, [d] each."""

    each: Tensor  # for each input; as far as noise hides it, that of the other inputs alike
    common: Tensor  # for all inputs alike
    error: Tensor  # standard error of `common` by noise

    @staticmethod
    def of(sums: TrialSums, noise: Tensor, differences: Differences, jumps: Tensor, k: int) -> "Growth":
        """The growth from D(h) to D(h/2), for k = 0, or to D(2h), for k = 2, with `noise` [d] the variance of D(h)."""
        cross, covariance = sums.half_cross if k == 0 else sums.cross, noise_covariance(differences)
        weight = sums.weight.clamp_min(TINY)
        hidden = SETTINGS.doubt * noise
        known = (sums.square / weight - noise).clamp_min(0) + hidden
        own = torch.where(known > 0, (cross / weight + noise * (1 - float(covariance[1, k]))) / known, 0)
        doubt = torch.where(known > 0, hidden / known, 0)  # with it `own` is that much too small
        parts = torch.stack((own, (known > 0).to(own) - doubt, doubt, torch.ones_like(own)))  # [4, d]
        total = _alike(parts, jumps)
        others = total - parts
        supposed, common = (_quotient(own, seen + doubt / n.clamp_min(1)) for own, seen, doubt, n in (others, total))
        deviation = math.sqrt(float(covariance[k, k])) / SETTINGS.doubt * doubt / sums.rows.clamp_min(1).sqrt()
        error = _quotient(_alike(deviation.square(), jumps).sqrt(), total[1] + total[2] / total[3])
        return Growth((own + doubt * supposed).clamp(-1, 3), common, error)


def _quotient(a: Tensor, b: Tensor) -> Tensor:
    """The quotient a / b, or zero where b is."""
    return torch.where(b > 0, a / b, 0)


class Fit(NamedTuple):
    """The slopes over twice the step, fitted by (1 + growth)·D(h), for each input, [d] each."""

    growth: Tensor
    left: Tensor  # mean square of what the fit leaves, noise included
    by_noise: Tensor  # the part of that which is noise

    @staticmethod
    def of(sums: TrialSums, noise: Tensor, differences: Differences, jumps: Tensor) -> "Fit":
        """The fit, with `noise` [d] the variance of D(h)."""
        growth, weight = Growth.of(sums, noise, differences, jumps, 2).each, sums.weight.clamp_min(TINY)
        left = (sums.change - 2 * growth * sums.cross + growth.square() * sums.square) / weight
        covariance = noise_covariance(differences)
        common, own, ratio = float(covariance[1, 2]), float(covariance[2, 2]), 1 + growth
        one_sided = SETTINGS.one_sided_noise - (SETTINGS.one_sided_noise - 1) * sums.sound / sums.rows.clamp_min(1)
        return Fit(growth, left, noise * one_sided * (own - 2 * ratio * common + ratio.square()))


class SlopeErrors(NamedTuple):
    """The errors of D(h) for each input, [d] each."""

    noise: Tensor  # variance
    bending: Tensor  # mean square of the error that differs from row to row without being noise
    stretch: Tensor  # relative growth of all slopes of an input
    square: Tensor  # mean square of the slopes, without noise
    saturates: Tensor  # whether all slopes of an input shrink as where outputs have reached their end
    roughness: Tensor  # square of D(h/2) - D(h) over that of D(2h) - D(h), in the sum over inputs alike
    rough: Tensor  # the same, or less where the rows of this input show that it is less there
    random: Tensor  # part of D(h/2) - D(h) that the noise of repeated answers explains, in the sum over inputs alike
    too_long: Tensor  # whether slopes over h/2 are much larger than those over h, at all inputs alike
    signal: Tensor  # how far slopes exceed the noise, in standard errors, in the sum over inputs alike

    @staticmethod
    def of(sums: TrialSums, noise: Tensor, differences: Differences, jumps: Tensor) -> "SlopeErrors":
        """The errors that follow from sums over trials, with `noise` [d] the variance of D(h).

        Inputs along which the box jumps, which `jumps` [d] tells, are judged apart from the others.

        What the fit of D(2h) leaves is noise of known variance, of which `doubt` times as much is subtracted, and
        bending. Where the error of a slope grows with a power of h, what is left is a known multiple of it; at the best
        step noise is `order` times the bending, and the divisor makes up there for what is subtracted too much. Where
        slopes shrink with h, errors grow more slowly than that power: D(2h) is as wrong as D(h), and their difference
        tells little of the error. In networks and pendulums it is larger by the eighth power of D(h) / D(2h).

        Over jumps at random places the mean of D(h/2)·D(h) is that of D(h)², or less with weights. Where it is much
        more, or less than zero, h is beyond the bend of a function that comes back, as periodic ones do.
        """
        order, weight = differences.order, sums.weight.clamp_min(TINY)
        twice, half = Fit.of(sums, noise, differences, jumps), Growth.of(sums, noise, differences, jumps, 0)
        square = (sums.square / weight - noise).clamp_min(0)
        covariance = noise_covariance(differences)
        at_best = order * float(covariance[2, 2] - 2 * covariance[1, 2] + 1)
        chance = (SETTINGS.certain * (2 / sums.rows.clamp_min(1)).sqrt()).clamp(max=SETTINGS.doubt - 1)
        bending = (twice.left - (1 + chance) * twice.by_noise).clamp_min(0)
        bending = bending / ((2.0**order - 1) ** 2 - chance * at_best)
        most = SETTINGS.most_saturated
        bending = bending * (1 / (1 + twice.growth).clamp(1 / most, 1)) ** SETTINGS.saturation
        # From h/2 to h slopes shrink by 1 / 2^order of what they shrink by from h to 2h, unless the end is reached.
        error = (float(covariance[0, 0]) * noise / (square + noise).clamp_min(TINY) / sums.rows.clamp_min(1)).sqrt()
        usual = -twice.growth.clamp(max=0) * 0.5**order
        saturates = half.each - SETTINGS.certain * error > SETTINGS.reached_end * usual
        margin, ratio = SETTINGS.certain * half.error, 1 + half.common
        too_long = (ratio - margin > SETTINGS.passed) | (ratio + margin < 0)
        excess = torch.stack((sums.square / weight / noise - 1, 1 / sums.rows.clamp_min(1)))
        excess, variance = _alike(excess, jumps)
        stretch, rough = twice.growth / (2**order - 1), _roughness(sums, jumps)
        return SlopeErrors(noise, bending, stretch, square, saturates, *rough, too_long, excess / variance.sqrt())


def _roughness(sums: TrialSums, jumps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`SlopeErrors.roughness`, `rough` and `random`; NaN where none of the inputs alike has a slope."""
    rows, flat = sums.rows.clamp_min(1), sums.square == 0
    shorter, longer = sums.rough_half / rows, sums.rough_twice / rows + SETTINGS.material
    total, others, random = _alike(torch.stack((shorter, longer, sums.rough_random / rows)), jumps)
    roughness = torch.where(_alike((~flat).float(), jumps) > 0, total / others, math.nan)
    # The logarithm of the ratio of two variances has a standard error of sqrt(4 / rows).
    most = shorter / longer * torch.exp(SETTINGS.certain * (4 / rows).sqrt())
    return roughness, torch.where(flat, roughness, torch.minimum(roughness, most)), random / total


def roughness_at_best(differences: Differences) -> float:
    """`SlopeErrors.roughness` at the step with the least error, where the noise is `order` times the bending."""
    covariance, order = noise_covariance(differences), differences.order
    shorter, longer = (float(covariance[k, k] - 2 * covariance[1, k] + covariance[1, 1]) for k in (0, 2))
    return (order * shorter + (1 - 0.5**order) ** 2) / (order * longer + (2.0**order - 1) ** 2)
