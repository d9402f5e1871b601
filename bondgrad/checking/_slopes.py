"""Slopes of a function along its inputs, by differences whose step nobody has to choose."""

import math

import torch
from torch import Tensor

from bondgrad.checking._asker import Asker, portions
from bondgrad.checking._grain import Grain

AT_ONCE = 8192  # rows in one call
FACTOR = 4  # between the steps of the ladder
JITTER = 0.3  # of a step is drawn at random
NOISY = 10  # times what is usual, squared: a difference of slopes that is not due to noise
UNLIKE = 1.0  # of a slope: a difference from which neither is believed
SHORTEST = 1 / 4  # of the longest step, in one measurement


class Slopes:
    """The loss gy · box(x), near rows x: its values, its slopes and the gradient that autograd gives.

    Args:
        asker: The box.
        x: [r, d] the rows.
        context: [r, ...] each: what else the box is given.
        gy: [r, d_out] the loss's gradient at the outputs, float64.
        scale: [d] how far each input may be moved.
        low: [d] No point below is asked for; None: no limit.
        high: [d]
    """

    def __init__(
        self,
        asker: Asker,
        x: Tensor,
        context: tuple[Tensor, ...],
        gy: Tensor,
        scale: Tensor,
        low: Tensor | None,
        high: Tensor | None,
    ) -> None:
        self.asker, self.x, self.context, self.gy, self.low, self.high = asker, x, context, gy, low, high
        room = x.new_full(x.shape, math.inf)
        if low is not None and high is not None:
            room = torch.minimum(high - x, x - low)
        self.longest = torch.minimum(room, scale.to(x.dtype)).double()  # [r, d] step
        self._scale, self._grain = scale, Grain(gy, x.shape[1])

    def at(self, rows: Tensor) -> "Slopes":
        """The same at some of the rows, by their numbers."""
        context = tuple(c[rows] for c in self.context)
        return Slopes(self.asker, self.x[rows], context, self.gy[rows], self._scale, self.low, self.high)

    def rounding(self, t: Tensor, inputs: Tensor | slice = slice(None)) -> Tensor:
        """Standard deviation [r, k, ...] of what rounding does to the loss, for steps t [r, k, ...].

        An output that the longest step of the ladder has not moved may have a slope that is hidden by rounding, but
        then it is so small that shorter steps make nothing of it.
        """
        near, far, longest = (part[:, inputs] for part in (*self._grain.rounding(), self.longest))  # [r, k] each
        more = [1] * (t.ndim - 2)
        near, far, longest = (part.view(*part.shape, *more) for part in (near, far, longest))
        return torch.hypot(near.expand_as(t), far * t / longest)

    def loss(self, points: Tensor) -> Tensor:
        """Of points [r, n, d]: [r, n] in float64, NaN where the box has no answer."""
        return self._weighed(self._answers(points))

    def _answers(self, points: Tensor) -> Tensor:
        """The outputs [r, n, d_out] at points [r, n, d], NaN where they are not finite."""
        r, n, d = points.shape
        context = tuple(c.repeat_interleave(n, 0) for c in self.context)
        y = self.asker.answers(points.reshape(r * n, d), context).view(r, n, -1)
        y = torch.where(torch.isfinite(y), y, math.nan)
        self._grain.look(y)
        return y

    def _weighed(self, y: Tensor) -> Tensor:
        """Outputs [r, n, d_out] as losses [r, n]."""
        return (y.double() * self.gy[:, None]).sum(2)

    def quotients(self, t: Tensor, inputs: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Symmetric differences with steps t [r, k, n] in each input by itself; or in some, by their numbers [k].

        Returns:
            [r, k, n] each: the quotients, the loss on either side, and the step up as it was after rounding.
        """
        x, (r, k, n) = self.x, t.shape
        inputs = torch.arange(k, device=x.device) if inputs is None else inputs
        here = x[:, inputs, None]
        up, down = (here + sign * t.to(x.dtype) for sign in (1, -1))
        if self.low is not None and self.high is not None:  # rounding may have left them
            low, high = self.low[inputs, None], self.high[inputs, None]
            up, down = (torch.clamp(p, low, high) for p in (up, down))
        losses = []
        first = 0
        for count in portions(k, AT_ONCE // (2 * r * n)):
            part = slice(first, first + count)
            moved = x[:, None, None, None].repeat(1, count, n, 2, 1)  # [r, count, n, 2, d]
            for side, end in enumerate((up, down)):
                which = torch.arange(count, device=x.device)
                moved[:, which, :, side, inputs[part]] = end[:, part].transpose(0, 1)
            y = self._answers(moved.flatten(1, 3))
            losses.append(self._weighed(y).view(r, count, n, 2))
            above, below = y.view(r, count, n, 2, -1).unbind(3)
            self._grain.moved(inputs[part], (above != below).any(2))
            first += count
        loss = torch.cat(losses, 1)
        width = up.double() - down.double()
        above, below = loss.unbind(3)
        return (above - below) / width, above, below, up.double() - here.double()

    def gradients(self, copies: int, generator: torch.Generator) -> Tensor:
        """What autograd gives, [copies, r, d]. Every copy is a row of its own, with its own noise and random steps.

        NaN where the box has no answer; infinite where it has one, and the gradient is not finite.
        """
        r, d = self.x.shape
        result = []
        for some in portions(copies, AT_ONCE // (r * self.asker.gradient_cost)):
            x, gy = self.x.repeat(some, 1), self.gy.repeat(some, 1)
            context = tuple(c.repeat(some, *[1] * (c.ndim - 1)) for c in self.context)
            g, answered = self.asker.gradient(x, context, gy, generator)
            g = torch.where(answered[:, None], torch.where(torch.isfinite(g), g, math.inf), math.nan)
            result.append(g.view(some, r, d))
        return torch.cat(result)

    def ladder(self) -> Tensor:
        """Steps [r, d, rungs], from the longest down to where rounding is all that is left."""
        eps = torch.finfo(self.x.dtype).eps
        powers = torch.arange(rungs(self.x.dtype), dtype=torch.float64, device=self.x.device)
        t = self.longest[:, :, None] * FACTOR**-powers
        least = 64 * eps * self.x.abs().double()[:, :, None]  # a step below is mostly rounding itself
        return torch.maximum(t, torch.minimum(least, self.longest[:, :, None]))

    def choose(self, t: Tensor, q: Tensor) -> Tensor:
        """The longest steps [r, d] to measure with, from quotients q [r, d, rungs] for steps t.

        Quotients extrapolated from neighbouring rungs to step zero agree best where neither the bending of the function
        nor noise has much to say. Every row has its own rung, since kinks, poles and outputs that span decades are near
        some rows and far from others; but by how much most rows disagree counts too, lest a rung with much noise is
        taken that agrees by chance.
        """
        line = (FACTOR**2 * q[..., 1:] - q[..., :-1]) / (FACTOR**2 - 1)  # [r, d, rungs - 1]
        floor = self.rounding(t[..., 1:-1]) / t[..., 1:-1]
        apart = line.diff(dim=2).square() + floor.square()  # [r, d, rungs - 2]
        most = apart.nanmedian(0).values  # [d, rungs - 2]
        # Steps much longer than a wave, or across a pole, give slopes that are all small, and of which none is like the
        # other; steps shorter than rounding give none.
        size = torch.where(line == 0, math.nan, line).square()
        typical = size.nanmedian(0).values.nan_to_num(0)  # [d, rungs - 1]
        unlike = most > UNLIKE**2 * torch.minimum(typical[:, :-1], typical[:, 1:])
        unlike = unlike | ((apart > NOISY * most) & (apart > UNLIKE**2 * torch.minimum(size[..., :-1], size[..., 1:])))
        apart = torch.where(unlike & ~unlike.all(2, keepdim=True), math.inf, apart + NOISY * most)
        # Rungs on which the least step was taken again tell nothing; nor do those without answers.
        repeated = t[..., 1:-1] <= t[..., 2:]
        rung = torch.where(repeated | apart.isnan(), math.inf, apart).argmin(2)  # [r, d]
        # Of a row without an answer there, the first rung below which all have one.
        broken = torch.isnan(q).long() * (1 + torch.arange(q.shape[2], device=q.device))
        first = broken.amax(2).clamp(max=q.shape[2] - 1)
        return t.gather(2, torch.maximum(rung, first)[..., None]).squeeze(2)

    def measure(self, longest: Tensor, copies: int, generator: torch.Generator, inputs: Tensor | None = None) -> Tensor:
        """Slopes, by how much they differ from those of twice the step, kinks, and the loss: [4, copies, r, k].

        The steps are [r, k], and those of all inputs, or of some, by their numbers [k].

        With q the quotient, (4 q(t/2) - q(t)) / 3 is free of the error in t². The steps are drawn anew for every copy,
        so that what is rough in the function without being random differs between copies as noise does.

        A kink within the shortest step goes unnoticed by symmetric quotients, which all see the mean of its two sides.
        So the difference of the two slopes from x is looked at: what it has beyond a part in proportion to t.
        """
        r, k = longest.shape
        result = []
        for some in portions(copies, AT_ONCE // (6 * r)):
            base = self.loss(self.x[:, None].expand(-1, some, -1))[:, None, :, None]  # [r, 1, copies, 1]
            drawn = torch.rand(r, k, some, 1, generator=generator, dtype=torch.float64).to(longest.device)
            t = longest[..., None, None] * (1 - JITTER * drawn)
            t = t * t.new_tensor((1, 1 / 2, SHORTEST))
            q, above, below, _ = (part.view(t.shape) for part in self.quotients(t.flatten(2), inputs))
            line = (4 * q[..., 1:] - q[..., :-1]) / 3
            sides = (above + below - 2 * base) / t
            parts = (
                line[..., 1],
                line[..., 0] - line[..., 1],
                2 * sides[..., 2] - sides[..., 1],
                base[..., 0].expand(r, k, some),
            )
            result.append(torch.stack(parts).permute(0, 3, 1, 2))
        return torch.cat(result, 1)

    def measure_cost(self, inputs: int) -> int:
        """Evaluations that one copy of that takes, of so many inputs."""
        return len(self.x) * (6 * inputs + 1)


def rungs(dtype: torch.dtype) -> int:
    """Of the ladder: down to the square root of the rounding."""
    return 1 + round(-math.log(torch.finfo(dtype).eps) / 2 / math.log(FACTOR))
