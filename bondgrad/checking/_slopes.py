"""Slopes of a loss along the inputs of a box, by symmetric differences whose step nobody has to choose.

The numbers that a check as a whole goes by are here, too.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bondgrad.calling._inputs import Limits
from bondgrad.checking._sampler import GradientSampler
from bondgrad.measuring._moves import one_input_moved
from bondgrad.measuring._rounding import OutputRounding


@dataclass(frozen=True)
class CheckSettings:
    """How much is measured, how, and from when on something is believed.

    The values were found on the boxes of `tests/checking` and with `benchmarks/check_power.py`.
    """

    # Rows of x.
    rows: int = 16  # at which slopes are measured
    finite_rows: int = 256  # at which the gradient is at least to be finite
    finite_part: int = 8  # that may cost one evaluation in so many of the budget
    suspects: int = 4  # of these rows, if they have none that is finite, at which slopes are measured too
    margin: float = 0.05  # of the spread: rows closer to a limit are moved away from it, to have room on both sides
    # Steps.
    factor: int = 4  # between neighbouring steps of the ladder, and from steps that were too long to shorter ones
    least_ulps: int = 64  # a step shorter than so many units of rounding of x is mostly rounding itself
    jitter: float = 0.3  # the part of a step that is drawn anew for every sample, so that roughness acts as noise
    usual_weight: float = 10.0  # of the disagreement of most rows, beside that of a row itself
    # Copies, over which means are taken.
    copies: int = 4  # of every slope, to begin with
    gradients: int = 8  # copies to begin with; those of forward differences may scatter between two values
    minor: float = 1 / 8  # a part of the variance that is not worth more evaluations
    # Evidence.
    noise_gain: float = 4.5  # standard deviation of a slope times its step, in units of that of the loss
    kink_gain: float = 16.0  # variance that rounding adds to a kink, in units of what it adds to a slope
    kink_z: float = 4.0  # standard deviations from which a kink at a row is believed
    kinks_part: float = 0.01  # of all entries that may seem to have one by chance
    weak: float = 0.01  # errors are measured by at least this part of the typical slope, unless an input's own is clear
    clear: float = 25.0  # a slope is clear if its square is so many times its variance
    safety: float = 4.0  # the error left by extrapolation is at most this part of the change; in theory a fifteenth
    scatter: float = 10.0  # slopes that scatter by so many times the variance due to noise are aliased
    scatter_part: float = 0.1  # if they scatter by at least this part of their size
    rounding_margin: float = 30.0  # times below the square of the tolerated error, rounding does not matter
    levels: float = 4.0  # of rounding that drawn steps have to lead over for it to be random
    seen: float = 10.0  # times the noise, from which the remainder of Taylor's series is believed
    # Words.
    named_inputs: int = 8  # that are named one by one
    huge_error: float = 10.0  # relative error, from which its size does not matter
    close: float = 0.2  # relative difference of a gradient from another one that it looks like


SETTINGS = CheckSettings()


class SlopeSamples(NamedTuple):
    """Repeated measurements of slopes along d inputs at r rows."""

    slope: Tensor  # [copies, r, d] Richardson's extrapolation from a half and a quarter of the step
    change: Tensor  # [copies, r, d] the same from the step and its half, less the slope
    kink: Tensor  # [copies, r, d] difference of the slopes to the two sides, beyond a part in proportion to the step
    loss: Tensor  # [copies, r, d] at the row itself
    step: Tensor  # [r, d] the longest that was used
    rounding: Tensor  # [r, d] standard deviation of the rounding of the loss

    def joined(self, more: "SlopeSamples") -> "SlopeSamples":
        """These samples, and more that were measured with the same steps."""
        return SlopeSamples._make((*(torch.cat(pair) for pair in zip(self[:4], more[:4], strict=True)), *more[4:]))


@dataclass(eq=False)
class LossSlopes:
    """The loss gy · box(x) near rows x. Steps and slopes are in units of the spread of every input."""

    sampler: GradientSampler
    x: Tensor  # [r, d] the rows
    context: tuple[Tensor, ...]  # [r, ...] each: what else the box is given
    gy: Tensor  # [r, d_out] the loss's gradient at the outputs, in float64
    scale: Tensor  # [d] how far each input may be moved, in float64
    limits: Limits  # no point outside is evaluated

    def __post_init__(self) -> None:
        self._rounding = OutputRounding(self.gy, self.x.shape[1])
        low, high = self.limits.like(self.x)
        room = torch.minimum(high - self.x, self.x - low).double()
        self.longest = (room / self.scale).clamp(max=1)  # [r, d]

    def rounding(self, steps: Tensor) -> Tensor:
        """Standard deviation [r, d, n] of the rounding of the loss, for steps [r, d, n]."""
        return self._rounding.deviation(steps / self.longest[..., None])

    def gradients(self, copies: int, generator: torch.Generator) -> Tensor:
        """What autograd gives, [copies, r, d]: see `GradientSampler.gradients`. Every copy is a row of its own."""
        x, gy, *context = (t.repeat(copies, *[1] * (t.ndim - 1)) for t in (self.x, self.gy, *self.context))
        g = self.sampler.gradients(x, tuple(context), gy, generator)
        return g.view(copies, *self.x.shape) * self.scale

    def losses(self, steps: Tensor) -> tuple[Tensor, Tensor]:
        """Move one input at a time up and down, by n steps [r, d, n].

        Returns:
            The moves as they were after rounding, and the losses there, [r, d, n, 2] each; NaN: no answer.
        """
        here, scale = self.x[..., None, None], self.scale[:, None, None]
        low, high = (limit[:, None, None] for limit in self.limits.like(self.x))  # which rounding might leave
        ends = (here + (torch.stack((steps, -steps), 3) * scale).to(here.dtype)).clamp(low, high)  # [r, d, n, 2]
        at_once, losses = max(1, self.sampler.rows_at_once // ends[:, 0].numel()), []
        for first in range(0, len(self.scale), at_once):
            inputs = slice(first, first + at_once)  # k of them
            values = ends[:, inputs].flatten(2).transpose(1, 2)
            y = self._outputs(one_input_moved(self.x, inputs, values))  # [r, k, n·2, d_out]
            y = y.view(*ends[:, inputs].shape, -1)
            self._rounding.observe(inputs, y)
            losses.append((y.double() * self.gy[:, None, None, None]).sum(4))
        return (ends.double() - here.double()) / scale, torch.cat(losses, 1)

    def base(self, copies: int) -> Tensor:
        """The loss at the rows themselves, so many times: [r, copies]."""
        return (self._outputs(self.x[:, None].expand(-1, copies, -1)).double() * self.gy[:, None]).sum(2)

    def _outputs(self, points: Tensor) -> Tensor:
        """At points [r, ..., d] near the rows: [r, ..., d_out]."""
        context = tuple(c.repeat_interleave(points[0, ..., 0].numel(), 0) for c in self.context)
        return self.sampler.outputs(points.flatten(0, -2), context).view(*points.shape[:-1], -1)

    def ladder(self) -> Tensor:
        """Steps [r, d, rungs], from the longest down to where rounding is all that is left."""
        powers = torch.arange(rungs(self.x.dtype), dtype=torch.float64, device=self.x.device)
        ulps = torch.finfo(self.x.dtype).eps * self.x.abs().double() / self.scale
        least = torch.minimum(SETTINGS.least_ulps * ulps, self.longest)[..., None]
        return torch.maximum(self.longest[..., None] * SETTINGS.factor**-powers, least)

    def best_steps(self, steps: Tensor, quotients: Tensor) -> Tensor:
        """The longest steps [r, d] to measure with, from difference quotients on the ladder, [r, d, rungs] each.

        Slopes extrapolated from neighbouring rungs agree best where neither the higher derivatives nor noise matter.
        Every row has a step of its own, since kinks and poles are near some rows and far from others; but the
        disagreement of most rows counts too, lest two noisy slopes that agree by chance are taken for good ones.
        """
        square = SETTINGS.factor**2
        slope = (square * quotients[..., 1:] - quotients[..., :-1]) / (square - 1)  # [r, d, rungs - 1]
        middle = steps[..., 1:-1]
        apart = slope.diff(dim=2).square() + (self.rounding(middle) / middle).square()  # [r, d, rungs - 2]
        usual = apart.nanmedian(0).values  # [d, rungs - 2]
        # Steps much longer than a wave give slopes that are all small, and of which none is like the other; steps
        # shorter than rounding give none.
        size = torch.where(slope == 0, math.nan, slope).square().nanmedian(0).values.nan_to_num(0)  # [d, rungs - 1]
        unlike = usual > torch.minimum(size[:, :-1], size[:, 1:])
        apart = apart + SETTINGS.usual_weight * usual
        useless = (unlike & ~unlike.all(1, keepdim=True)) | (middle <= steps[..., 2:]) | apart.isnan()
        rung = torch.where(useless, math.inf, apart).argmin(2, keepdim=True)  # [r, d, 1]
        return steps.gather(2, rung).squeeze(2)

    def measure(self, steps: Tensor, copies: int, generator: torch.Generator) -> SlopeSamples:
        """Measure slopes with steps of at most [r, d].

        With q the difference quotient, (4 q(t/2) - q(t)) / 3 is free of the error in t² (Richardson, 1911). A kink
        within the shortest step goes unnoticed by symmetric quotients, which all see the mean of its two sides. So the
        difference of the two slopes from x is looked at: what it has beyond a part in proportion to t.
        """
        base = self.base(copies)[:, None, :, None]  # [r, 1, copies, 1]
        drawn = torch.rand(*steps.shape, copies, 1, generator=generator, dtype=torch.float64).to(steps.device)
        t = steps[..., None, None] * (1 - SETTINGS.jitter * drawn) * steps.new_tensor((1, 1 / 2, 1 / 4))
        moves, losses = (part.view(*t.shape, 2) for part in self.losses(t.flatten(2)))
        q = (losses.diff(dim=4) / moves.diff(dim=4)).squeeze(4)  # [r, d, copies, 3]
        slope = (4 * q[..., 1:] - q[..., :-1]) / 3
        sides = (losses.sum(4) - 2 * base) / t
        kink = 2 * sides[..., 2] - sides[..., 1]
        parts = slope[..., 1], slope[..., 0] - slope[..., 1], kink, base[..., 0].expand_as(kink)
        slope, change, kink, loss = (part.permute(2, 0, 1) for part in parts)
        return SlopeSamples(slope, change, kink, loss, steps, self.rounding(steps[..., None]).squeeze(2))

    def cost(self, copies: int) -> int:
        """Evaluations that so many copies of a measurement take."""
        return copies * len(self.x) * (6 * self.x.shape[1] + 1)


def rungs(dtype: torch.dtype) -> int:
    """How many steps the ladder has: down to the square root of the rounding of x."""
    return 1 + round(-math.log(torch.finfo(dtype).eps) / 2 / math.log(SETTINGS.factor))
