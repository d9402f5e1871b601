"""All that a probe has found out."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from bondgrad.probing import _cost, _recommend, _verdict
from bondgrad.probing._cost import Cost
from bondgrad.probing._dependence import Dependence
from bondgrad.probing._history import History
from bondgrad.probing._number_format import duration
from bondgrad.probing._randomness import Randomness
from bondgrad.probing._ranges import Ranges
from bondgrad.probing._rounding import Rounding
from bondgrad.probing._row_coupling import RowCoupling
from bondgrad.probing._sensitivity import Sensitivity
from bondgrad.probing._smoothness import Smoothness
from bondgrad.probing._speed import Speed
from bondgrad.probing._steps import StepLadder

DEFAULT_BATCH, DEFAULT_STEPS = 64, 1000  # rows of a training step, and steps, whose cost is predicted
TITLES = {
    "speed": "Speed",
    "randomness": "The same again",
    "rounding": "Rounding",
    "steps": "Steps",
    "smoothness": "Smoothness",
    "company": "Rows together",
    "sensitivity": "Inputs",
    "ranges": "Ranges",
    "dependence": "Structure",
    "history": "History",
}


@dataclass(frozen=True)
class Report:
    """What a box is like. A measurement that was left out is None, and `left_out` says why.

    `print(report)` shows it, `as_dict()` is for machines, `code` is to be pasted.
    """

    name: str  # of the box, in Python
    module: str | None  # from which it can be imported, where that is known
    in_features: int
    out_features: int
    dtype: str  # of what the box was given
    is_module: bool
    sample: str  # where the typical rows came from
    limits: tuple[list[float], list[float]] | None
    speed: Speed | None
    randomness: Randomness | None
    rounding: Rounding | None
    steps: StepLadder | None
    smoothness: Smoothness | None
    company: RowCoupling | None
    sensitivity: Sensitivity | None
    ranges: Ranges | None
    dependence: Dependence | None
    history: History | None
    flaky: int  # calls, or rows, that failed and, asked again, did not
    left_out: list[str]
    evaluator_given: bool  # whether rows were evaluated by an evaluator of the caller's
    evaluations: int  # spent
    calls: int
    seconds: float

    @property
    def verdict(self) -> str:
        """One line: what this box is."""
        return _verdict.verdict(self)

    @property
    def code(self) -> str:
        """The recommended BlackBox, in Python, with a reason for every argument."""
        return _recommend.code(self)

    @property
    def reasons(self) -> dict[str, str]:
        """Why, for every recommended argument."""
        return {argument.name: argument.reason for argument in _recommend.recommend(self)}

    @property
    def warnings(self) -> list[str]:
        """What no argument can set right."""
        return _recommend.warnings(self)

    @property
    def words(self) -> dict[str, str]:
        """What was found, by title."""
        found = {title: getattr(self, name) for name, title in TITLES.items()}
        return {title: result.words for title, result in found.items() if result is not None}

    def cost(self, batch: int = DEFAULT_BATCH, steps: int = DEFAULT_STEPS) -> dict[str, Cost]:
        """What training will cost, by estimator: evaluations and seconds of a step, hours in all."""
        return _cost.predict(self, batch, steps)

    def as_dict(self, batch: int = DEFAULT_BATCH, steps: int = DEFAULT_STEPS) -> dict[str, Any]:
        """Numbers, texts and lists only, to be written as JSON; None where a number is not finite."""
        costs = {estimator: asdict(cost) for estimator, cost in self.cost(batch, steps).items()}
        everything = {
            "verdict": self.verdict,
            **asdict(self),
            "words": self.words,
            "code": self.code,
            "reasons": self.reasons,
            "warnings": self.warnings,
            "cost": {"batch": batch, "steps": steps, **costs},
        }
        return {name: _plain(value) for name, value in everything.items()}

    def text(self, batch: int = DEFAULT_BATCH, steps: int = DEFAULT_STEPS) -> str:
        """To read, without colours."""
        lines = [f"{self.name}: {self.verdict}", "", self.about, ""]
        lines += [f"{title}: {words}" for title, words in self.words.items()]
        lines += [f"Left out: {what}" for what in self.left_out]
        lines += ["", self.code, ""] + [f"Mind: {text}" for text in self.warnings]
        lines += [f"Cost of {steps:,} steps of {batch} rows: " + "; ".join(self.cost_words(batch, steps))]
        return "\n".join(lines)

    @property
    def about(self) -> str:
        """What was asked, and how much."""
        return (
            f"{self.in_features} inputs ({self.dtype}) to {self.out_features} outputs, {self.sample}; "
            f"{self.evaluations:,} evaluations in {self.calls:,} calls, {duration(self.seconds)}."
        )

    def cost_words(self, batch: int = DEFAULT_BATCH, steps: int = DEFAULT_STEPS) -> list[str]:
        """One line per estimator."""
        return [
            f"{estimator} {cost.evaluations:,} evaluations a step"
            + ("" if cost.seconds is None or cost.hours is None else f", {duration(3600 * cost.hours)} in all")
            + " (extrapolated)" * cost.extrapolated
            for estimator, cost in self.cost(batch, steps).items()
        ]

    def __str__(self) -> str:
        return self.text()


def _plain(value: Any) -> Any:  # noqa: ANN401
    """The value in numbers, texts, lists and dictionaries that JSON has."""
    if isinstance(value, dict):
        return {str(name): _plain(v) for name, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
