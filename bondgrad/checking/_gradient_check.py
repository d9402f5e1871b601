"""Measuring until it is known whether a gradient is right."""

import math

import torch
from torch import Tensor

from bondgrad.checking._evidence import Evidence, compare
from bondgrad.checking._settings import SETTINGS
from bondgrad.checking._slopes import LossSlopes, rungs
from bondgrad.measuring._statistics import LOOKS, mean


class GradientCheck:
    """Gradients and slopes at the same rows, and more of both until they are enough.

    Args:
        slopes: The loss near the rows.
        tolerance: Relative error of an input's gradient that still counts as right.
        generator: Of the steps.
    """

    def __init__(self, slopes: LossSlopes, tolerance: float, generator: torch.Generator) -> None:
        self.slopes, self.tolerance, self.generator = slopes, tolerance, generator
        self.base, ladder = slopes.base(1), slopes.ladder()  # [r, 1], [r, d, rungs]
        self.moves, self.losses = slopes.losses(ladder)  # [r, d, rungs, 2] each
        quotients = (self.losses.diff(dim=3) / self.moves.diff(dim=3)).squeeze(3)
        self.gradients = slopes.gradients(SETTINGS.gradients, generator)  # [copies, r, d]
        self.samples = slopes.measure(slopes.best_steps(ladder, quotients), SETTINGS.copies, generator)

    def run(self) -> Evidence:
        """Measure until an input is wrong, every input is decided, or the budget is spent.

        Steps may have led over kinks. So an input that seems wrong has to seem so again with shorter steps, unless the
        function shows no kinks and one factor explains the error: kinks have another effect at every row.
        """
        at_kink = torch.zeros_like(self.samples.step, dtype=torch.bool)
        shortened = torch.zeros_like(at_kink[0])  # [d] inputs that seemed wrong, and have shorter steps since
        for look in range(1, LOOKS + 1):
            evidence = compare(self.gradients, self.samples, at_kink, self.tolerance)
            wrong, at_kink = evidence.wrong, evidence.entries.at_kink
            has_kinks = int(at_kink.sum()) > max(1, SETTINGS.kinks_part * at_kink.numel())
            confirmed = torch.cat((shortened | evidence.missing, shortened.all(0, keepdim=True)))
            if bool((wrong & (confirmed | (evidence.uniform & (not has_kinks)))).any()):
                return evidence
            suspect = (wrong[:-1] | wrong[-1]) & ~shortened  # [d]
            evidence = evidence._replace(wrong=torch.zeros_like(wrong), enough=evidence.enough & ~suspect)
            if bool(evidence.enough.all()) or look == LOOKS or not self.more(evidence.bending | suspect):
                break
            shortened |= suspect
        return evidence

    def more(self, shorter: Tensor) -> bool:
        """Measure as often again as before, or anew with shorter steps of some inputs, bool [d]. False: no budget."""
        slopes, left, copies = self.slopes, self.slopes.sampler.left, len(self.samples.slope)
        if bool(shorter.any()):
            copies = min(copies, left // slopes.cost(1))
            if copies < SETTINGS.copies:
                return False
            step = torch.where(shorter, self.samples.step / SETTINGS.factor, self.samples.step)
            self.samples = slopes.measure(step, copies, self.generator)
            return True
        # Of whichever adds little to the variance, there is enough.
        var_s, var_g = (mean(t)[1].nansum(0) for t in (self.samples.slope, self.gradients))  # [d]
        more_s = copies * bool((var_s > SETTINGS.minor * (var_s + var_g)).any())
        more_g = len(self.gradients) * bool((var_g > SETTINGS.minor * (var_s + var_g)).any())
        cost = slopes.cost(more_s) + slopes.sampler.gradient_cost(more_g * len(slopes.x))
        more_s, more_g = (int(min(1, left / max(1, cost)) * more) for more in (more_s, more_g))
        if more_s:
            self.samples = self.samples.joined(slopes.measure(self.samples.step, more_s, self.generator))
        if more_g:
            self.gradients = torch.cat((self.gradients, slopes.gradients(more_g, self.generator)))
        return more_s + more_g > 0

    def rate(self) -> Tensor:
        """Exponent [d] of the step in the remainder of Taylor's series, over the finest rungs that noise leaves."""
        move = self.moves[..., 0]  # [r, d, rungs]
        remainder = self.losses[..., 0] - self.base[:, None] - move * mean(self.gradients)[0][..., None]
        size, length = (t.square().nanmean(0).sqrt() for t in (remainder, move))  # [d, rungs]
        noise = self.samples.loss.var(0) + self.samples.rounding.square()  # [r, d]
        # Below the first rung that is not seen, it may be seen by chance.
        seen = size > SETTINGS.seen * noise.nanmean(0).sqrt()[:, None]
        count = seen.long().cumprod(1).sum(1, keepdim=True)  # [d, 1]
        first, last = ((count - back).clamp(min=0) for back in (3, 1))
        size, length = ((t.gather(1, first) / t.gather(1, last)).log() for t in (size, length))
        return torch.where(length > 0, size / length, math.nan).squeeze(1)


def least_cost(d: int, gradient: int, dtype: torch.dtype) -> int:
    """Evaluations at one row that a check of d inputs takes at least, for a gradient that takes so many itself."""
    return 2 * rungs(dtype) * d + SETTINGS.copies * (6 * d + 1) + SETTINGS.gradients * gradient + 1
