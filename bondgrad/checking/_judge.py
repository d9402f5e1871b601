"""Weighing a gradient against measured slopes."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from bondgrad.checking._slopes import JITTER, SHORTEST
from bondgrad.measuring._statistics import FALSE_ALARM, LOOKS, freedom, mean, normal_quantile, student

WEAK = 0.01  # of the typical effect: what an input is measured by that has less, and less than can be seen
SURE = 4  # times smaller than it seems may the remaining error of a slope be at least; in theory it is 15 times
SEEN = 10  # times the noise, from which the remainder of Taylor's series is believed
BENT = 0.1  # of a slope: a change between steps from which neither is believed
Z_KINK = 4.0  # standard deviations from which a kink is believed
FEW_KINKS = 0.01  # of all entries may have one by chance
Z_FOLDS = 3.0  # that there are kinks at all
KINK_NOISE = 16  # its variance due to rounding, in units of that of a slope
CLEAR = 25  # times its noise are the squares of a slope that is seen
DROWNED = 30  # times the variance of a row is to be below the squared error that is looked for
MODERATE = 2.5  # a factor of the slope that an error may be: 2 for a wrong sign
LEVELS = 4  # of rounding that make it random
AMPLIFIED = 4.5  # noise of a slope, times the longest step, in units of the noise of the loss


class Measured(NamedTuple):
    """What there is to judge by."""

    g: Tensor  # [copies, r, d] the gradient: see `Slopes.gradients`
    slopes: Tensor  # [4, copies, r, d] see `Slopes.measure`
    longest: Tensor  # [r, d] the steps they were measured with
    rounding: Tensor  # [r, d] of the loss
    scale: Tensor  # [d] how far inputs move
    aside: Tensor  # [r, d] bool: where slopes are not to be believed

    def of(self, inputs: Tensor) -> "Measured":
        """What is about some inputs, by their numbers."""
        return Measured(
            self.g[..., inputs],
            self.slopes[..., inputs],
            self.longest[:, inputs],
            self.rounding[:, inputs],
            self.scale[inputs],
            self.aside[:, inputs],
        )


class Evidence(NamedTuple):
    """For or against each input; the last entry of what has d + 1 is all inputs together."""

    factor: Tensor  # [d + 1]
    standard_error: Tensor  # [d + 1] of the factor
    unexplained: Tensor  # [d] error that no factor explains
    error: Tensor  # [d]
    visible: Tensor  # [d]
    enough: Tensor  # [d] bool: twice the tolerance would have been seen
    wrong: Tensor  # [d + 1] bool
    by_factor: Tensor  # [d + 1] bool: wrong by the same factor at all rows, at least in part
    missing: Tensor  # [d] bool: the gradient is not finite where the box is
    bending: Tensor  # [d] bool: what is not known is not due to noise, but to steps too long
    g: Tensor  # [r, d] the gradient
    s: Tensor  # [r, d] the slopes
    known: Tensor  # [r, d] bool: where they are; zero elsewhere

    def also_missing(self, missing: Tensor) -> "Evidence":
        """With inputs, bool [d], whose gradient is not finite at other rows."""
        wrong = torch.cat((self.wrong[:-1] | missing, self.wrong[-1:]))
        return self._replace(wrong=wrong, missing=self.missing | missing)


def judge(measured: Measured, tolerance: float) -> Evidence:
    """Compare what there is so far. All sums over rows leave out those without an answer."""
    longest, scale, d = measured.longest, measured.scale, len(measured.scale)
    copies_s, copies_g = measured.slopes.shape[1], len(measured.g)
    s, var_s, known = mean(measured.slopes[0])  # [r, d] each
    g, var_g, given = mean(measured.g)
    missing = (known & measured.g.isinf().any(0)).any(0)  # in any copy: it is wrong even if others are not
    # Rounding is random where the drawn steps lead over several of its levels, and may else be the same every time:
    # no number of copies makes that less.
    rounding = measured.rounding
    over = (s * longest).abs() * SHORTEST * JITTER / (math.sqrt(12) * rounding)  # [r, d] levels
    fixed = (AMPLIFIED * rounding / longest).square()
    var_s = var_s + torch.where(over.nanmedian(0).values > LEVELS, 0, fixed)
    kink, var_kink = kinks(measured)
    # Where the function has a kink, there is no slope to compare with.
    known &= ~_rough(s, kink, var_kink, tolerance) & ~measured.aside & given
    known &= ~_drowned(torch.where(known, s, 0), torch.where(known, fixed, 0), tolerance)
    s, g, var_s, var_g = (torch.where(known, t, 0) for t in (s, g, var_s, var_g))
    change, var_change, _ = (torch.where(known, t, 0) for t in mean(measured.slopes[1]))
    n = known.sum(0).clamp(min=1)  # [d]
    folds = _folds(torch.where(known, kink, 0), torch.where(known, var_kink, 0))  # [d]

    # The noise of s makes its squares too large, and its products with g - s too small.
    e = g - s
    var_s, var_g = (torch.where(known, torch.maximum(v, v.sum(0) / n), 0) for v in (var_s, var_g))  # few copies
    var = var_s + var_g
    squares = (s.square() - var_s).sum(0)
    along = (e * s + var_s).sum(0)
    effect = (squares.clamp(min=0) / n).sqrt() * scale
    typical = effect.square().mean().sqrt()
    tiny = torch.finfo(torch.float64).tiny ** 0.25
    usual = (torch.maximum(effect, WEAK * typical) / scale).clamp(min=tiny)  # [d]
    # A weak input whose slope is seen all the same is measured by that.
    size = torch.where(squares > CLEAR * var_s.sum(0), (effect / scale).clamp(min=tiny), usual)  # [d]
    # The last term is due to taking off var_s, itself an estimate.
    chance = var_s * (var_s * (2 + 2 / (copies_s - 1)) + var_g)
    spread = (s.square() * var + chance).sum(0).sqrt()
    bend = (change * s).sum(0).abs() / SURE + 2 * folds * (s.square().sum(0) / n).sqrt()
    weights = scale.square()  # makes all inputs comparable
    along, squares, blur, spread, bend, reach = (
        torch.cat((t, total.view(1)))  # [d + 1]
        for t, total in (
            (along, (weights * along).sum()),
            (squares, (weights * squares).sum()),
            (var_s.sum(0), (weights * var_s).sum()),
            (spread, (weights * spread).square().sum().sqrt()),
            (bend, (weights * bend).sum()),
            (n * size.square(), (weights * n * size.square()).sum()),
        )
    )
    tests = 2 * d + 1
    z = normal_quantile(1 - FALSE_ALARM / (2 * tests * LOOKS))
    t = student(z, freedom(s.square() * var_s, copies_s, s.square() * var_g, copies_g))  # [d + 1]
    clear = squares > CLEAR * blur  # else nothing can be said of factors, and all is left to the sum of squares
    factor = torch.where(clear, along / squares, 0)
    noise = t * spread / reach
    doubt = noise + bend / reach  # [d + 1]

    # What no factor explains, as a sum of squares, and what that stays below for noise around an error that is
    # tolerated (Birgé 2001).
    rest = (e - factor[:-1] * s).square().sum(0)
    allowed = (n.sqrt() * size * tolerance + change.square().sum(0).sqrt() / SURE + folds).square()
    own = var * (t[:-1] / z).square()
    x = math.log(tests * LOOKS / FALSE_ALARM)
    scatter = 2 * (x * (own.square().sum(0) + 2 * own.amax(0) * allowed)).sqrt() + 2 * x * own.amax(0)
    norm = n.sqrt() * size
    seen = torch.maximum(tolerance + doubt[:-1], (allowed + scatter).sqrt() / norm)
    # Steps so long that the slope depends on them say nothing at all. Where it does so wildly, as of a wave much
    # shorter than they are, it scatters by far more than the loss itself does when asked again.
    noise_of_s = mean(measured.slopes[3])[1] * (AMPLIFIED / longest).square() + fixed
    beyond = torch.maximum(
        (change.square() - SEEN * torch.where(known, var_change + fixed, 0)).sum(0),
        copies_s * (var_s - SEEN * torch.where(known, noise_of_s, 0)).sum(0),
    )
    lost = beyond > BENT**2 * s.square().sum(0)
    silent = known.sum(0) == 0  # nothing can be said about this input
    seen = torch.where(lost | silent, math.inf, seen)
    by_factor = clear & ((along / reach).abs() > tolerance + doubt)
    wrong = by_factor.clone()
    wrong[:-1] |= rest > allowed + own.sum(0) + scatter
    by_factor[:-1] |= wrong[:-1] & _alike(e, s)
    wrong = torch.cat(((wrong[:-1] & ~lost) | missing, wrong[-1:] & ~lost.any()))
    bent = torch.maximum(bend[:-1] / reach[:-1], allowed.sqrt() / norm - tolerance)
    noisy = torch.maximum(noise[:-1], scatter.sqrt() / norm).clamp(min=tolerance / 4)
    return Evidence(
        torch.where(clear, 1 + factor, math.nan),
        torch.where(clear, spread / squares, math.inf),
        (rest - own.sum(0)).clamp(min=0).sqrt() / norm,
        (e.square() - var).sum(0).clamp(min=0).sqrt() / norm,
        seen,
        seen * size / usual <= 2 * tolerance,
        wrong,
        by_factor,
        missing,
        (bent > noisy) | lost,
        g,
        s,
        known,
    )


def kinks(measured: Measured) -> tuple[Tensor, Tensor]:
    """By how much the slopes on both sides of each row differ, and the variance of that, [r, d] each."""
    kink, variance, _ = mean(measured.slopes[2])
    variance = torch.maximum(variance, variance.nanmean(0))  # of so few copies, it may be small by chance
    return kink, variance + KINK_NOISE * (AMPLIFIED * measured.rounding / measured.longest).square()


def has_kinks(measured: Measured, tolerance: float) -> bool:
    """Whether the function is known to have some: more than chance would have it."""
    rough = _rough(mean(measured.slopes[0])[0], *kinks(measured), tolerance)
    return int(rough.sum()) > max(1, FEW_KINKS * rough.numel())


def _rough(s: Tensor, kink: Tensor, variance: Tensor, tolerance: float) -> Tensor:
    """Where kinks [r, d] are believed, beside slopes s [r, d]."""
    return kink.abs() > torch.maximum(Z_KINK * variance.sqrt(), tolerance * s.square().nanmean(0).sqrt())


def _alike(e: Tensor, s: Tensor) -> Tensor:
    """Whether errors e [r, d] are mostly slopes s [r, d] times a factor of moderate size: bool [d]."""
    products, of_e, of_s = (e * s).sum(0), e.square().sum(0), s.square().sum(0)
    return (products.square() > of_e * of_s / 2) & (of_e < MODERATE**2 * of_s)


def _folds(kink: Tensor, variance: Tensor) -> Tensor:
    """Error [d] of the slopes of all rows, as the root of a sum of squares, due to kinks that are small or many.

    Of a rough function with noise, no kink by itself may be seen, but all together.

    Args:
        kink: [r, d] as measured, zero where it does not count.
        variance: [r, d] of that.
    """
    beyond = (kink.square() - variance).sum(0)
    believed = beyond > Z_FOLDS * (2 * variance.square().sum(0)).sqrt()
    return torch.where(believed, beyond, 0).clamp(min=0).sqrt() / 2  # half a kink is between its mean and either side


def _drowned(s: Tensor, fixed: Tensor, tolerance: float) -> Tensor:
    """Rows, bool [r, d], with so much rounding that those with less tell more without them.

    A row with outputs larger by orders of magnitude than others has as much more of it.

    Args:
        s: [r, d] the slopes, zero where they are not known.
        fixed: [r, d] their variance due to rounding.
        tolerance: Relative error to be seen.
    """
    squares = torch.where(s.square() > CLEAR * fixed, s.square(), 0)
    total = squares.sum(0)
    rounding, order = fixed.sort(0)
    half = (squares.gather(0, order).cumsum(0) < total / 2).sum(0, keepdim=True).clamp(max=len(s) - 1)
    needed = rounding.gather(0, half).squeeze(0)  # [d] lest less than half of the slopes are left
    return fixed > torch.maximum(needed, tolerance**2 * total / DROWNED)
