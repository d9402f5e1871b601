"""Is this gradient right?"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bondgrad.calling._inputs import check_input, context_rows
from bondgrad.calling._limits import Limits
from bondgrad.checking._asker import Asker
from bondgrad.checking._diagnosis import HUGE, percent, problems, weak
from bondgrad.checking._finite import not_finite
from bondgrad.checking._slopes import Slopes, rungs
from bondgrad.checking._trial import COPIES, GRADIENTS, Trial
from bondgrad.errors import checked_seed, positive_float, positive_int

ROWS = 16  # of x at which slopes are measured
MANY = 256  # rows at which the gradient is at least to be finite
LITTLE = 8  # times as large as what that costs is the budget
INSIDE = 0.05  # of the range between limits: rows closer to them are moved away, to have room on both sides


@dataclass(frozen=True, eq=False)
class Check:
    """What `check` found. True as a bool if the gradient is right; print it to read it."""

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
        least = float(self.visible.max())
        seen = f"one of {percent(least)} would have been seen" if least < HUGE else "hardly any would have been seen"
        first = {
            "right": f"right: no input's gradient is off by more than {percent(least)}",
            "wrong": "wrong",
            "undecided": "undecided: there is too much noise to tell an error of "
            f"{percent(2 * self.tolerance)}; {seen}. Give a larger budget or tolerance",
        }[self.verdict]
        rates = self.rate[~self.rate.isnan()]
        remainder = "noise at every step t"
        if len(rates):
            remainder = f"t^{float(rates.min() if self.verdict == 'wrong' else rates.median()):.1f}"
        worst = float(self.standard_error[~self.factor.isnan()].max()) if bool((~self.factor.isnan()).any()) else 0.0
        known = f"factors known to {percent(worst)}; " if worst else ""
        return "\n".join(
            (
                first,
                *(f"  {problem}" for problem in self.problems),
                *(f"  {words}" for words in weak(self.factor, self.visible)),
                f"  remainder of Taylor's series ~ {remainder} (right: t^2, wrong: t^1); "
                f"{known}{self.evaluations} evaluations",
            )
        )


def check(
    box: Callable[..., Any],
    x: Tensor,
    *context: Tensor,
    limits: tuple[Any, Any] | None = None,
    tolerance: float = 0.01,
    budget: int = 100_000,
    seed: int = 0,
) -> Check:
    """Find out whether the gradient that autograd takes through a box is right.

    The loss is L(x) = gy · box(x), with a random gy. Along every input and at up to sixteen rows of x, its slope is
    measured by symmetric differences, over a ladder of steps that leads from the spread of x down to rounding; the step
    that is used is, at every row, where neighbouring rungs agree best, and what is left of the error in t² is
    extrapolated away. Both slopes and gradients are measured several times, and the scatter says how far they can be
    trusted: noise of the box, roughness of its answers, or a gradient that is itself an estimate do no harm but that
    more measurements are needed, until all is decided or the budget spent.

    Wrong is an input whose gradient, over the rows, differs from the slope by certainly more than `tolerance`, and does
    so again when it is measured once more with shorter steps; rows near kinks and poles, where the slope depends on the
    step, are left out. Wrong is also a gradient that is not finite where the box is, at any of up to 256 rows. Right
    are all others, if twice the tolerance would have been seen. The chance of a false alarm is below one in a hundred.

    An input is judged by its own slope, however weak, if that is seen. If it is not, an error counts in units of a
    hundredth of the typical slope; `factor` is NaN then, and the words say so.

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
    if not callable(box):
        raise TypeError(f"box must be callable, got {type(box).__name__}")
    if isinstance(x, Tensor) and (x.ndim != 2 or x.dtype.itemsize < 4):
        raise ValueError(f"x must be rows [N, d] in float32 or float64, got {list(x.shape)} of {x.dtype}")
    check_input(x, x.shape[-1] if isinstance(x, Tensor) else 0)
    if not bool(torch.isfinite(x).all()):
        raise ValueError("x must be finite: leave out rows with NaN or inf")
    tolerance = positive_float("tolerance", tolerance)
    budget = positive_int("budget", budget)
    generator = torch.Generator("cpu").manual_seed(checked_seed(seed))
    bounds = getattr(box, "limits", None) if limits is None else Limits(limits, x.shape[1])
    asker = Asker(box, budget)
    with asker.no_trace():
        slopes, missing = _scene(asker, x.detach(), context_rows(context, x.shape[:1]), bounds, generator)
        trial = Trial(slopes, tolerance, generator)
        evidence = trial.run().also_missing(missing)
        wrong, seen = bool(evidence.wrong.any()), bool(evidence.enough.all())
        return Check(
            "wrong" if wrong else "right" if seen else "undecided",
            evidence.factor[:-1],
            evidence.standard_error[:-1],
            evidence.error,
            evidence.visible,
            trial.rate(),
            tolerance,
            asker.evaluations,
            problems(evidence, tolerance),
        )


def _scene(
    asker: Asker,
    x: Tensor,
    context: tuple[Tensor, ...],
    bounds: Limits | None,
    generator: torch.Generator,
) -> tuple[Slopes, Tensor]:
    """Choose rows of x [N, d], and gy such that every output has the same weight.

    Returns:
        The loss at few rows, to be measured, and bool [d]: whose gradient at any of many rows is not finite.
    """
    d = x.shape[1]
    # Evaluations at a row, at least: for slopes and gradients, and to look once at what the box does there.
    each = 2 * rungs(x.dtype) * d + COPIES * (6 * d + 1) + GRADIENTS * asker.gradient_cost + 1
    look = 2 + asker.gradient_cost
    least = each + look + asker.beginning_cost
    if asker.budget < least:
        raise ValueError(f"budget must be at least {least} for {d} inputs, got {asker.budget}")
    spread, size = x.double().std(0, correction=0), x.double().square().mean(0).sqrt()
    # Where all rows are the same, their size has to do, or one.
    alike = spread <= 1e3 * torch.finfo(x.dtype).eps * size
    scale = torch.where(alike, torch.where(size > 0, 0.1 * size, 1), spread)
    low, high = (None, None) if bounds is None else bounds.like(x)
    if low is not None and high is not None:
        margin = INSIDE * torch.minimum(high - low, scale.to(x.dtype))
        x = x.clamp(low + margin, high - margin)
    few = min(ROWS, (asker.budget - asker.beginning_cost) // (each + look))
    many = min(MANY, asker.budget // LITTLE // look, (asker.budget - asker.beginning_cost - each) // look)
    rows = torch.randperm(len(x), generator=generator)[: max(1, few, many)].to(x.device)
    x, context = x[rows], tuple(c[rows] for c in context)
    y = asker.answers(x, context)
    answered = torch.isfinite(y).all(1)
    if not bool(answered.any()):
        raise ValueError("box must have finite answers at x: it has none at the rows that were tried")
    x, y, context = x[answered], y[answered].double(), tuple(c[answered] for c in context)
    weight = y.std(0, correction=0)
    weight = torch.where(weight > 1e-6 * y.abs().amax(0), weight, y.abs().amax(0))
    gy = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.device)
    gy = gy / torch.where(weight > 0, weight, 1)
    wide = Slopes(asker, x, context, gy, scale, low, high)
    missing = not_finite(wide, each, generator)
    few = max(1, min(ROWS, asker.left // each))
    return wide.at(torch.arange(few, device=x.device)[: len(x)]), missing
