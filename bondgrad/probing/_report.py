"""The report of a probe: its findings, and the verdict, recommended BlackBox, warnings and cost derived from them."""

import json
import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from bondgrad.errors import counted
from bondgrad.policies import Calibrated
from bondgrad.probing._advice import Advice
from bondgrad.probing._differences import Smoothness, StepLadder, measure_smoothness, measure_steps
from bondgrad.probing._failures import RandomFailures, measure_failures
from bondgrad.probing._float_types import arithmetic_of
from bondgrad.probing._gradients import Gradients, measure_gradients
from bondgrad.probing._influences import History, RowCoupling, measure_memory, measure_row_coupling
from bondgrad.probing._inputs import Dependence, Ranges, Sensitivity, measure_effects, measure_pattern, measure_ranges
from bondgrad.probing._number_format import applying, duration
from bondgrad.probing._overlap import Overlap, measure_overlap
from bondgrad.probing._randomness import GENERATORS, Randomness, measure_randomness
from bondgrad.probing._recommendation import code, find_advice, recommend
from bondgrad.probing._rounding import Rounding, measure_rounding
from bondgrad.probing._speed import Speed, measure_speed
from bondgrad.step._trials import SETTINGS

DEFAULT_BATCH, DEFAULT_STEPS = 64, 1000  # rows of a training step, and number of steps, for predicted costs
SLOW_ROW = 1e-3  # the verdict mentions the time of a row from so many seconds on


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The result of every measurement of a box; None: it was left out, or has not been made yet.

    Measurements are made in this order, the most useful first, and each after those whose findings it reads. `History`
    is completed at the end, when drift is known.
    """

    randomness: Randomness | None = field(default=None, metadata={"title": "The same again", "by": measure_randomness})
    speed: Speed | None = field(default=None, metadata={"title": "Speed", "by": measure_speed})
    history: History | None = field(default=None, metadata={"title": "History", "by": measure_memory})
    overlap: Overlap | None = field(default=None, metadata={"title": "Side by side", "by": measure_overlap})
    failures: RandomFailures | None = field(default=None, metadata={"title": "Failures", "by": measure_failures})
    steps: StepLadder | None = field(default=None, metadata={"title": "Steps", "by": measure_steps})
    rounding: Rounding | None = field(default=None, metadata={"title": "Rounding", "by": measure_rounding})
    company: RowCoupling | None = field(default=None, metadata={"title": "Rows together", "by": measure_row_coupling})
    smoothness: Smoothness | None = field(default=None, metadata={"title": "Smoothness", "by": measure_smoothness})
    ranges: Ranges | None = field(default=None, metadata={"title": "Ranges", "by": measure_ranges})
    dependence: Dependence | None = field(default=None, metadata={"title": "Structure", "by": measure_pattern})
    sensitivity: Sensitivity | None = field(default=None, metadata={"title": "Inputs", "by": measure_effects})
    gradients: Gradients | None = field(default=None, metadata={"title": "Gradients", "by": measure_gradients})


@dataclass(frozen=True)
class Cost:
    """The predicted cost of training with one estimator and the recommended evaluator, counting the box alone."""

    evaluations: int  # evaluations per training step, including the forward pass
    seconds: float | None  # seconds per training step; None: the speed is not known
    hours: float | None  # hours of the whole training; None: the speed is not known
    extrapolated: bool  # whether its calls have more rows than any call that was timed

    @property
    def words(self) -> str:
        """The cost, in words."""
        hours = "" if self.hours is None else f", {duration(3600 * self.hours)} in all"
        return f"{self.evaluations:,} evaluations a step{hours}{' (extrapolated)' * self.extrapolated}"


@dataclass(frozen=True, kw_only=True)
class Report(Findings):
    """All findings of a probe. A measurement that was left out is None, and `left_out` says why.

    `print(report)` shows it as text, `as_dict()` returns it for JSON, and `code` is a BlackBox to paste into a program.
    """

    name: str  # name of the box in Python
    module: str | None = None  # module from which it can be imported, if known
    in_features: int  # number of inputs
    out_features: int  # number of outputs; zero: no call succeeded
    dtype: str  # type of the rows that the box was given
    sample: str  # origin of the typical rows
    limits: tuple[list[float], list[float]] | None  # least and largest value of every input, as given
    hung: str = ""  # the call that did not come back; empty: all did
    timeouts: str = ""  # the calls that the evaluator ended, and what they took; empty: there were none
    flaky: int  # number of calls or rows that failed, and succeeded when repeated
    left_out: list[str]  # measurements that were not made, each with the reason
    evaluator_given: bool  # whether rows were evaluated by an evaluator that the user gave
    evaluator_has_box: bool = False  # whether the box belongs to that evaluator
    can_be_eager: bool = False  # whether BlackBox takes eager=True: the box has no seed, and no snapshots
    batch: int = DEFAULT_BATCH  # rows of a training step for which an evaluator is recommended: as many as were given
    evaluations: int  # number of evaluations made, in rows
    calls: int  # number of calls made
    seconds: float  # duration of the probe

    @property
    def verdict(self) -> str:
        """The main properties of the box in one line, the most important first."""
        history, ranges, speed = self.history, self.ranges, self.speed
        constant = self.steps is not None and not self.steps.changes
        kinds = {True: "vectorised", False: "not vectorised", None: ""}
        parts = applying(
            _row_coupling(self),
            _randomness(self),
            history is not None and history.drifts and "drifts",
            history is not None and history.remembers and "remembers earlier questions",
            _shape(self),
            constant and "constant",
            not constant and ranges is not None and ranges.saturated and "saturated",
            _precision(self),
            (bool(self.hung) and "hangs") or (bool(self.timeouts) and "hangs now and then"),
            self.flaky > 0 and "fails at random",
            ranges is not None and (ranges.failing_rows > 0 or len(ranges.failures) > 0) and "fails in places",
            speed is not None and speed.latency >= SLOW_ROW and f"takes {duration(speed.latency)} a {speed.unit}",
            speed is not None and ("one row at a time" if speed.max_rows == 1 else kinds[speed.vectorised]),
        )
        return ", ".join(parts) or "nothing could be found out"

    @property
    def code(self) -> str:
        """The recommended BlackBox, in Python, with a reason for every argument."""
        return code(self)

    @property
    def arguments(self) -> dict[str, str]:
        """The recommended arguments, in Python."""
        return {name: value for name, (value, _) in recommend(self).items()}

    @property
    def reasons(self) -> dict[str, str]:
        """The reason for each recommended argument."""
        return {name: reason for name, (_, reason) in recommend(self).items()}

    @property
    def warnings(self) -> list[str]:
        """Problems of the box that no argument of BlackBox can solve."""
        random, history = self.randomness, self.history
        modules = [] if random is None else random.modules
        drawn = random is not None and (random.generator is not None or random.by_place)
        dead = [] if self.sensitivity is None else self.sensitivity.dead or []
        ranges, constant = self.ranges, self.steps is not None and self.steps.constant
        fails = ranges is not None and (ranges.failing_rows > 0 or len(ranges.failures) > 0)
        return applying(
            self.hung
            and f"It hangs: {self.hung}, and was given up; its thread may still be at it. If it only needs long, give "
            "the probe more seconds. If not, let the box give up by itself, or evaluate it with "
            "Processes(n, timeout=...), which ends a call that hangs.",
            self.timeouts
            and f"It hangs now and then: {self.timeouts}. A call of many rows is ended after the timeouts of "
            "all of them: give the evaluator max_rows=1, so that training waits for one.",
            self.flaky > 0
            and self.failures is None
            and f"It fails at random: {self.flaky:,} times in {self.calls:,} calls, and not when asked again. In "
            "training such rows are asked again: see retries= of evaluators.",
            fails
            and ranges is not None
            and ranges.limits is None
            and "No limits of single inputs say where it fails. In training such a row gets no gradient, and the mean "
            "of the outputs for an answer: leave it out of the loss with box.last_ok.",
            constant
            and "Between its jumps the slope is zero, so what counts as right is the slope over a step that reaches "
            "across them. Training follows that, if steps are long: see policy=bondgrad.policies.Fixed(step).",
            (constant or (self.smoothness is not None and self.smoothness.kind == "jumps"))
            and "If a converter or a rounding sets an input, and the box jumps where that does, give the step of the "
            "converter as resolution=.",
            len(modules) > 0
            and f"BlackBox keeps a module in eval mode, so {' and '.join(modules)} will not be as measured here.",
            (not modules and self.company is not None and self.company.matters)
            and "Rows influence one another: a gradient asks about many moved rows at once, and they will mix.",
            (drawn and random is not None and not random.quiet_in_eval and not random.takes_seed)
            and "Its random numbers can be repeated: let it take a parameter `seed`. Both ends of a difference are "
            "then given the same, in calls of their own, and what they draw cancels.",
            (history is not None and history.remembers)
            and "It remembers earlier questions: give it a state, or answers will depend on their order.",
            0 < len(dead) < self.in_features
            and f"{len(dead)} inputs move nothing and cost evaluations: leave them out.",
        )

    @property
    def words(self) -> dict[str, str]:
        """The finding of every measurement that was made, in sentences, by title."""
        found = {kind.metadata["title"]: getattr(self, kind.name) for kind in fields(Findings)}
        words = {title: result.words for title, result in found.items() if result is not None}
        return words if self.advice is None else words | {"Evaluator": self.advice.words}

    @property
    def advice(self) -> Advice | None:
        """What would shorten a training step: an evaluator, or `eager`. None: nothing that is known."""
        return find_advice(self)

    @property
    def groups(self) -> int:
        """The number of groups of inputs that a gradient moves, with the recommended structure."""
        return self.in_features if self.dependence is None else self.dependence.groups

    @property
    def about(self) -> str:
        """A line on the size of the box and of the probe."""
        spent = f"{self.evaluations:,} evaluations in {self.calls:,} calls, {duration(self.seconds)}"
        inputs, outputs = counted(self.in_features, "input"), counted(self.out_features, "output")
        return f"{inputs} ({self.dtype}) to {outputs}, {self.sample}; {spent}."

    def cost(self, batch: int = DEFAULT_BATCH, steps: int = DEFAULT_STEPS) -> dict[str, Cost]:
        """The predicted cost of training, by estimator: evaluations and seconds per step, hours in all."""
        per_row = {"central": 2 * self.groups, "forward": self.groups, "simultaneous": 2}
        return {estimator: self._cost(moved, batch, steps) for estimator, moved in per_row.items()}

    def _cost(self, moved: int, batch: int, steps: int) -> Cost:
        """The cost with an estimator that evaluates `moved` perturbed copies of every row."""
        evaluations = round(batch * (1 + (1 + Calibrated.share) * moved))
        if self.speed is None:
            return Cost(evaluations, None, None, False)
        speed, advice, rows = self.speed, self.advice, min(batch, SETTINGS.rows)
        workers, eager = 1 if advice is None else advice.workers, advice is not None and advice.argument == "eager"

        def took(evaluations: float) -> float:
            return speed.seconds(math.ceil(evaluations / workers))

        # A trial of the default policy evaluates `rows` rows with half the step, with twice the step, and unmoved.
        trials = Calibrated.share * batch * moved / (rows * (2 * moved + 1))
        step = took(batch * (1 + moved)) if eager else took(batch) + took(batch * moved)
        seconds = step + trials * (2 * took(rows * moved) + took(rows))
        longest = speed.extrapolated(math.ceil(batch * moved / workers))
        return Cost(evaluations, seconds, steps * seconds / 3600, longest)

    def as_dict(self, batch: int = DEFAULT_BATCH, steps: int = DEFAULT_STEPS) -> dict[str, Any]:
        """The report as values that JSON can hold; None where a number is not finite."""
        texts = {name: getattr(self, name) for name in ("verdict", "words", "code", "reasons", "warnings")}
        costs = {estimator: asdict(cost) for estimator, cost in self.cost(batch, steps).items()}
        everything = texts | asdict(self) | {"cost": {"batch": batch, "steps": steps, **costs}}
        return dict(json.loads(json.dumps(everything), parse_constant=lambda _: None))

    def text(self, batch: int = DEFAULT_BATCH, steps: int = DEFAULT_STEPS) -> str:
        """The whole report as plain text."""
        costs = [f"{estimator} {cost.words}" for estimator, cost in self.cost(batch, steps).items()]
        lines = [f"{self.name}: {self.verdict}", "", self.about, ""]
        lines += [f"{title}: {words}" for title, words in self.words.items()]
        lines += [f"Left out: {what}" for what in self.left_out]
        lines += ["", self.code, ""] + [f"Mind: {text}" for text in self.warnings]
        return "\n".join([*lines, f"Cost of {steps:,} steps of {batch} rows: " + "; ".join(costs)])

    def __str__(self) -> str:
        return self.text()


def _row_coupling(report: Report) -> str:
    """Part of the verdict: whether rows influence one another, and by what cause."""
    modules = [] if report.randomness is None else report.randomness.modules
    known = any("batch normalisation" in name for name in modules)
    cause = "batch normalisation in training mode" if known else "something goes over the whole batch"
    return f"rows influence one another ({cause})" if report.company is not None and report.company.matters else ""


def _randomness(report: Report) -> str:
    """Part of the verdict: the kind and size of the noise."""
    found = report.randomness
    if found is None or found.deterministic:
        return "" if found is None or found.moving else "deterministic"
    dropout = [name for name in found.modules if "dropout" in name]
    noise = f"half-width {found.noise:.1g}"
    if dropout and found.generator == "torch":
        return f"random: {' and '.join(dropout)} in training mode, drawn from torch's generator"
    if found.by_place:
        seeded = ", though it takes a seed" * found.takes_seed
        return f"the same noise in every call, by place in the call, {noise}{seeded}"
    if found.takes_seed:
        return f"random, {noise}, but takes a seed"
    if found.generator is not None:
        return f"random: noise of {noise}, drawn from {GENERATORS[found.generator]}"
    return f"noisy device, {noise}"


def _shape(report: Report) -> str:
    """Part of the verdict: whether outputs are quantised or rough, or how smooth they are."""
    if report.rounding is not None and (report.rounding.quantised or report.rounding.rough):
        return f"quantised in steps of {report.rounding.largest_quantum:.2g}" if report.rounding.quantised else "rough"
    if report.steps is not None and report.steps.constant:
        return "piecewise constant"
    kinds = {"smooth": "smooth", "kinks": "with kinks", "poles": "with poles", "jumps": "with jumps", "unclear": ""}
    return "" if report.smoothness is None else kinds[report.smoothness.kind]


def _precision(report: Report) -> str:
    """Part of the verdict: the precision of the box, where noise and quanta do not hide it."""
    found = report.rounding
    if found is None or found.quantised or (report.randomness is not None and not report.randomness.deterministic):
        return ""
    return found.precision + ("" if found.shortcut is None else f", but {arithmetic_of(found.shortcut)} as set here")
