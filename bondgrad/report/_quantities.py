"""Numbers out of results, by name: what a claim compares and what a sentence quotes.

A quantity is written `RUN|metric`, or `RUN|metric|folder` where it is not of the entry's own experiment. `best of
PATTERN|metric` is the best of the runs whose names match the pattern. An expression is a quantity, the difference
`A - B` or the ratio `A / B` of two, or `A < B` and `A > B`, which count the seeds that agree.
"""

import re
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from bondgrad.report._experiment import Experiment, Line, Run, conditions
from bondgrad.report._metrics import FINALS, METRICS, STEP_DEVIATIONS

BEST = "best of "  # before a pattern of names
# What is known only when a run has trained as long as planned.
ENDS = ("test_loss", "accuracy", "generalization_gap", "step_change", "gradient_norm_change")

BySeed = dict[int, float]


class UnknownError(Exception):
    """A number that the results do not have, with the reason in words."""


@dataclass(frozen=True)
class Quantity:
    """One metric of one run, of a line of a figure, or of the best of several runs."""

    run: str
    metric: str
    folder: str


@dataclass(frozen=True)
class Expression:
    """One quantity, or two and what is done with them."""

    left: Quantity
    operator: str = ""
    right: Quantity | None = None

    @property
    def quantities(self) -> list[Quantity]:
        """Its one or two quantities."""
        return [self.left] if self.right is None else [self.left, self.right]


def quantity(text: str, folder: str) -> Quantity:
    """The quantity that is written so.

    Raises:
        ValueError: It is not `RUN|metric` or `RUN|metric|folder`, or there is no such metric.
    """
    parts = [part.strip() for part in text.split("|")]
    if len(parts) not in (2, 3) or not all(parts):
        raise ValueError(f"a quantity is written RUN|metric or RUN|metric|folder, got {text!r}")
    known = (*NUMBERS, *TRACES, *LINES)
    if parts[1] not in known:
        raise ValueError(f"{text!r}: no metric is called {parts[1]!r}; there are {', '.join(known)}")
    return Quantity(parts[0], parts[1], parts[2] if len(parts) == 3 else folder)


def expression(text: str, folder: str) -> Expression:
    """The expression that is written so. An operator stands between blanks, behind a metric or a folder."""
    two = re.fullmatch(r"(.+?\|\w+) ([-/<>]) (.+)", text.strip())
    if two is None:
        return Expression(quantity(text, folder))
    return Expression(quantity(two[1], folder), two[2], quantity(two[3], folder))


def measured(of: Quantity, experiments: Mapping[str, Experiment]) -> BySeed:
    """The number for each seed, as it is shown: shares in percent.

    Raises:
        UnknownError: No run has it. The message says why.
    """
    experiment = experiments.get(of.folder)
    if experiment is None:
        raise UnknownError(f"{of.folder} was not run")
    if of.metric in LINES:
        return _of_line(of, experiment)
    if of.run.startswith(BEST):
        return _best(of, experiments)
    runs = experiment.of(of.run)
    if not runs:
        raise UnknownError(f"{of.run} was not run")
    if through := [run for run in runs if not run.failed]:
        return _of_runs(of, through, experiment)
    raise UnknownError(f"{of.run} failed")


def _of_runs(of: Quantity, runs: list[Run], experiment: Experiment) -> BySeed:
    if of.metric in ENDS:
        short = [words for run in runs if (words := _cut_short(run, experiment))]
        runs = [run for run in runs if not _cut_short(run, experiment)]
        if not runs:
            raise UnknownError(f"{of.run} ends at {short[0]}")
    read = NUMBERS.get(of.metric) or TRACES[of.metric]
    found = {run.seed: number for run in runs if (number := read(run)) is not None}
    if not found:
        raise UnknownError(f"{of.metric} of {of.run} was not measured")
    return found


def _cut_short(run: Run, experiment: Experiment) -> str:
    """How much it trained, if that is less than planned."""
    epochs = experiment.planned_epochs.get(run.run, run.epochs)
    if run.epochs_run < epochs:
        return f"{run.epochs_run} of {epochs} epochs"
    if run.steps_of_epoch != experiment.planned_steps.get(run.run, run.steps_of_epoch):
        return f"epochs of {run.steps_of_epoch or 'all'} steps"
    return ""


def _best(of: Quantity, experiments: Mapping[str, Experiment]) -> BySeed:
    """Of the run whose mean over seeds is best. Runs that failed are not among them."""
    pattern = of.run.removeprefix(BEST)
    runs = [run for run in experiments[of.folder].runs if fnmatchcase(run.run, pattern) and not run.failed]
    if not runs:
        raise UnknownError(f"no run like {pattern!r} was made in {of.folder}")
    found = [
        measured(Quantity(name, of.metric, of.folder), experiments) for name in dict.fromkeys(run.run for run in runs)
    ]
    lower = of.metric in METRICS and METRICS[of.metric].lower_is_better
    return (min if lower else max)(found, key=lambda seeds: statistics.fmean(seeds.values()))


def _of_line(of: Quantity, experiment: Experiment) -> BySeed:
    for line in experiment.lines:
        if line_name(line) == of.run:
            return {0: LINES[of.metric](line)}
    raise UnknownError(f"the line {of.run} is not there")


def line_name(line: Line) -> str:
    """A line of a figure, as a quantity calls it."""
    return f"{line.label}, {line.panel}" if line.panel else line.label


def refuse_unlike(quantities: list[Quantity], experiments: Mapping[str, Experiment]) -> None:
    """Check that times which are to be compared were taken alike: on the same machine, eagerly or captured.

    Raises:
        UnknownError: They were not.
    """
    timed = [of for of in quantities if of.metric == "loop_ms"]
    found = {conditions(run) for of in timed for run in experiments[of.folder].of(of.run) if "loop_ms" in run.finals}
    if len(found) > 1:
        names = ", ".join(dict.fromkeys(of.run for of in timed))
        raise UnknownError(f"the steps of {names} were not timed under the same conditions")


def evaluated(of: Expression, experiments: Mapping[str, Experiment]) -> float:
    """The mean of the expression over seeds, paired by seed where both sides have the same seeds.

    Raises:
        UnknownError: A side is not known.
    """
    left = measured(of.left, experiments)
    if of.right is None:
        return statistics.fmean(left.values())
    right = measured(of.right, experiments)
    refuse_unlike(of.quantities, experiments)
    if set(left) != set(right):
        left, right = ({0: statistics.fmean(side.values())} for side in (left, right))
    if of.operator == "/":
        if not all(right.values()):
            raise UnknownError(f"{of.right.metric} of {of.right.run} is zero")
        return statistics.fmean(left[seed] / right[seed] for seed in left)
    return statistics.fmean(left[seed] - right[seed] for seed in left)


def agreement(of: Expression, experiments: Mapping[str, Experiment]) -> tuple[int, int]:
    """In how many of the seeds that both sides have the left is less (with `<`) or greater (with `>`)."""
    assert of.right is not None
    left, right = measured(of.left, experiments), measured(of.right, experiments)
    both = [seed for seed in left if seed in right]
    sign = 1 if of.operator == ">" else -1
    return sum(sign * (left[seed] - right[seed]) > 0 for seed in both), len(both)


def in_words(of: Expression, experiments: Mapping[str, Experiment]) -> str:
    """The expression's number with the digits of its metric; of a comparison, how many seeds agree."""
    if of.operator in ("<", ">"):
        agree, seeds = agreement(of, experiments)
        return f"{agree} of {seeds} seed{'s' * (seeds != 1)}"
    number = evaluated(of, experiments)
    if of.operator == "/":
        return f"{number:.2f}"
    return written(number, of.left.metric, sign=of.operator == "-")


def written(number: float, metric: str, sign: bool = False) -> str:
    """With the digits of its metric."""
    if metric not in METRICS:
        return f"{number:+.3g}" if sign else f"{number:.3g}"
    digits = METRICS[metric].digits
    return f"{round(number, digits) + 0.0:{'+' if sign else ''}.{digits}f}"


def filled(sentence: str, folder: str, experiments: Mapping[str, Experiment]) -> str:
    """The sentence with every `{expression}` replaced by its number.

    Raises:
        UnknownError: A number is not known.
    """
    return re.sub(r"\{([^{}]+)\}", lambda found: in_words(expression(found[1], folder), experiments), sentence)


def placeholders(sentence: str, folder: str) -> list[Expression]:
    """What the sentence quotes."""
    return [expression(found, folder) for found in re.findall(r"\{([^{}]+)\}", sentence)]


def _final(metric: str) -> Callable[[Run], float | None]:
    of = next((name for name, key in STEP_DEVIATIONS.items() if key == metric), metric)
    scale = METRICS[of].scale
    return lambda run: scale * run.finals[metric] if metric in run.finals else None


def _positive(run: Run, key: str) -> list[float]:
    return [number for number in run.trace.get(key, []) if number > 0]


def _change(key: str) -> Callable[[Run], float | None]:
    """The median of the last tenth of training over that of the first."""

    def change(run: Run) -> float | None:
        numbers = _positive(run, key)
        tenth = max(1, len(numbers) // 10)
        return statistics.median(numbers[-tenth:]) / statistics.median(numbers[:tenth]) if numbers else None

    return change


def _median(key: str) -> Callable[[Run], float | None]:
    return lambda run: statistics.median(numbers) if (numbers := _positive(run, key)) else None


def _gap(run: Run) -> float | None:
    """The test loss less the training loss, at the end."""
    test, train = (run.curve.get(key, []) for key in ("test_loss", "train_loss"))
    return test[-1] - train[-1] if test and train else None


def _roughness(line: Line) -> float:
    """The mean size of second differences, as a share of the line's range."""
    bends = [abs(a - 2 * b + c) for a, b, c in zip(line.y, line.y[1:], line.y[2:], strict=False)]
    height = max(line.y) - min(line.y)
    return statistics.fmean(bends) / height if height else 0.0


# What a quantity may be: by the end of a run, over its trace of training steps, and of a line that was not trained.
NUMBERS: dict[str, Callable[[Run], float | None]] = {
    **{name: _final(name) for name in (*FINALS, *STEP_DEVIATIONS.values())},
    "generalization_gap": _gap,
}
TRACES: dict[str, Callable[[Run], float | None]] = {
    "step_size": _median("step_mean"),
    "lower_bound": _median("lower"),
    "upper_bound": _median("upper"),
    "step_change": _change("step_mean"),
    "gradient_norm_change": _change("gradient_norm"),
}
LINES: dict[str, Callable[[Line], float]] = {"roughness": _roughness}
