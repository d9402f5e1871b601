"""Is this gradient right?"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bondgrad import _arguments as arguments
from bondgrad._function import in_eval_mode
from bondgrad.checking._diagnosis import percent, problems
from bondgrad.checking._judge import COPIES, GRADIENTS, Trial
from bondgrad.checking._slopes import Slopes, called, rungs

ROWS = 16  # of x that are looked at
INSIDE = 0.05  # of the range between limits: rows closer to them are moved away, to have room on both sides


@dataclass(frozen=True, eq=False)
class Check:
    """What `check` found. True as a bool if the gradient is right; print it to read it."""

    verdict: Literal["right", "wrong", "undecided"]
    factor: Tensor  # [d] the gradient in units of the slope, over rows: 1 where right; NaN: the slope was not seen
    standard_error: Tensor  # [d] of the factor
    error: Tensor  # [d] root mean square over rows, in units of that of the slope, noise taken off
    visible: Tensor  # [d] the least error that would certainly have been called wrong
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
        first = {
            "right": f"right: no input's gradient is off by more than {percent(float(self.visible.max()))}",
            "wrong": "wrong",
            "undecided": "undecided: there is too much noise to tell an error of "
            f"{percent(2 * self.tolerance)}; one of {percent(float(self.visible.max()))} would have been seen. "
            "Give a larger budget or tolerance",
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
    that is used is where neighbouring rungs agree best, and what is left of the error in t² is extrapolated away. Both
    slopes and gradients are measured several times, and the scatter says how far they can be trusted: noise of the box,
    roughness of its answers, or a gradient that is itself an estimate do no harm but that more measurements are
    needed, until all is decided or the budget spent.

    Wrong is an input whose gradient, over the rows, differs from the slope by certainly more than `tolerance`; right
    are all others, if twice the tolerance would have been seen. The chance of a false alarm is below one in a hundred.

    The layer is in eval mode meanwhile and left as it was, with torch's own random numbers. A BlackBox shows what it
    would do at its next step, so that one that has trained is judged with the steps it has learnt. (Give the layer, not
    a function around it, which would hide it.)

    Args:
        box: [N, d] -> [N, d_out], every row by itself, with a gradient: a BlackBox, a module, or a function that calls
            an autograd.Function.
        x: [N, d] typical rows, in float32 or float64. Their spread is the scale on which inputs are moved.
        context: Further inputs of the box, one entry per row.
        limits: (low, high): no point outside is evaluated. None: those of the BlackBox, if it has any.
        tolerance: Relative error of an input's gradient that still counts as right.
        budget: The most evaluations to spend.
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
    arguments.check_input(x, x.shape[-1] if isinstance(x, Tensor) else 0)
    if not bool(torch.isfinite(x).all()):
        raise ValueError("x must be finite: leave out rows with NaN or inf")
    if getattr(box, "memory", None) is not None:
        raise ValueError("check is for boxes without memory: this one remembers earlier calls")
    tolerance = arguments.positive_float("tolerance", tolerance)
    budget = arguments.positive_int("budget", budget)
    generator = torch.Generator("cpu").manual_seed(arguments.checked_seed(seed))
    bounds = getattr(box, "limits", None) if limits is None else arguments.Limits(limits, x.shape[1])
    devices = [x.device] if x.device.type == "cuda" else []
    with in_eval_mode(box), torch.random.fork_rng(devices):
        slopes = _scene(box, x.detach(), arguments.context_rows(context, x.shape[:1]), bounds, budget, generator)
        trial = Trial(slopes, tolerance, budget, generator)
        evidence = trial.run()
        wrong, seen = bool(evidence.wrong.any()), bool((evidence.visible <= 2 * tolerance).all())
        return Check(
            "wrong" if wrong else "right" if seen else "undecided",
            evidence.factor[:-1],
            evidence.standard_error[:-1],
            evidence.error,
            evidence.visible,
            trial.rate(),
            tolerance,
            slopes.evaluations,
            problems(evidence, tolerance),
        )


def _scene(
    box: Callable[..., Any],
    x: Tensor,
    context: tuple[Tensor, ...],
    bounds: arguments.Limits | None,
    budget: int,
    generator: torch.Generator,
) -> Slopes:
    """Choose rows of x [N, d], and gy such that every output has the same weight."""
    d = x.shape[1]
    gradient = 2 * d + 1 if hasattr(box, "_function") else 1
    each = 2 + 2 * rungs(x.dtype) * d + COPIES * (6 * d + 1) + GRADIENTS * gradient  # evaluations at a row, at least
    if budget < each:
        raise ValueError(f"budget must be at least {each} for {d} inputs, got {budget}")
    spread, size = x.double().std(0, correction=0), x.double().square().mean(0).sqrt()
    # Where all rows are the same, their size has to do, or one.
    alike = spread <= 1e3 * torch.finfo(x.dtype).eps * size
    scale = torch.where(alike, torch.where(size > 0, 0.1 * size, 1), spread)
    low, high = (None, None) if bounds is None else bounds.like(x)
    if low is not None and high is not None:
        margin = INSIDE * torch.minimum(high - low, scale.to(x.dtype))
        x = x.clamp(low + margin, high - margin)
    rows = torch.randperm(len(x), generator=generator)[: min(ROWS, budget // each)].to(x.device)
    with torch.no_grad():
        y = called(box, x[rows], tuple(c[rows] for c in context))
    asked = len(rows)
    answered = torch.isfinite(y).all(1)
    if not bool(answered.any()):
        raise ValueError("box must have finite answers at x: it has none at the rows that were tried")
    rows, y = rows[answered], y[answered].double()
    weight = y.std(0, correction=0)
    weight = torch.where(weight > 1e-6 * y.abs().amax(0), weight, y.abs().amax(0))
    gy = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.device)
    gy = gy / torch.where(weight > 0, weight, 1)
    slopes = Slopes(box, x[rows], tuple(c[rows] for c in context), gy, scale, low, high)
    slopes.evaluations += asked
    return slopes
