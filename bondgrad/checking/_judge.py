"""Weighing a gradient against measured slopes."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from bondgrad.checking._slopes import JITTER, SHORTEST, Slopes

COPIES = 4  # of every measurement, to begin with
GRADIENTS = 8  # to begin with; they may scatter between two values, as those of forward differences do
FALSE_ALARM = 1e-3  # chance of any, for normal noise
LOOKS = 10  # at the growing evidence, among which that chance is shared
WEAK = 0.01  # an input with less effect than this, in units of the typical one, is measured by that
SURE = 4  # times smaller than it seems may the remaining error of a slope be at least; in theory it is 15 times
SEEN = 10  # times the noise, from which the remainder of Taylor's series is believed
BENT = 0.1  # of a slope: a change between steps from which neither is believed
Z_KINK = 4.0  # standard deviations from which a kink is believed
KINK_NOISE = 16  # its variance due to rounding, in units of that of a slope
CLEAR = 25  # times its noise are the squares of a slope that is seen
LEVELS = 4  # of rounding that make it random
MINOR = 1 / 8  # of the variance: not worth more evaluations
AMPLIFIED = 4.5  # noise of a slope, times the longest step, in units of the noise of the loss


class Evidence(NamedTuple):
    """For or against each input; the last entry of what has d + 1 is all inputs together."""

    factor: Tensor  # [d + 1]
    standard_error: Tensor  # [d + 1] of the factor
    unexplained: Tensor  # [d] error that no factor explains
    error: Tensor  # [d]
    visible: Tensor  # [d]
    wrong: Tensor  # [d + 1] bool
    missing: Tensor  # [d] bool: the gradient is not finite where the box is
    bending: Tensor  # [d] bool: what is not known is not due to noise, but to steps too long
    g: Tensor  # [r, d] the gradient
    s: Tensor  # [r, d] the slopes
    known: Tensor  # [r, d] bool: where they are; zero elsewhere


class Trial:
    """Measurements, until they are enough."""

    def __init__(self, slopes: Slopes, tolerance: float, budget: int, generator: torch.Generator) -> None:
        self.slopes, self.tolerance, self.budget, self.generator = slopes, tolerance, budget, generator
        self.scale = slopes.longest.amax(0)  # [d]
        self.base = slopes.loss(slopes.x[:, None]).squeeze(1)  # [r]
        self.ladder = slopes.ladder()
        quotients, self.upper, _, self.steps = slopes.quotients(self.ladder)  # [r, d, rungs] each
        self.longest = slopes.choose(self.ladder, quotients)  # [r, d]
        self.g = slopes.gradients(GRADIENTS, generator)  # [copies, r, d]
        self.measured = slopes.measure(self.longest, COPIES, generator)  # [4, copies, r, d]

    @property
    def s(self) -> Tensor:
        """[copies, r, d] the slopes."""
        return self.measured[0]

    def run(self) -> Evidence:
        """Go on until it is known, or nothing is left to spend."""
        evidence = self.judge()
        for _ in range(LOOKS - 1):
            seen = bool((evidence.visible <= 2 * self.tolerance).all())
            if seen or bool(evidence.wrong.any()) or not self.more(evidence.bending):
                break
            evidence = self.judge()
        return evidence

    def more(self, bending: Tensor) -> bool:
        """Measure as often again as before; with shorter steps where the function bends, bool [d]. False: no budget."""
        r, d = self.longest.shape
        left = self.budget - self.slopes.evaluations
        cost_s, cost_g = r * (6 * d + 1), self.slopes.gradient_rows
        if bool(bending.any()):
            if left < COPIES * cost_s:
                return False
            self.longest = torch.where(bending, self.longest / 4, self.longest)
            copies = min(len(self.s), left // cost_s)
            self.measured = self.slopes.measure(self.longest, copies, self.generator)
            return True
        # Of whichever says little about the noise, there is enough.
        var_s, var_g = (_mean(samples)[1].nansum(0) for samples in (self.s, self.g))  # [d]
        more_s, more_g = (bool((var > MINOR * (var_s + var_g)).any()) for var in (var_s, var_g))
        share = left / max(1, more_s * len(self.s) * cost_s + more_g * len(self.g) * cost_g)
        copies_s, copies_g = (int(min(1, share) * len(samples)) for samples in (self.s, self.g))
        if max(more_s * copies_s, more_g * copies_g) < 1:
            return False
        if more_s and copies_s:
            more = self.slopes.measure(self.longest, copies_s, self.generator)
            self.measured = torch.cat((self.measured, more), 1)
        if more_g and copies_g:
            self.g = torch.cat((self.g, self.slopes.gradients(copies_g, self.generator)))
        return True

    def judge(self) -> Evidence:
        """Compare what there is so far. All sums over rows leave out those without an answer."""
        tolerance, d = self.tolerance, self.s.shape[2]
        s, var_s, known = _mean(self.s)  # [r, d] each
        g, var_g, given = _mean(self.g)
        # Rounding is random where the drawn steps lead over several of its levels, and may else be the same every time:
        # no number of copies makes that less.
        rounding = self.slopes.rounding[:, None]
        over = (s * self.longest).abs() * SHORTEST * JITTER / (math.sqrt(12) * rounding)  # [r, d] levels
        fixed = (AMPLIFIED * rounding / self.longest).square()
        var_s = var_s + torch.where(over.nanmedian(0).values > LEVELS, 0, fixed)
        kink, var_kink, _ = _mean(self.measured[2])
        var_kink = torch.maximum(var_kink, var_kink.nanmean(0))  # of so few copies, it may be small by chance
        believed = Z_KINK * (var_kink + KINK_NOISE * fixed).sqrt()
        rough = kink.abs() > torch.maximum(believed, tolerance * s.square().nanmean(0).sqrt())
        known &= ~rough  # where the function has a kink, there is no slope to compare with
        s, g, var_s, var_g = (torch.where(known, t, 0) for t in (s, g, var_s, var_g))
        missing = (known & ~given).any(0)
        g, var_g = torch.where(given, g, 0), torch.where(given, var_g, 0)
        change, var_change, _ = (torch.where(known, t, 0) for t in _mean(self.measured[1]))
        n = known.sum(0).clamp(min=1)  # [d]

        # The noise of s makes its squares too large, and its products with g - s too small.
        e = g - s
        var_s, var_g = (torch.where(known, torch.maximum(v, v.sum(0) / n), 0) for v in (var_s, var_g))  # few copies
        var = var_s + var_g
        squares = (s.square() - var_s).sum(0)
        along = (e * s + var_s).sum(0)
        effect = (squares.clamp(min=0) / n).sqrt() * self.scale
        typical = effect.square().mean().sqrt()
        size = torch.maximum(effect, WEAK * typical) / self.scale  # [d]
        size = size.clamp(min=torch.finfo(torch.float64).tiny ** 0.25)
        # The last term is due to taking off var_s, itself an estimate.
        chance = var_s * (var_s * (2 + 2 / (len(self.s) - 1)) + var_g)
        spread = (s.square() * var + chance).sum(0).sqrt()
        bend = (change * s).sum(0).abs() / SURE
        weights = self.scale.square()  # makes all inputs comparable
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
        z = _quantile(1 - FALSE_ALARM / (2 * tests * LOOKS))
        t = _student(z, self.freedom(s.square() * var_s, s.square() * var_g))  # [d + 1]
        clear = squares > CLEAR * blur  # else nothing can be said of factors, and all is left to the sum of squares
        factor = torch.where(clear, along / squares, 0)
        noise = t * spread / reach
        doubt = noise + bend / reach  # [d + 1]

        # What no factor explains, as a sum of squares, and what that stays below for noise around an error that is
        # tolerated (Birgé 2001).
        rest = (e - factor[:-1] * s).square().sum(0)
        allowed = (n.sqrt() * size * tolerance + change.square().sum(0).sqrt() / SURE).square()
        own = var * (t[:-1] / z).square()
        x = math.log(tests * LOOKS / FALSE_ALARM)
        scatter = 2 * (x * (own.square().sum(0) + 2 * own.amax(0) * allowed)).sqrt() + 2 * x * own.amax(0)
        norm = n.sqrt() * size
        seen = torch.maximum(tolerance + doubt[:-1], (allowed + scatter).sqrt() / norm)
        # Steps so long that the slope depends on them say nothing at all. Where it does so wildly, as of a wave much
        # shorter than they are, it scatters by far more than the loss itself does when asked again.
        noise_of_s = _mean(self.measured[3])[1] * (AMPLIFIED / self.longest).square() + fixed
        beyond = torch.maximum(
            (change.square() - SEEN * torch.where(known, var_change + fixed, 0)).sum(0),
            len(self.s) * (var_s - SEEN * torch.where(known, noise_of_s, 0)).sum(0),
        )
        lost = beyond > BENT**2 * s.square().sum(0)
        seen = torch.where(lost, math.inf, seen)
        wrong = clear & ((along / reach).abs() > tolerance + doubt)
        wrong[:-1] |= rest > allowed + own.sum(0) + scatter
        wrong = torch.cat(((wrong[:-1] & ~lost) | missing, wrong[-1:] & ~lost.any()))
        bent = torch.maximum(bend[:-1] / reach[:-1], allowed.sqrt() / norm - tolerance)
        noisy = torch.maximum(noise[:-1], scatter.sqrt() / norm).clamp(min=tolerance / 4)
        silent = known.sum(0) == 0  # nothing can be said about this input
        return Evidence(
            torch.where(clear, 1 + factor, math.nan),
            torch.where(clear, spread / squares, math.inf),
            (rest - own.sum(0)).clamp(min=0).sqrt() / norm,
            (e.square() - var).sum(0).clamp(min=0).sqrt() / norm,
            torch.where(silent, math.inf, seen),
            wrong,
            missing,
            (bent > noisy) | lost,
            g,
            s,
            known,
        )

    def freedom(self, of_s: Tensor, of_g: Tensor) -> Tensor:
        """Degrees of freedom [d + 1] behind sums over rows of variances [r, d] (Welch and Satterthwaite)."""
        squares = of_s.square() / (len(self.s) - 1) + of_g.square() / (len(self.g) - 1)
        total = (of_s + of_g).sum(0).square() / squares.sum(0).clamp(min=torch.finfo(squares.dtype).tiny)
        total = total.clamp(min=COPIES - 1)
        return torch.cat((total, total.min().view(1)))

    def rate(self) -> Tensor:
        """Exponent [d] of the step in the remainder of Taylor's series, over the finest rungs that noise leaves."""
        g = self.g.nanmean(0)
        remainder = self.upper - self.base[:, None, None] - self.steps * g[..., None]  # [r, d, rungs]
        size = remainder.square().nanmean(0).sqrt()  # [d, rungs]
        noise = self.s.var(0) * (self.longest / AMPLIFIED).square() + self.slopes.rounding[:, None].square()  # [r, d]
        seen = size > SEEN * noise.nanmean(0).sqrt()[:, None]
        step = self.steps.square().mean(0).sqrt()
        result = torch.full_like(size[:, 0], math.nan)
        for i in range(len(result)):
            # Below the first rung that is not seen, it may be seen by chance.
            count = int(seen[i].long().cumprod(0).sum())
            first = max(0, count - 3)
            if count - first >= 2 and step[i, count - 1] < step[i, first]:
                last = count - 1
                result[i] = (size[i, first] / size[i, last]).log() / (step[i, first] / step[i, last]).log()
        return result


def _mean(samples: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, its variance, and whether there are enough for both, [...] each, over finite samples [copies, ...]."""
    finite = torch.isfinite(samples)
    samples, count = torch.where(finite, samples, math.nan), finite.sum(0)
    mean = samples.nanmean(0)
    variance = (samples - mean).square().nansum(0) / (count - 1).clamp(min=1) / count.clamp(min=1)
    return mean, variance, count >= 2


def _quantile(p: float) -> float:
    """Of the normal distribution."""
    return float(torch.special.ndtri(torch.tensor(p, dtype=torch.float64, device="cpu")))


def _student(z: float, freedom: Tensor) -> Tensor:
    """The quantile of Student's distribution that has the probability of z in the normal one (Cornish and Fisher)."""
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum((term / freedom**n for n, term in enumerate(terms)), torch.zeros_like(freedom))
