"""The function `check`, and what it returns."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bondgrad.calling._inputs import Limits, check_rows, context_rows
from bondgrad.checking._gradient_check import GradientCheck, least_cost
from bondgrad.checking._sampler import GradientSampler
from bondgrad.checking._settings import SETTINGS
from bondgrad.checking._slopes import LossSlopes
from bondgrad.checking._words import percent, problems, weak
from bondgrad.errors import checked_seed, positive_float, positive_int
from bondgrad.evaluators import Evaluator
from bondgrad.measuring._spread import Spread

Verdict = Literal["right", "wrong", "undecided"]


@dataclass(frozen=True, eq=False)
class Check:
    """What `check` found. True as a bool if the gradient is right; print it to read it.

    Example:
        >>> class Cube(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         ctx.save_for_backward(x)
        ...         return x**3
        ...
        ...     @staticmethod
        ...     def backward(ctx, gy):
        ...         (x,) = ctx.saved_tensors
        ...         return 2 * gy * x**2  # should be 3
        >>> x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        >>> found = check(Cube.apply, x)
        >>> found.verdict, found.problems
        ('wrong', ('all inputs: 33.3 % too small',))
        >>> bool(check(lambda x: x**3, x))
        True
    """

    verdict: Verdict
    factor: Tensor  # [d] the gradient in units of the slope, over rows: 1 where right; NaN: the slope was not seen
    standard_error: Tensor  # [d] of the factor
    error: Tensor  # [d] root mean square over rows, in units of that of the slope, noise taken off
    visible: Tensor  # [d] the least error that would certainly have been called wrong; where the slope was not seen, in
    # units of a hundredth of the typical one
    rate: Tensor  # [d] exponent of the step in L(x + t) - L(x) - g·t: 2 where right, 1 where not; NaN: lost in noise
    tolerance: float
    evaluations: int  # rows that the box, or the function inside a BlackBox, was asked about
    problems: tuple[str, ...]  # in words

    @property
    def right(self) -> bool:
        """Whether the verdict is "right"."""
        return self.verdict == "right"

    def __bool__(self) -> bool:
        return self.right

    def __str__(self) -> str:
        least, rates, seen = float(self.visible.max()), self.rate[~self.rate.isnan()], ~self.factor.isnan()
        text = f"one of {percent(least)}" if least < SETTINGS.huge_error else "hardly any"
        first = {
            "right": f"right: no input's gradient is off by more than {percent(least)}",
            "wrong": "wrong",
            "undecided": "undecided: there is too much noise to tell an error of "
            f"{percent(2 * self.tolerance)}; {text} would have been seen. Give a larger budget or tolerance",
        }[self.verdict]
        rate = rates.min() if self.verdict == "wrong" and len(rates) else rates.median()  # NaN, where there is none
        remainder = "noise at every step t" if rate.isnan() else f"t^{float(rate):.1f}"
        known = f"factors known to {percent(float(self.standard_error[seen].max()))}; " if bool(seen.any()) else ""
        last = f"remainder of Taylor's series ~ {remainder} (right: t^2, wrong: t^1); {known}"
        lines = (first, *self.problems, *weak(self.factor, self.visible), f"{last}{self.evaluations} evaluations")
        return "\n  ".join(lines)


def check(
    box: Callable[..., Any],
    x: Tensor,
    *context: Tensor,
    limits: tuple[Any, Any] | None = None,
    tolerance: float = 0.01,
    budget: int = 100_000,
    seed: int = 0,
    evaluator: Evaluator | None = None,
) -> Check:
    """Find out whether the gradient that autograd takes through a box is right: `bondgrad.checking` says how.

    The box is given copies, so that it may change its inputs. It is in eval mode meanwhile, and afterwards all is as it
    was: buffers, the random numbers of torch, numpy and Python, what a BlackBox has learnt and counted. A BlackBox
    shows what it would do at its next step, so that one that has trained is judged with the steps it has learnt. (Give
    the layer, not a function around it, which would hide it.)

    Args:
        box: [N, d] -> [N, d_out], every row by itself, with a gradient: a BlackBox, a module, or a function that calls
            an autograd.Function.
        x: [N, d] typical rows, in float32 or float64. Their spread is the scale on which inputs are moved.
        context: Further inputs of the box, one entry per row.
        limits: (low, high): no point outside is evaluated. None: those of the BlackBox, if it has any.
        tolerance: Relative error of an input's gradient that still counts as right.
        budget: The most evaluations to spend: rows that the box is asked about, or the function inside a BlackBox.
        seed: Of gy, of the choice of rows, and of the steps.
        evaluator: Where the box is evaluated at rows of which only outputs are asked for, in requests with the purpose
            "probe". None: `evaluators.Local()`. Gradients are always taken here, of no more than its `max_rows` rows at
            a time; a BlackBox evaluates its function with its own evaluator for both.
    """
    if not callable(box):
        raise TypeError(f"box must be callable, got {type(box).__name__}")
    check_rows(x)
    if x.dtype.itemsize < 4 or not bool(torch.isfinite(x).all()):
        raise ValueError(f"x must be finite and in float32 or float64, got {x.dtype}: leave out rows with NaN or inf")
    tolerance = positive_float("tolerance", tolerance)
    generator = torch.Generator("cpu").manual_seed(checked_seed(seed))
    bounds = getattr(box, "limits", None) if limits is None else Limits(limits, x.shape[1])
    bounds = bounds or Limits((-math.inf, math.inf), x.shape[1])
    sampler = GradientSampler(box, positive_int("budget", budget), evaluator)
    with sampler.without_trace():
        slopes = _typical_rows(sampler, x.detach(), context_rows(context, x.shape[:1]), bounds, generator)
        gradient_check = GradientCheck(slopes, tolerance, generator)
        evidence = gradient_check.run()
        verdict: Verdict = "right" if bool(evidence.enough.all()) else "undecided"
        verdict = "wrong" if bool(evidence.wrong.any()) else verdict
        found = evidence.factor[:-1], evidence.standard_error[:-1], evidence.error, evidence.visible
        rest = gradient_check.rate(), tolerance, sampler.evaluations, problems(evidence, tolerance, slopes.scale)
        return Check(verdict, *found, *rest)


def _typical_rows(
    sampler: GradientSampler, x: Tensor, context: tuple[Tensor, ...], limits: Limits, generator: torch.Generator
) -> LossSlopes:
    """Choose rows of x [N, d], and gy such that every output has the same weight.

    Gradients are looked at in many rows. Those where any is not finite are among the few that are chosen, so that it is
    seen whether the box has a slope there: where its domain ends, as that of a root, the gradient may be infinite.
    """
    start, d = sampler.gradient_cost(0), x.shape[1]  # policies may have to find a first step
    gradient = sampler.gradient_cost(1) - start
    each, look = least_cost(d, gradient, x.dtype), 2 + gradient  # to check a row, and to see what the box does there
    left = sampler.budget - start
    if left < each + look:
        raise ValueError(f"budget must be at least {each + look + start} for {d} inputs, got {sampler.budget}")
    scale = Spread.of(x.double()).typical
    low, high = limits.like(x)
    margin = SETTINGS.margin * torch.minimum(high - low, scale.to(x.dtype))
    x = x.clamp(low + margin, high - margin)
    count = min(SETTINGS.finite_rows, sampler.budget // SETTINGS.finite_part // look, (left - each) // look)
    rows = torch.randperm(len(x), generator=generator)[:count].to(x.device)
    y = sampler.outputs(x[rows], tuple(c[rows] for c in context)).double()
    answered = torch.isfinite(y).all(1)
    if not bool(answered.any()):
        raise ValueError("box must have finite answers at x: it has none at the rows that were tried")
    rows, y = rows[answered], y[answered]
    weight, size = y.std(0, correction=0), y.abs().amax(0)
    weight = torch.where(weight > 1e-6 * size, weight, size)
    gy = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.device)
    gy = gy / torch.where(weight > 0, weight, 1)
    slopes = LossSlopes(sampler, x[rows], tuple(c[rows] for c in context), gy, scale, limits)
    finite = ~slopes.gradients(1, generator)[0].isinf().any(1)
    chosen = torch.cat(((~finite).nonzero()[: SETTINGS.suspects], finite.nonzero())).squeeze(1)
    return slopes.at(chosen[: max(1, min(SETTINGS.rows, sampler.left // each))])
