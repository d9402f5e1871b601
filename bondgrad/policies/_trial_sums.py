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
        rough = (part.square() / move for part in (half_change, change))
        trusted = torch.where(sound, weight, 0)  # noise counts likewise, since it may grow with the outputs
        noise = noise * trusted * (sound.sum(0) / trusted.sum(0).clamp_min(TINY))
        parts = (weight, *(weight * part for part in weighted), *rough, known, sound, noise)
        return torch.stack([part.sum(0) for part in parts]).float()


COUNT = len(TrialSums._fields)


def growth_of(sums: TrialSums, noise: Tensor, differences: Differences, k: int) -> Tensor:
    """The growth [d] with which (1 + growth)·D(h) fits D(h/2), for k = 0, or D(2h), for k = 2.

    The variance of D(h) is `noise` [d].
    """
    cross, common = sums.half_cross if k == 0 else sums.cross, float(noise_covariance(differences)[1, k])
    weight = sums.weight.clamp_min(TINY)
    known = (sums.square / weight - noise).clamp_min(0) + SETTINGS.doubt * noise
    return torch.where(known > 0, (cross / weight + noise * (1 - common)) / known, 0).clamp(-1, 3)


class Fit(NamedTuple):
    """The slopes over twice the step, fitted by (1 + growth)·D(h), for each input, [d] each."""

    growth: Tensor
    left: Tensor  # mean square of what the fit leaves, noise included
    by_noise: Tensor  # the part of that which is noise

    @staticmethod
    def of(sums: TrialSums, noise: Tensor, differences: Differences) -> "Fit":
        """The fit, with `noise` [d] the variance of D(h)."""
        growth, weight = growth_of(sums, noise, differences, 2), sums.weight.clamp_min(TINY)
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

    @staticmethod
    def of(sums: TrialSums, noise: Tensor, differences: Differences, jumps: Tensor) -> "SlopeErrors":
        """The errors that follow from sums over trials, with `noise` [d] the variance of D(h).

        Inputs along which the box jumps, which `jumps` [d] tells, are judged apart from the others.

        What the fit of D(2h) leaves is noise of known variance, of which `doubt` times as much is subtracted, and
        bending. Where the error of a slope grows with a power of h, what is left is a known multiple of it; at the best
        step noise is `order` times the bending, and the divisor makes up there for what is subtracted too much. Where
        slopes shrink with h, errors grow more slowly than that power: D(2h) is as wrong as D(h), and their difference
        tells little of the error. In networks and pendulums it is larger by the eighth power of D(h) / D(2h).
        """
        order, weight = differences.order, sums.weight.clamp_min(TINY)
        twice, half = Fit.of(sums, noise, differences), growth_of(sums, noise, differences, 0)
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
        saturates = half - SETTINGS.certain * error > SETTINGS.reached_end * usual
        roughness, rough = _roughness(sums, jumps)
        return SlopeErrors(noise, bending, twice.growth / (2**order - 1), square, saturates, roughness, rough)


def _roughness(sums: TrialSums, jumps: Tensor) -> tuple[Tensor, Tensor]:
    """See `SlopeErrors.roughness` and `SlopeErrors.rough`; NaN where none of the inputs alike has a slope."""
    rows, flat = sums.rows.clamp_min(1), sums.square == 0
    shorter, longer = sums.rough_half / rows, sums.rough_twice / rows + SETTINGS.material
    roughness = torch.full_like(shorter, math.nan)
    for alike in (jumps, ~jumps):
        if not bool(flat[alike].all()):
            roughness[alike] = shorter[alike].sum() / longer[alike].sum()
    # The logarithm of the ratio of two variances has a standard error of sqrt(4 / rows).
    most = shorter / longer * torch.exp(SETTINGS.certain * (4 / rows).sqrt())
    return roughness, torch.where(flat, roughness, torch.minimum(roughness, most))


def roughness_at_best(differences: Differences) -> float:
    """`SlopeErrors.roughness` at the step with the least error, where the noise is `order` times the bending."""
    covariance, order = noise_covariance(differences), differences.order
    shorter, longer = (float(covariance[k, k] - 2 * covariance[1, k] + covariance[1, 1]) for k in (0, 2))
    return (order * shorter + (1 - 0.5**order) ** 2) / (order * longer + (2.0**order - 1) ** 2)
