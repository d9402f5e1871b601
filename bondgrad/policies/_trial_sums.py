"""What the slopes of trials say about the errors of a slope: noise, bending, and growth common to all rows."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bondgrad.measuring._step_trial import WEIGHTS, Differences, StepTrial, noise_covariance

TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class ErrorSettings:
    """How errors of slopes are judged. The values were found on the boxes of `benchmarks/calibrated.py`."""

    largest: float = 1e15  # units; larger slopes, the squares of which might overflow, count as not known
    material: float = 1e-3  # part of the squared slopes by which D(h/2) and D(h) must differ to be called rough
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
    relative to the slope of each row. Where noise is larger than the slopes all rows have the same weight.
    """

    weight: Tensor  # of the rows with slopes at all three steps
    square: Tensor  # D(h)²
    cross: Tensor  # (D(2h) - D(h))·D(h)
    change: Tensor  # (D(2h) - D(h))²
    half_cross: Tensor  # (D(h/2) - D(h))·D(h)
    half_change: Tensor  # (D(h/2) - D(h))²
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
        weighted = (one * one, change * one, change * change, half_change * one, half_change * half_change)
        trusted = torch.where(sound, weight, 0)  # noise counts likewise, since it may grow with the outputs
        noise = noise * trusted * (sound.sum(0) / trusted.sum(0).clamp_min(TINY))
        parts = (weight, *(weight * part for part in weighted), known, sound, noise)
        return torch.stack([part.sum(0) for part in parts]).float()


COUNT = len(TrialSums._fields)


class Fit(NamedTuple):
    """The slopes over k times the step, k = 2 or 1/2, fitted by (1 + growth)·D(h), for each input, [d] each."""

    growth: Tensor
    left: Tensor  # mean square of what the fit leaves, noise included
    by_noise: Tensor  # the part of that which is noise

    @staticmethod
    def of(sums: TrialSums, noise: Tensor, differences: Differences, k: int) -> "Fit":
        """The fit of D(h/2), for k = 0, or of D(2h), for k = 2; `noise` [d] is the variance of D(h)."""
        cross, change = (sums.half_cross, sums.half_change) if k == 0 else (sums.cross, sums.change)
        covariance, weight = noise_covariance(differences), sums.weight.clamp_min(TINY)
        common, own = float(covariance[1, k]), float(covariance[k, k])
        known = (sums.square / weight - noise).clamp_min(0) + SETTINGS.doubt * noise
        growth = torch.where(known > 0, (cross / weight + noise * (1 - common)) / known, 0).clamp(-1, 3)
        left = (change - 2 * growth * cross + growth.square() * sums.square) / weight
        ratio = 1 + growth
        one_sided = SETTINGS.one_sided_noise - (SETTINGS.one_sided_noise - 1) * sums.sound / sums.rows.clamp_min(1)
        return Fit(growth, left, noise * one_sided * (own - 2 * ratio * common + ratio.square()))


class SlopeErrors(NamedTuple):
    """The errors of D(h) for each input, [d] each."""

    noise: Tensor  # variance
    bending: Tensor  # mean square of the error that differs from row to row without being noise
    stretch: Tensor  # relative growth of all slopes of an input
    square: Tensor  # mean square of the slopes, without noise
    saturates: Tensor  # whether all slopes of an input shrink as where outputs have reached their end
    roughness: Tensor  # difference of D(h/2) and D(h) over that of D(h) and D(2h), in the sum over inputs: a number

    @staticmethod
    def of(sums: TrialSums, noise: Tensor, differences: Differences) -> "SlopeErrors":
        """The errors that follow from sums over trials, with `noise` [d] the variance of D(h).

        What the fit of D(2h) leaves is noise of known variance, of which `doubt` times as much is subtracted, and
        bending. Where the error of a slope grows with a power of h, what is left is a known multiple of it; at the best
        step noise is `order` times the bending, and the divisor makes up there for what is subtracted too much. Where
        slopes shrink with h, errors grow more slowly than that power: D(2h) is as wrong as D(h), and their difference
        tells little of the error. In networks and pendulums it is larger by the eighth power of D(h) / D(2h).
        """
        order, weight = differences.order, sums.weight.clamp_min(TINY)
        twice, half = (Fit.of(sums, noise, differences, k) for k in (2, 0))
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
        saturates = half.growth - SETTINGS.certain * error > SETTINGS.reached_end * usual
        size = sums.square.clamp_min(TINY)
        by_input = sums.half_change / size
        material = by_input > SETTINGS.material
        roughness = by_input[material].sum() / (sums.change / size)[material].sum()
        roughness = torch.where(material.any() | (sums.square == 0).all(), roughness, 0)  # NaN: there are no slopes
        return SlopeErrors(noise, bending, twice.growth / (2**order - 1), square, saturates, roughness)
