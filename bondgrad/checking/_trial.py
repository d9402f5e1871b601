"""Measuring until it is known whether a gradient is right."""

import math

import torch
from torch import Tensor

from bondgrad.checking._confirm import confirm, shorter_steps
from bondgrad.checking._judge import AMPLIFIED, SEEN, Evidence, Measured, has_kinks, judge
from bondgrad.checking._slopes import Slopes
from bondgrad.measuring._statistics import LOOKS, mean

COPIES = 4  # of every measurement, to begin with
GRADIENTS = 8  # to begin with; they may scatter between two values, as those of forward differences do
RESERVE = 16  # times as large is the budget as what is kept to confirm an accusation
MINOR = 1 / 8  # of the variance: not worth more evaluations


class Trial:
    """Measurements, until they are enough."""

    def __init__(self, slopes: Slopes, tolerance: float, generator: torch.Generator) -> None:
        self.slopes, self.tolerance, self.generator = slopes, tolerance, generator
        self.scale = slopes.longest.amax(0)  # [d]
        self.base = slopes.loss(slopes.x[:, None]).squeeze(1)  # [r]
        self.ladder = slopes.ladder()
        quotients, self.upper, _, self.steps = slopes.quotients(self.ladder)  # [r, d, rungs] each
        self.longest = slopes.choose(self.ladder, quotients)  # [r, d]
        self.g = slopes.gradients(GRADIENTS, generator)  # [copies, r, d]
        self.measured = slopes.measure(self.longest, COPIES, generator)  # [4, copies, r, d]
        self.aside = torch.zeros_like(self.longest, dtype=torch.bool)
        self.doubted = torch.zeros_like(self.aside[0])  # [d] accused without being wrong

    @property
    def s(self) -> Tensor:
        """[copies, r, d] the slopes."""
        return self.measured[0]

    def run(self) -> Evidence:
        """Go on until it is known, or nothing is left to spend."""
        for look in range(LOOKS):
            evidence = self.judge()
            shorter = evidence.bending
            if bool(evidence.wrong.any()):
                wrong = self.confirm(evidence)
                evidence = self.judge()
                # Whoever is accused still, though it could not be confirmed, is not right either.
                enough = evidence.enough & ~(evidence.wrong[:-1] | evidence.wrong[-1])
                evidence = evidence._replace(wrong=wrong, enough=enough)
                if bool(wrong.any()):
                    break
                shorter = shorter | self.doubted
            if bool(evidence.enough.all()) or look == LOOKS - 1 or not self.more(shorter):
                break
        return evidence

    def confirm(self, evidence: Evidence) -> Tensor:
        """Which of those accused, bool [d + 1], are wrong by other steps too, drawn anew and shorter.

        A step may have led over a kink or a pole, or rounding may be coarser than it seems.
        """
        wrong = evidence.wrong & ~torch.cat((evidence.missing, evidence.missing.new_zeros(1)))
        if not bool(wrong.any()):
            return evidence.wrong
        inputs = (wrong[:-1] if bool(wrong[:-1].any()) else ~wrong[:-1]).nonzero().squeeze(1)
        first, cost = self.so_far.of(inputs), self.slopes.measure_cost(len(inputs))
        copies = min(max(COPIES, len(self.s) // 4), self.slopes.asker.left // cost)
        if copies < 2:
            return evidence.by_factor & ~torch.cat((self.doubted, self.doubted.any(0, keepdim=True)))
        kinky = has_kinks(self.so_far, self.tolerance)
        steps = shorter_steps(first, copies, kinky)
        again = self.slopes.measure(steps, copies, self.generator, inputs)
        while True:
            second = first._replace(slopes=again, longest=steps, rounding=self.slopes.rounding(steps, inputs))
            found = confirm(first, second, self.tolerance, kinky)
            copies = again.shape[1]
            if not bool(found.unseen.any()) or copies * cost > self.slopes.asker.left // 2:
                break
            again = torch.cat((again, self.slopes.measure(steps, copies, self.generator, inputs)), 1)
        self.aside[:, inputs] |= found.aside & found.denied
        self.doubted[inputs] |= found.denied
        result = evidence.wrong.clone()
        result[inputs] = found.wrong[:-1] | evidence.missing[inputs]
        result[-1] &= found.wrong[-1]
        return result

    def more(self, bending: Tensor) -> bool:
        """Measure as often again as before; with shorter steps where the function bends, bool [d]. False: no budget."""
        r, d = self.longest.shape
        left = self.slopes.asker.left - self.slopes.asker.budget // RESERVE
        cost_s, cost_g = self.slopes.measure_cost(d), r * self.slopes.asker.gradient_cost
        if bool(bending.any()):
            if left < COPIES * cost_s:
                return False
            self.longest = torch.where(bending, self.longest / 4, self.longest)
            copies = min(len(self.s), left // cost_s)
            self.measured = self.slopes.measure(self.longest, copies, self.generator)
            return True
        # Of whichever says little about the noise, there is enough.
        var_s, var_g = (mean(samples)[1].nansum(0) for samples in (self.s, self.g))  # [d]
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

    @property
    def so_far(self) -> Measured:
        """All that was measured."""
        return Measured(self.g, self.measured, self.longest, self.slopes.rounding(self.longest), self.scale, self.aside)

    def judge(self) -> Evidence:
        """Compare what there is so far."""
        return judge(self.so_far, self.tolerance)

    def rate(self) -> Tensor:
        """Exponent [d] of the step in the remainder of Taylor's series, over the finest rungs that noise leaves."""
        g = mean(self.g)[0]
        remainder = self.upper - self.base[:, None, None] - self.steps * g[..., None]  # [r, d, rungs]
        size = remainder.square().nanmean(0).sqrt()  # [d, rungs]
        rounding = self.slopes.rounding(self.longest)
        noise = self.s.var(0) * (self.longest / AMPLIFIED).square() + rounding.square()  # [r, d]
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
