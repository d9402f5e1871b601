"""The result of a check, and sentences on what is wrong with a gradient."""

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from bondgrad.checking._evidence import Entries, Evidence
from bondgrad.checking._slopes import SETTINGS
from bondgrad.checking._stairs import Staircase

Verdict = Literal["right", "wrong", "undecided"]


class Obstacle(NamedTuple):
    """What makes a check difficult."""

    hidden_by: str = "noise"  # what errors are hidden by, where they are
    unconfirmed: bool = False  # whether an error was not seen again, with shorter steps, before the end
    late: bool = False  # whether the time ended the check, not the budget
    noisy_layer: bool = False  # whether a BlackBox is checked whose function is noisy
    at_jump: Tensor | None = None  # [r, d] bool: entries that were left out since the box jumps nearby
    jump_error: float = 0.0  # the largest relative error of an input before they were left out
    staircase: Staircase | None = None  # what is known of a box that is piecewise constant
    unmoved: bool = False  # whether no move of any length changed the loss
    ended: str = "the time is over"  # why the check ended, where no slopes are known


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
    notes: tuple[str, ...] = ()  # sentences on the box, each with what to do
    obstacle: Obstacle = field(default_factory=Obstacle)  # what makes the check difficult

    @classmethod
    def unfinished(cls, d: int, tolerance: float, evaluations: int, reason: str) -> "Check":
        """The result of a check of d inputs that ended before anything was known, for the reason given."""
        unknown = torch.full((d,), math.nan, dtype=torch.float64)
        never = torch.full_like(unknown, math.inf)
        rest = unknown, tolerance, evaluations, (), (), Obstacle(late=True, ended=reason)
        return cls("undecided", unknown, never, unknown, never, *rest)

    @property
    def right(self) -> bool:
        """Whether the verdict is "right"."""
        return self.verdict == "right"

    def __bool__(self) -> bool:
        return self.right

    def __str__(self) -> str:
        first = {"right": self._right, "wrong": lambda: "wrong", "undecided": self._undecided}[self.verdict]()
        stairs = self.obstacle.staircase
        without_slopes = (stairs is not None and stairs.everywhere) or (self.obstacle.unmoved and not self.problems)
        faint = () if without_slopes else weak(self.factor, self.visible)
        last = f"{'' if without_slopes else self._precision()}{self.evaluations} evaluations"
        return "\n  ".join((first, *self.problems, *faint, *self.notes, last))

    def _right(self) -> str:
        least = self._least()
        return "right" if least is None else f"right: no input's gradient is off by more than {percent(least)}"

    def _undecided(self) -> str:
        """Why, and what to do; all errors are relative to the slope of their input."""
        least, asked, stairs = self._least(), percent(2 * self.tolerance), self.obstacle.staircase
        if stairs is not None and stairs.everywhere:
            return "undecided: the box has no slope that a gradient could be compared with"
        if self.evaluations == 0 or (self.obstacle.late and bool(self.visible.isinf().all())):
            return f"undecided: no slopes are known yet, and {self.obstacle.ended}. Give more seconds"
        if self.obstacle.unmoved:
            return (
                "undecided: no output changes when inputs are moved by as much as they vary. Give rows that vary more"
            )
        more = "more seconds, or a larger tolerance" if self.obstacle.late else "a larger budget or tolerance"
        more = "a larger tolerance" if stairs is not None and stairs.regular else more
        hidden = f"by {self.obstacle.hidden_by}"
        if self._left_out():
            along = _named(self._left_out())
            return f"undecided: the box jumps along {along}, so that a gradient there depends on the step"
        if self.obstacle.unconfirmed:
            return f"undecided: an error was seen, but not again with steps a quarter as long. Give {more}"
        if least is None or least <= 2 * self.tolerance:
            return f"undecided: the slopes of some inputs are hidden {hidden}. Give {more}"
        if least >= SETTINGS.huge_error:
            return f"undecided: even large errors are hidden {hidden}. Give {more}"
        return (
            f"undecided: errors below {percent(least)} of an input's slope are hidden {hidden}, and {asked} should be "
            f"visible. Give {more}"
        )

    def _precision(self) -> str:
        """How errors depend on the step, and how well factors are known; nothing, where nothing was measured."""
        seen, rates = ~self.factor.isnan(), self.rate[~self.rate.isnan()]
        if len(rates) == 0 and not bool(seen.any()) and bool(self.visible.isinf().all()):
            return ""
        rate = rates.min() if self.verdict == "wrong" and len(rates) else rates.median()  # NaN, where there is none
        remainder = "noise at every step t" if rate.isnan() else f"t^{float(rate):.1f}"
        known = f"factors known to {percent(float(self.standard_error[seen].max()))}; " if bool(seen.any()) else ""
        return f"remainder of Taylor's series ~ {remainder} (right: t^2, wrong: t^1); {known}"

    def _least(self) -> float | None:
        """The largest of the least errors that would have been seen, of inputs with a slope; None: none has one."""
        seen = self.visible[~self.factor.isnan()]
        return float(seen.max()) if len(seen) else None

    def _left_out(self) -> list[int]:
        """The inputs that were left out at every row, since the box jumps there. Levels of rounded outputs are none."""
        at_jump, stairs = self.obstacle.at_jump, self.obstacle.staircase
        if at_jump is None:
            return []
        inputs = at_jump.any(0)
        if stairs is not None and stairs.regular:
            inputs = inputs & ~stairs.coarse.any(1)
        return (inputs.to(self.visible.device) & self.visible.isinf()).nonzero().flatten().tolist()


def notes(verdict: Verdict, evidence: Evidence, obstacle: Obstacle, scale: Tensor) -> tuple[str, ...]:
    """Sentences on the box, each with what to do; scale [d] is the spread of every input."""
    found, stairs, at_jump = [], obstacle.staircase, obstacle.at_jump
    if stairs is not None and (verdict != "right" or not stairs.regular):
        found.append(_staircase(stairs, scale))
        at_jump = None if at_jump is None else at_jump & ~stairs.coarse.any(1)  # of their flat parts all is said
    if at_jump is not None and bool(at_jump.any()):
        rows, inputs = int(at_jump.any(1).sum()), at_jump.any(0).nonzero().flatten().tolist()
        if obstacle.jump_error < SETTINGS.serious:
            advice = (
                "Make the box more exact, such as by a tighter tolerance of its solver, or accept a larger error here"
            )
        else:
            advice = long_steps(scale)
        found.append(
            f"the box has jumps near {rows} of {len(at_jump)} rows ({_named(inputs)}): there a gradient is the mean "
            f"slope over the step of the layer, not the slope at a point, and it was not judged. {advice}"
        )
    factors = evidence.factor[evidence.wrong]
    if verdict == "wrong" and obstacle.noisy_layer and bool(((factors - 1).abs() < 0.5).all()):  # false for NaN
        found.append(
            "the outputs are noisy, so the layer takes long steps, and over those a gradient is too small or too large "
            "by an error that leaves most signs right. Average several readings, repeats=, to have shorter steps, or "
            "give a larger tolerance to accept it"
        )
    return tuple(found)


def _staircase(stairs: Staircase, scale: Tensor) -> str:
    """Where the box is piecewise constant, over which moves, and what to do; scale [d] is the spread of every input."""
    coarse = stairs.coarse.any(1)  # [d]
    inputs, outputs = coarse.nonzero().flatten().tolist(), stairs.coarse.any(0).nonzero().flatten().tolist()
    kind = "the outputs are rounded" if stairs.regular else "the box is piecewise constant"
    if bool((stairs.smooth.any(1) & ~coarse).any()):
        some = inputs[: SETTINGS.named_inputs]
        lengths = ", ".join(f"{float(f'{length:.1g}'):g}" for length in (stairs.flat * scale)[some].tolist())
        spreads = ", ".join(f"{spread:.2g}" for spread in scale[some].tolist())
        kind, lengths = f"{kind} along {_named(inputs)}", f"about {lengths} long"
        vary = "input varies" if len(inputs) == 1 else "inputs vary"
        advice = (
            f"Train with steps there about as long as the {vary}, {spreads}: the default policy takes such steps where "
            "it sees the jumps"
        )
    else:
        lengths = f"about {float(stairs.flat[coarse].log().mean().exp()):.1g} of an input's spread long"
        advice = long_steps(scale)
    only = f" in {_named(outputs, 'output')} only" if bool((stairs.smooth & coarse[:, None]).any()) else ""
    judged = "" if stairs.regular else ", and was not judged"
    more = "Take more digits from the box, if it has them. " if stairs.regular else ""
    return f"{kind}, with flat parts {lengths}{only}: a gradient depends on the step{judged}. {more}{advice}"


def long_steps(scale: Tensor) -> str:
    """Advice to move inputs by about as much as they vary, scale [d]."""
    typical = float(scale.log().mean().exp())
    if bool((scale > 3 * typical).any()) or bool((scale < typical / 3).any()):
        return "Scale the inputs to the same spread, and train with steps of that length, policies.Fixed(step)"
    return f"Train with steps about as long as inputs vary: policy=bondgrad.policies.Fixed({typical:.1g})"


def _named(numbers: list[int], what: str = "input") -> str:
    """Inputs, or outputs, by their numbers, as many as are named one by one."""
    some = ", ".join(map(str, numbers[: SETTINGS.named_inputs]))
    more = " and others" if len(numbers) > SETTINGS.named_inputs else ""
    return f"{what}{'' if len(numbers) == 1 else 's'} {some}{more}"


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
    least = SETTINGS.weak * float(visible[unseen].max())
    text = f"{_named(unseen)}: {'its slope is' if len(unseen) == 1 else 'their slopes are'} too weak to be judged"
    return (text + (f"; an error of {percent(least)} of the typical slope would be visible" if least < 1 else ""),)


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
