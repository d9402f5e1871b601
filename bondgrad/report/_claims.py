"""Claims of the paper that a machine can check against results."""

from collections.abc import Mapping
from dataclasses import dataclass

from bondgrad.report._experiment import Experiment
from bondgrad.report._quantities import (
    Expression,
    Quantity,
    UnknownError,
    agreement,
    evaluated,
    in_words,
    measured,
    refuse_unlike,
    written,
)

HOLDS, FAILS, OPEN = "holds", "does not hold", "open"  # states of a claim, as they are shown


@dataclass(frozen=True)
class Claim:
    """A value, and what the paper says of it: about how large it is, or which other value it exceeds."""

    says: str  # the paper's claim, in a sentence of ours
    value: Expression
    low: float | None = None  # the range in which the value has to be
    high: float | None = None
    paper: float | None = None  # the paper's value, if the range is one around it
    than: Quantity | None = None  # what the value is compared with
    below: bool = False  # whether the value has to be below it, or above
    by: float = 0.0  # at least how far below or above
    reading: str = ""  # the reading of the paper that the value belongs to
    because: str = ""  # why the claim does not hold

    @property
    def quantities(self) -> list[Quantity]:
        """All that it needs to know."""
        return [*self.value.quantities, *([self.than] if self.than else [])]


@dataclass(frozen=True)
class Finding:
    """What came out of a check."""

    claim: Claim
    state: str  # holds, does not hold, or open
    words: str  # the numbers, or what is missing


def check(claim: Claim, experiments: Mapping[str, Experiment]) -> Finding:
    """Whether the claim holds. It is open where the results do not have its numbers."""
    try:
        holds, words = _compared(claim, experiments) if claim.than else _in_range(claim, experiments)
    except UnknownError as error:
        return Finding(claim, OPEN, str(error))
    return Finding(claim, HOLDS if holds else FAILS, words)


def _in_range(claim: Claim, experiments: Mapping[str, Experiment]) -> tuple[bool, str]:
    number = evaluated(claim.value, experiments)
    holds = (claim.low is None or claim.low <= number) and (claim.high is None or number <= claim.high)
    words = in_words(claim.value, experiments)
    if claim.paper is not None:
        tolerance = (claim.high or 0.0) - claim.paper
        return holds, f"{words}, the paper has {claim.paper:g}, tolerance {tolerance:.3g}"
    return holds, f"{words}, has to be {_range(claim)}"


def _compared(claim: Claim, experiments: Mapping[str, Experiment]) -> tuple[bool, str]:
    """Means have to differ as claimed, and so have those of more than half of the seeds that both have."""
    assert claim.than is not None
    sides = Expression(claim.value.left, "<" if claim.below else ">", claim.than)
    own, other = (evaluated(Expression(side), experiments) for side in sides.quantities)
    refuse_unlike(sides.quantities, experiments)
    agree, seeds = agreement(sides, experiments)
    ahead = other - own if claim.below else own - other
    holds = ahead > 0 and ahead >= claim.by and (seeds == 0 or 2 * agree > seeds)
    metric = claim.value.left.metric
    words = f"{written(own, metric)} against {written(other, metric)}"
    if max(len(measured(side, experiments)) for side in sides.quantities) > 1:
        words += f", {in_words(sides, experiments)} agree"
    return holds, words + (f", has to be {claim.by:g} apart" if claim.by else "")


def _range(claim: Claim) -> str:
    if claim.low is None:
        return f"at most {claim.high:g}"
    return f"at least {claim.low:g}" if claim.high is None else f"{claim.low:g} to {claim.high:g}"
