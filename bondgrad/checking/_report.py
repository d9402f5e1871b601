"""The result of a check, and sentences on what is wrong with a gradient."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bondgrad.checking._evidence import Entries, Evidence
from bondgrad.checking._slopes import SETTINGS

Verdict = Literal["right", "wrong", "undecided"]


@dataclass(frozen=True, eq=False)
class Check:
    """The result of `check`. As a bool it is True if the gradient is right; print it for a summary.

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
        >>> found = bondgrad.check(Cube.apply, x)
        >>> found.verdict, found.problems
        ('wrong', ('all inputs: 33.3 % too small',))
        >>> bool(bondgrad.check(lambda x: x**3, x))
        True
    """

    verdict: Verdict
    factor: Tensor  # [d] the gradient in units of the slope, over rows: 1 where right; NaN: no slope above the noise
    standard_error: Tensor  # [d] standard error of the factor
    error: Tensor  # [d] root mean square error over rows, in units of that of the slope, with noise subtracted
    visible: Tensor  # [d] the least relative error that would certainly have been called wrong; where no slope is above
    # the noise, in units of a hundredth of the typical slope
    rate: Tensor  # [d] exponent of the step in L(x + t) - L(x) - g·t: 2 where right, 1 where not; NaN: lost in noise
    tolerance: float  # relative error of an input's gradient that counts as right
    evaluations: int  # rows evaluated by the box, or by the function inside a BlackBox
    problems: tuple[str, ...]  # a sentence on each wrong input, or on all together

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


def problems(evidence: Evidence, tolerance: float, scale: Tensor) -> tuple[str, ...]:
    """A sentence for each input that is wrong, or one for all; scale [d] is the unit of every input."""
    if not bool(evidence.wrong.any()):
        return ()
    if _one_factor(evidence, tolerance):
        return (f"all inputs: {_factor(evidence, -1)}",)
    wrong = evidence.wrong[:-1].nonzero().flatten().tolist()
    if not wrong:
        return (f"no input by itself, but all together: {_factor(evidence, -1)}",)
    partners = _swapped(evidence.entries, wrong, scale)
    found = [
        f"inputs {i} and {partners[i]} look swapped" if i in partners else f"input {i}: {_input(evidence, i)}"
        for i in wrong
        if i < partners.get(i, math.inf)
    ]
    rest = len(found) - SETTINGS.named_inputs
    return (*found[: SETTINGS.named_inputs], f"and {rest} more inputs") if rest > 0 else tuple(found)


def weak(factor: Tensor, visible: Tensor) -> tuple[str, ...]:
    """A sentence on inputs without a slope above the noise: their factor [d] is NaN, and visible [d] in other units."""
    unseen = (factor.isnan() & visible.isfinite()).nonzero().flatten().tolist()
    if not unseen:
        return ()
    which = ", ".join(map(str, unseen[: SETTINGS.named_inputs]))
    which += " and others" if len(unseen) > SETTINGS.named_inputs else ""
    least = percent(SETTINGS.weak * float(visible[unseen].max()))
    return (f"too weak to be seen by themselves: inputs {which}; an error of {least} of the typical slope would be",)


def percent(fraction: float) -> str:
    """A fraction in percent, with one decimal, or as a power of ten below 0.1 %."""
    return f"{100 * fraction:.1f} %" if fraction >= 1e-3 or fraction == 0 else f"{100 * fraction:.0e} %"


def _one_factor(evidence: Evidence, tolerance: float) -> bool:
    """Whether one factor explains the errors of all of several inputs."""
    factor, error = evidence.factor, evidence.standard_error
    apart = (factor[:-1] - factor[-1]).abs() > tolerance + 4 * error[:-1]  # false for NaN
    alike = _explained(evidence, -1) & ~apart & ~evidence.missing
    return len(alike) > 1 and bool(evidence.wrong[-1]) and bool(alike.all())


def _explained(evidence: Evidence, i: int) -> Tensor:
    """[d] bool: where the errors that no factor explains are small beside the error of the factor of input i."""
    off = (evidence.factor[i] - 1).abs()
    return evidence.unexplained <= torch.maximum(evidence.visible, SETTINGS.close * off)  # false for NaN


def _swapped(entries: Entries, wrong: list[int], scale: Tensor) -> dict[int, int]:
    """For inputs that look swapped, the partner: the gradient of each is like the slope of the other, and no third."""
    g, s, known = (t[:, wrong] for t in (entries.g / scale, entries.s / scale, entries.known.double()))  # [r, n]
    size = known.T @ s.square()  # [n, n] squared norm of the slope of j, over the rows at which i is known too
    apart = g.square().T @ known - 2 * g.T @ s + size  # [n, n] squared distance of the gradient of i from that slope
    like = (apart < SETTINGS.close**2 * size) & (known.T @ known > 2)
    pairs = (like & like.T).fill_diagonal_(False)
    return {i: wrong[int(row.nonzero())] for i, row in zip(wrong, pairs, strict=True) if int(row.sum()) == 1}


def _input(evidence: Evidence, i: int) -> str:
    """A phrase that says what is wrong with the gradient of input i."""
    if evidence.missing[i]:
        return "not finite where the box is"
    if not bool((evidence.entries.g[:, i] != 0).any()):
        return "zero, but the box depends on it"
    if _explained(evidence, i)[i]:
        return _factor(evidence, i)
    error = float(evidence.error[i])
    size = f"{percent(error)} of its size" if error < SETTINGS.huge_error else "many times its size"
    return f"off by {size}, differently from row to row"


def _factor(evidence: Evidence, i: int) -> str:
    """A phrase on the factor, other than one, between the gradient of input i (-1: of all inputs) and the slope."""
    factor, error = float(evidence.factor[i]), float(evidence.standard_error[i])
    if factor < 0:
        return "wrong sign" if abs(factor + 1) < SETTINGS.close else f"wrong sign, and {-factor:.2f} times as large"
    if factor >= 2:
        return f"{factor:.2f} times as large as it should be"
    known = f" ± {percent(error)}" if error >= 5e-4 else ""
    return f"{percent(abs(factor - 1))}{known} too {'large' if factor > 1 else 'small'}"
