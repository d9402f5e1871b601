"""The function `check`, and what it returns."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bondgrad.calling._inputs import check_rows, context_rows
from bondgrad.calling._limits import Limits
from bondgrad.checking._gradient_check import GradientCheck, least_cost
from bondgrad.checking._sampler import GradientSampler
from bondgrad.checking._slopes import LossSlopes
from bondgrad.checking._words import HUGE_ERROR, percent, problems, weak
from bondgrad.errors import checked_seed, positive_float, positive_int
from bondgrad.evaluators import Evaluator
from bondgrad.measuring._spread import Spread


@dataclass(frozen=True)
class RowSettings:
    """At which rows a gradient is looked at."""

    rows: int = (
        16  # of x at which slopes are measured, as many as the power of `benchmarks/check_power.py` was found with
    )
    finite_rows: int = 256  # at which the gradient is at least to be finite
    finite_part: int = 8  # that may cost one evaluation in so many of the budget
    suspects: int = 4  # rows without a finite gradient near which it is made sure that the box has outputs
    margin: float = 0.05  # of the spread: rows closer to a limit are moved away from it, to have room on both sides


SETTINGS = RowSettings()


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

    verdict: Literal["right", "wrong", "undecided"]
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
        text = f"one of {percent(least)}" if least < HUGE_ERROR else "hardly any"
        first = {
            "right": f"right: no input's gradient is off by more than {percent(least)}",
            "wrong": "wrong",
            "undecided": "undecided: there is too much noise to tell an error of "
            f"{percent(2 * self.tolerance)}; {text} would have been seen. Give a larger budget or tolerance",
        }[self.verdict]
        remainder = "noise at every step t"
        if len(rates):
            remainder = f"t^{float(rates.min() if self.verdict == 'wrong' else rates.median()):.1f}"
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
        slopes, missing = _typical_rows(sampler, x.detach(), context_rows(context, x.shape[:1]), bounds, generator)
        gradient_check = GradientCheck(slopes, tolerance, generator)
        evidence = gradient_check.run().also_missing(missing)
        found = evidence.factor[:-1], evidence.standard_error[:-1], evidence.error, evidence.visible
        rest = gradient_check.rate(), tolerance, sampler.evaluations, problems(evidence, tolerance, slopes.scale)
        return Check(evidence.verdict, *found, *rest)


def _typical_rows(
    sampler: GradientSampler,
    x: Tensor,
    context: tuple[Tensor, ...],
    limits: Limits,
    generator: torch.Generator,
) -> tuple[LossSlopes, Tensor]:
    """Choose rows of x [N, d], and gy such that every output has the same weight.

    Returns:
        The loss at few rows, to be measured, and bool [d]: whose gradient at any of many rows is not finite.
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
    x, context = x[rows], tuple(c[rows] for c in context)
    y = sampler.outputs(x, context).double()
    answered = torch.isfinite(y).all(1)
    if not bool(answered.any()):
        raise ValueError("box must have finite answers at x: it has none at the rows that were tried")
    x, y, context = x[answered], y[answered], tuple(c[answered] for c in context)
    weight, size = y.std(0, correction=0), y.abs().amax(0)
    weight = torch.where(weight > 1e-6 * size, weight, size)
    gy = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.device)
    slopes = LossSlopes(sampler, x, context, gy / torch.where(weight > 0, weight, 1), scale, limits)
    missing = _not_finite(slopes, each, generator)
    return slopes.at(slice(max(1, min(SETTINGS.rows, sampler.left // each)))), missing


def _not_finite(slopes: LossSlopes, reserve: int, generator: torch.Generator) -> Tensor:
    """Which inputs, bool [d], have a gradient at any row that is not finite where the box is.

    The box has to be so on both sides of the row: where its domain ends, as that of a root, the slope may be infinite.
    So many evaluations as `reserve` says are left over.
    """
    bad = slopes.gradients(1, generator)[0].isinf()  # [r, d]
    affordable = max(0, slopes.sampler.left - reserve) // (2 * bad.shape[1])
    rows = bad.any(1).nonzero().squeeze(1)[: min(SETTINGS.suspects, affordable)]
    if len(rows) == 0:
        return torch.zeros_like(bad[0])
    there = slopes.at(rows)
    losses = there.losses(there.ladder()[..., -1:])[1]  # [suspects, d, 1, 2]
    return (bad[rows] & torch.isfinite(losses).all(3).squeeze(2)).any(0)
