"""Slopes of a loss along the inputs of a box, by symmetric differences with steps that are found automatically.

The settings of the whole check are here, too.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bondgrad.calling._inputs import Limits
from bondgrad.checking._levels import Levels
from bondgrad.checking._sampler import GradientSampler
from bondgrad.checking._stairs import OutputChanges, Staircase
from bondgrad.measuring._moves import one_input_moved
from bondgrad.measuring._rounding import OutputRounding


@dataclass(frozen=True)
class CheckSettings:
    """How many rows, steps and copies a check measures, and the thresholds of its decisions.

    The values were found on the boxes of `tests/checking` and with `benchmarks/check_power.py`.
    """

    # Rows of x.
    rows: int = 16  # rows at which slopes are measured
    finite_rows: int = 256  # rows at which it is tested whether the gradient is finite
    finite_part: int = 8  # the test of `finite_rows` may take one in so many evaluations of the budget
    suspects: int = 4  # most rows with a gradient that is not finite among those at which slopes are measured
    margin: float = 0.05  # part of the spread: rows closer to a limit are moved away from it, for room on both sides
    # Steps.
    factor: int = 4  # ratio of neighbouring steps of the ladder, and of steps that were too long to shorter ones
    least_ulps: int = 64  # steps have at least so many units of rounding of x, unless there is less room
    jitter: float = 0.3  # the part of a step that is drawn anew for every sample, so that roughness acts as noise
    usual_weight: float = 10.0  # weight of the median disagreement over rows, relative to that of the row itself
    # Copies, over which means are taken.
    copies: int = 4  # copies of every slope, to begin with
    gradients: int = 8  # copies of every gradient, to begin with; forward differences may scatter between two values
    minor: float = 1 / 8  # part of the variance up to which a contribution is not measured again
    # Evidence.
    noise_gain: float = 4.5  # standard deviation of a slope times its step, in units of that of the loss
    kink_gain: float = 16.0  # variance that rounding adds to a kink, in units of what it adds to a slope
    kink_z: float = 4.0  # standard deviations from which on a kink at a row is significant
    kinks_part: float = 0.01  # part of all entries that may seem to have a kink by chance
    weak: float = 0.01  # errors are relative to at least this part of the typical slope, unless an input's own is clear
    clear: float = 25.0  # a slope is clear if its square is more than so many times its variance
    safety: float = 4.0  # the error left by extrapolation is at most the change divided by this; in theory by 15
    scatter: float = 10.0  # slopes are aliased if their variance is more than so many times that due to noise,
    scatter_part: float = 0.1  # and the excess more than this part of their size
    rounding_margin: float = 30.0  # rounding is negligible if its variance is so many times below the tolerated square
    levels: float = 4.0  # rounding is random if drawn steps differ by more than so many of its levels
    right_part: float = 0.3  # part of the rows at which an input must be right for jumps to explain its error at others
    seen: float = 10.0  # the remainder of Taylor's series is significant from so many times the noise
    # Words.
    named_inputs: int = 8  # most inputs that are named one by one
    serious: float = 0.3  # relative error by jumps from which on steps should be so long that jumps average out
    huge_error: float = 10.0  # relative error from which on its size is not stated
    close: float = 0.2  # relative difference below which a gradient looks like another one


SETTINGS = CheckSettings()


class SlopeSamples(NamedTuple):
    """Repeated measurements of slopes along d inputs at r rows."""

    slope: Tensor  # [copies, r, d] Richardson's extrapolation from a half and a quarter of the step
    change: Tensor  # [copies, r, d] the extrapolation from the step and its half, less the slope
    kink: Tensor  # [copies, r, d] difference of the slopes to the two sides, less its part in proportion to the step
    loss: Tensor  # [copies, r, d] the loss at the row itself
    step: Tensor  # [r, d] the longest step that is used
    rounding: Tensor  # [r, d] standard deviation of the rounding of the loss

    def joined(self, more: "SlopeSamples") -> "SlopeSamples":
        """These samples and more samples that were measured with the same steps, as one record."""
        return SlopeSamples._make((*(torch.cat(pair) for pair in zip(self[:4], more[:4], strict=True)), *more[4:]))


@dataclass(eq=False)
class LossSlopes:
    """Measures the loss gy · box(x) near rows x. Steps and slopes are in units of the spread of every input."""

    sampler: GradientSampler
    x: Tensor  # [r, d] the rows
    context: tuple[Tensor, ...]  # [r, ...] each: further inputs of the box
    gy: Tensor  # [r, d_out] the loss's gradient at the outputs, in float64
    scale: Tensor  # [d] the unit of every input: the longest move, in float64
    limits: Limits  # no point outside is evaluated

    def __post_init__(self) -> None:
        self._rounding, self._levels = OutputRounding(self.gy, self.x.shape[1]), Levels()
        low, high = self.limits.like(self.x)
        room = torch.minimum(high - self.x, self.x - low).double()
        self.longest = (room / self.scale).clamp(max=1)  # [r, d] the longest step within the limits

    def rounding(self, steps: Tensor) -> Tensor:
        """Standard deviation [r, d, n] of the rounding of the loss, for steps [r, d, n]."""
        return self._rounding.deviation(steps / self.longest[..., None])

    def gradients(self, copies: int, generator: torch.Generator) -> Tensor:
        """Gradients [copies, r, d] by autograd: see `GradientSampler.gradients`. Every copy is a row of its own."""
        x, gy, *context = (t.repeat(copies, *[1] * (t.ndim - 1)) for t in (self.x, self.gy, *self.context))
        g = self.sampler.gradients(x, tuple(context), gy, generator)
        return g.view(copies, *self.x.shape) * self.scale

    def staircase(self, changes: OutputChanges) -> Staircase | None:
        """Which outputs are piecewise constant, by their changes over the ladder and all that is known by now."""
        return changes.staircase(self._rounding.of_outputs().median(0).values, self._levels)

    def losses(self, steps: Tensor, changes: OutputChanges | None = None) -> tuple[Tensor, Tensor]:
        """Move one input at a time up and down, by n steps [r, d, n].

        Args:
            steps: The steps, in units of the spread.
            changes: Takes in the outputs.

        Returns:
            The moves as they were set, after rounding, and the losses at their ends, [r, d, n, 2] each; NaN: an output
            is not finite.
        """
        here, scale = self.x[..., None, None], self.scale[:, None, None]
        ends = here + (torch.stack((steps, -steps), 3) * scale).to(here.dtype)  # [r, d, n, 2]
        ends = self.limits.clamped(ends.movedim(1, 3)).movedim(3, 1)  # rounding may cross them
        moves = (ends.double() - here.double()) / scale
        at_once, losses = max(1, self.sampler.rows_at_once // ends[:, 0].numel()), []
        for first in range(0, len(self.scale), at_once):
            inputs = slice(first, first + at_once)  # k inputs
            values = ends[:, inputs].flatten(2).transpose(1, 2)
            y = self._outputs(one_input_moved(self.x, inputs, values))  # [r, k, n·2, d_out]
            y = y.view(*ends[:, inputs].shape, -1)
            self._rounding.observe(inputs, y)
            self._levels.observe(y)
            if changes is not None:
                changes.observe(moves[:, inputs, :, 0], y)
            losses.append((y.double() * self.gy[:, None, None, None]).sum(4))
        return moves, torch.cat(losses, 1)

    def losses_at(self, rows: Tensor, inputs: Tensor, moves: Tensor) -> Tensor:
        """The loss [m, k] at rows [m] of x, in each of which one of inputs [m] is moved by moves [m, k]."""
        values = self.x[rows, inputs][:, None] + (moves * self.scale[inputs][:, None]).to(self.x.dtype)
        points = one_input_moved(self.x[rows], inputs[:, None], values[..., None]).squeeze(1)  # [m, k, d]
        y = self._outputs(self.limits.clamped(points), rows)
        return (y.double() * self.gy[rows][:, None]).sum(2)

    def outputs(self, copies: int) -> Tensor:
        """The outputs [r, copies, d_out] at the rows themselves, evaluated once for every copy."""
        return self._outputs(self.x[:, None].expand(-1, copies, -1))

    def base(self, y: Tensor) -> Tensor:
        """The loss [r, copies] of outputs y [r, copies, d_out] at the rows."""
        return (y.double() * self.gy[:, None]).sum(2)

    def _outputs(self, points: Tensor, rows: Tensor | None = None) -> Tensor:
        """Outputs [r, ..., d_out] at points [r, ..., d] near all rows, or near rows [r]."""
        near = self.context if rows is None else tuple(c[rows.to(c.device)] for c in self.context)
        context = tuple(c.repeat_interleave(points[0, ..., 0].numel(), 0) for c in near)
        return self.sampler.outputs(points.flatten(0, -2), context).view(*points.shape[:-1], -1)

    def ladder(self) -> Tensor:
        """Steps [r, d, rungs], from the longest down to the shortest that rounding of x allows."""
        powers = torch.arange(rungs(self.x.dtype), dtype=torch.float64, device=self.x.device)
        ulps = torch.finfo(self.x.dtype).eps * self.x.abs().double() / self.scale
        least = torch.minimum(SETTINGS.least_ulps * ulps, self.longest)[..., None]
        return torch.maximum(self.longest[..., None] * SETTINGS.factor**-powers, least)

    def best_steps(self, steps: Tensor, quotients: Tensor) -> Tensor:
        """The longest steps [r, d] to measure with, from difference quotients on the ladder, [r, d, rungs] each.

        Slopes extrapolated from neighbouring rungs agree best where neither the higher derivatives nor noise matter.
        Every row has a step of its own, since kinks and poles are near some rows and far from others. The median
        disagreement over rows is added to that of the row, so that two noisy slopes which agree by chance do not win.
        """
        square = SETTINGS.factor**2
        slope = (square * quotients[..., 1:] - quotients[..., :-1]) / (square - 1)  # [r, d, rungs - 1]
        middle = steps[..., 1:-1]
        apart = slope.diff(dim=2).square() + (self.rounding(middle) / middle).square()  # [r, d, rungs - 2]
        usual = apart.nanmedian(0).values  # [d, rungs - 2]
        # Steps much longer than a wave give slopes that are small and differ from one another by more than their size;
        # steps shorter than rounding give slopes of zero.
        size = torch.where(slope == 0, math.nan, slope).square().nanmedian(0).values.nan_to_num(0)  # [d, rungs - 1]
        unlike = usual > torch.minimum(size[:, :-1], size[:, 1:])
        apart = apart + SETTINGS.usual_weight * usual
        useless = (unlike & ~unlike.all(1, keepdim=True)) | (middle <= steps[..., 2:]) | apart.isnan()
        rung = torch.where(useless, math.inf, apart).argmin(2, keepdim=True)  # [r, d, 1]
        return steps.gather(2, rung).squeeze(2)

    def measure(self, steps: Tensor, copies: int, generator: torch.Generator) -> SlopeSamples:
        """Measure slopes with steps of at most [r, d].

        With q the difference quotient, (4 q(t/2) - q(t)) / 3 is free of the error in t² (Richardson, 1911). A kink
        within the shortest step does not show in symmetric quotients, which all give the mean of its two sides. So
        `kink` is the difference of the slopes from x to the two sides, less its part in proportion to t.
        """
        base = self.base(self.outputs(copies))[:, None, :, None]  # [r, 1, copies, 1]
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
        """The number of evaluations that a measurement with so many copies takes."""
        return copies * len(self.x) * (6 * self.x.shape[1] + 1) * self.sampler.output_cost


def rungs(dtype: torch.dtype) -> int:
    """The number of steps in the ladder, which ends at the square root of the rounding of x."""
    return 1 + round(-math.log(torch.finfo(dtype).eps) / 2 / math.log(SETTINGS.factor))
