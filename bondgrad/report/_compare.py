"""The paper's values, ours, and how far they are apart."""

import statistics
from dataclasses import dataclass

from bondgrad.report._experiment import Experiment, Row, Run, Table, Value, conditions
from bondgrad.report._metrics import METRICS, SIGNS, STEP_DEVIATIONS, Metric

NOTHING = "-"
NOT_RUN = "not run"
FAILED = "failed"
# What a run has only if it went through.
OUTCOMES = ("test_loss", "accuracy", "gain", "paired_difference", *SIGNS)


@dataclass(frozen=True)
class Cell:
    """One metric of one row, in words."""

    paper: str
    ours: str
    difference: str


def compare(experiment: Experiment, row: Row, column: str) -> Cell:
    """What the table says in this row, in this column."""
    metric = METRICS[column]
    paper = of_paper(experiment, row, column)
    ours = [metric.scale * number for number in _of_ours(experiment, row, column)]
    difference = NOTHING
    if paper is not None and ours:  # of the numbers as they are, not as they are shown
        difference = signed(statistics.fmean(ours) - paper.mean, metric.digits)
    runs = experiment.of(row.run)
    words = (_in_words(experiment, row, column, ours) if ours else NOTHING) if runs else NOT_RUN
    if column in OUTCOMES and (failed := sum(bool(run.failed) for run in runs)):
        words = f"{words}, {failed} {FAILED}" if ours else FAILED
    return Cell(NOTHING if paper is None else as_written(paper, metric), words, difference)


def _in_words(experiment: Experiment, row: Row, column: str, ours: list[float]) -> str:
    """The mean over seeds with what varies: over seeds, and where it is known over single training steps."""
    if column == "paired_difference":
        metric = METRICS[_outcome(experiment)]
        better = sum(number < 0 if metric.lower_is_better else number > 0 for number in ours)
        seeds = f"{len(ours)} seed{'s' * (len(ours) != 1)}"
        return f"{signed(statistics.fmean(ours), metric.digits)} ({better} of {seeds} better)"
    words = spread(ours, METRICS[column].digits)
    key, scale = STEP_DEVIATIONS.get(column, ""), METRICS[column].scale
    deviations = [scale * run.finals[key] for run in experiment.of(row.run) if key in run.finals and not run.failed]
    return f"{words} ({over_steps(deviations)})" if deviations else words


def over_steps(deviations: list[float]) -> str:
    """The deviation over single training steps; of several seeds the mean."""
    return f"steps ± {statistics.fmean(deviations):.3g}"


def beside(experiment: Experiment, row: Row, column: str, in_full: bool = False) -> str:
    """Ours, in full with quartiles in round brackets, and the paper's in square ones, if it has anything."""
    cell = compare(experiment, row, column)
    between = quartiles(experiment, row, column) if in_full else ""
    ours = f"{cell.ours} ({between})" if between else cell.ours
    return ours if of_paper(experiment, row, column) is None else f"{ours} [{cell.paper}]"


def quartiles(experiment: Experiment, row: Row, column: str) -> str:
    """Between which half of the loop times lie, if there is only one run to say how much they vary."""
    runs = experiment.of(row.run)
    if column != "loop_ms" or len(runs) != 1 or not runs[0].loop_quartiles:
        return ""
    return " to ".join(f"{part:.{METRICS[column].digits}f}" for part in runs[0].loop_quartiles)


def spread(numbers: list[float], digits: int) -> str:
    """The mean, and the deviation where there is more than one."""
    mean = f"{statistics.fmean(numbers):.{digits}f}"
    return mean if len(numbers) == 1 else f"{mean} ± {statistics.stdev(numbers):.{digits}f}"


def signed(difference: float, digits: int) -> str:
    """With its sign, but never a negative zero."""
    return f"{round(difference, digits) + 0.0:+.{digits}f}"


def as_written(paper: Value, metric: Metric) -> str:
    """With the digits that the paper has, and no fewer than two where ours have that many."""
    parts = [part for part in (paper.mean, paper.deviation) if part is not None]
    fewest = min(2, metric.digits)
    digits = next((d for d in range(fewest, 6) if all(round(part, d) == part for part in parts)), fewest)
    words = " ± ".join(f"{part:.{digits}f}" for part in parts)
    return words if paper.over_steps is None else f"{words} (steps ± {paper.over_steps:g})"


def elsewhere(experiment: Experiment, column: str) -> str:
    """On what the paper took its times if it was not on our hardware. "" for what does not depend on hardware."""
    gpu = experiment.paper.gpu
    if not METRICS[column].hardware or (gpu and all(gpu in run.gpu for run in experiment.runs)):
        return ""
    return f"on {gpu}" if gpu else "on another GPU"


def heading(experiment: Experiment, table: Table, column: str) -> str:
    """The column's label, which says where the paper's times come from another machine."""
    there = elsewhere(experiment, column)
    if not there or all(of_paper(experiment, row, column) is None for row in table.rows):
        return METRICS[column].label
    return f"{METRICS[column].label} [the paper's: {there}]"


def of_paper(experiment: Experiment, row: Row, column: str) -> Value | None:
    """As it is given, or from what is given: gains and ratios follow from other columns."""
    if column in row.paper or not row.baseline:
        return row.paper.get(column)
    rows = [other for table in experiment.tables for other in table.rows if other.run == row.baseline]
    of = {"gain": "accuracy", "loop_ratio": "loop_ms"}.get(column, column)
    own, base = row.paper.get(of), next((other.paper[of] for other in rows if of in other.paper), None)
    if of == column or own is None or base is None:
        return None
    return Value(own.mean - base.mean if column == "gain" else own.mean / base.mean)


def _outcome(experiment: Experiment) -> str:
    """What training is for: accuracy where it was measured, the test loss elsewhere."""
    return "accuracy" if any("accuracy" in run.finals for run in experiment.runs) else "test_loss"


def _of_ours(experiment: Experiment, row: Row, column: str) -> list[float]:
    """One number for each seed that has it."""
    if column == "paired_difference":
        return _paired(experiment, row)
    through = column not in OUTCOMES  # whether those that failed count, too
    runs = [run for run in experiment.of(row.run) if through or not run.failed]
    if column not in ("gain", "loop_ratio"):
        return [run.finals[column] for run in runs if column in run.finals]
    key = "accuracy" if column == "gain" else "loop_ms"
    bases = [base for base in experiment.of(row.baseline) if key in base.finals and (through or not base.failed)]
    found = []
    for run in runs:
        # An outcome is compared with one after the same training, a time with one taken in the same way.
        alike = conditions if column == "loop_ratio" else _training
        base = _base(run, [base for base in bases if alike(base) == alike(run)], key)
        if base is not None and key in run.finals:
            found.append(run.finals[key] - base if column == "gain" else run.finals[key] / base)
    return found


def _paired(experiment: Experiment, row: Row) -> list[float]:
    """Differences from the baseline's run of the same seed, for the seeds that both have."""
    key = _outcome(experiment)
    own, base = (
        {(run.seed, _training(run)): METRICS[key].scale * run.finals[key] for run in runs if key in run.finals}
        for runs in (experiment.of(row.run), experiment.of(row.baseline))
    )
    failed = {run.seed for name in (row.run, row.baseline) for run in experiment.of(name) if run.failed}
    return [own[alike] - base[alike] for alike in own if alike in base and alike[0] not in failed]


def _training(run: Run) -> tuple[int, int]:
    """How long it trained, and was meant to."""
    return run.epochs_run, run.epochs


def _base(run: Run, bases: list[Run], key: str) -> float | None:
    """The baseline's number for this run: that of its seed, or else the mean over seeds."""
    bases = [base for base in bases if base.seed == run.seed] or bases
    return statistics.fmean(base.finals[key] for base in bases) if bases else None
