"""What a folder of results holds. Text that it does not have is ""."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """One training run, of one seed."""

    run: str
    seed: int
    method: str
    command: str
    bondgrad: str
    torch: str
    machine: str
    gpu: str
    precision: str
    graph: bool
    compiled: bool
    same_as: str  # the experiment and run that it was taken over from
    batch: int | None
    epochs: int
    epochs_run: int
    failed: str  # why it ended early, if it could not go on
    steps_of_epoch: int | None
    finals: dict[str, float]  # what it ended with; without what is not known
    loop_quartiles: list[float]  # around the median of loop times, if known
    at: dict[str, float | str]  # where it stands in a sweep
    curve: dict[str, list[float]]  # by epoch; nan where nothing was measured
    trace: dict[str, list[float]]  # by step

    @property
    def hardware(self) -> str:
        """Where it ran, in words."""
        return f"{self.gpu}, {self.machine}" if self.gpu else self.machine


def conditions(run: Run) -> tuple[object, ...]:
    """All but the method that decides how long a step of the run takes."""
    return run.machine, run.gpu, run.graph, run.compiled, run.precision


@dataclass(frozen=True)
class Value:
    """The paper's mean, with its deviations where it has any."""

    mean: float
    deviation: float | None = None  # over seeds
    over_steps: float | None = None  # over single training steps


@dataclass(frozen=True)
class Row:
    """One run of a table, and what the paper has for it."""

    run: str
    baseline: str
    paper: dict[str, Value]


@dataclass(frozen=True)
class Table:
    """One table of the paper."""

    title: str
    columns: list[str]
    rows: list[Row]


@dataclass(frozen=True)
class Plot:
    """One figure that is asked for."""

    kind: str
    title: str
    x: str
    y: str
    series: str
    runs: list[str]  # by name; all if there are none
    first: int  # epoch that is shown
    x_label: str
    y_label: str


@dataclass(frozen=True)
class Line:
    """One line that was not measured in training."""

    label: str
    panel: str
    x: list[float]
    y: list[float]


@dataclass(frozen=True)
class Paper:
    """The paper's protocol, as far as it says."""

    label: str
    gpu: str
    ours: bool  # whether the protocol is not the paper's


@dataclass(frozen=True)
class Experiment:
    """All there is in one folder."""

    folder: str
    name: str
    title: str
    says: str
    notes: str
    paper: Paper
    tables: list[Table]
    plots: list[Plot]
    planned_epochs: dict[str, int]  # of every run that the experiment has
    planned_seeds: list[int]
    planned_steps: dict[str, int | None]  # of an epoch; None: all the data
    planned_precision: dict[str, str]
    runs: list[Run]
    lines: list[Line]

    def of(self, name: str) -> list[Run]:
        """The runs of this name, one for each seed."""
        return [run for run in self.runs if run.run == name]
