"""`bondgrad run` and `bondgrad reproduce`: from a file to results."""

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bondgrad import report
from bondgrad.experiments import config, task
from bondgrad.experiments.config import Experiment
from bondgrad.experiments.cost import cost
from bondgrad.experiments.evaluation import without_journal
from bondgrad.experiments.gate_sweep import gate_sweep
from bondgrad.experiments.model import Parts, build
from bondgrad.experiments.runner import AT_ONCE, Runner
from bondgrad.experiments.settings import Settings
from bondgrad.experiments.store import Store
from bondgrad.experiments.task import Task


@dataclass(frozen=True)
class Options:
    """What the command line may change, and where things are."""

    output: Path
    pictures: Path
    device: torch.device
    command: str
    only: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    epochs: int | None = None
    steps: int | None = None
    measure_every: int | None = None
    precision: str | None = None
    compile: bool | None = None
    graph: bool | None = None
    at_once: int = AT_ONCE
    timed: bool = True
    tensorboard: bool = False


def run_experiment(experiment: Experiment, options: Options, console: Console) -> bool:
    """All its runs, and what they brought in `options.output`; False if it was interrupted."""
    names = ("epochs", "steps", "measure_every", "precision", "compile", "graph")
    changes = {name: getattr(options, name) for name in names}
    chosen = (experiment.only(options.only) if options.only else experiment).changed(options.seeds, **changes)
    report.shown(experiment.as_dict())
    check(chosen, options.pictures)
    store = Store(options.output, experiment, options.command, options.tensorboard, chosen)
    store.config()
    if chosen.sweep is not None:
        store.results(gate_sweep(**chosen.sweep))
    try:
        finished = Runner(chosen, store, options.pictures, options.device, options.at_once, options.timed).run(console)
    except torch.cuda.OutOfMemoryError as error:
        raise ValueError(f"the GPU's memory is too small for this: give --side-by-side 1 ({error})") from error
    finally:
        store.results()
        store.close()
    found = report.read(options.output)
    for table in report.tables(found):
        console.print(table)
    console.print(report.label(found).words.capitalize() + ".")
    report.draw(found, options.output)
    where = escape(str(options.output))
    if not finished:
        console.print(f"[yellow]Interrupted.[/] The same command goes on where this one was; so far: {where}")
        return False
    console.print(f"Results and figures in [bold]{where}[/]; `bondgrad report {where}` makes a page of them.")
    return True


def check(experiment: Experiment, folder: Path) -> None:
    """Refuse at once what would otherwise fail after hours.

    That is data that are not there, and parts that cannot be built or do not fit together.
    """
    for name in {run.data for run in experiment.runs} - {"california_housing"}:
        task.pictures(name, folder)
    shapes: set[str] = set()
    different = {
        repr((run.data, run.batch, run.read_in, run.box, run.read_out, run.gradient)): run for run in experiment.runs
    }
    for settings in different.values():
        try:
            parts = build(without_journal(settings), 0, torch.device("cpu"))
            parts.close()
            shape = repr((settings.data, settings.batch, settings.read_in, settings.box, settings.read_out))
            if shape not in shapes:  # of a sweep, once is enough
                _try_out(settings, parts, folder)
            shapes.add(shape)
        except (RuntimeError, TypeError, ValueError, LookupError) as error:
            raise ValueError(f"{settings.run}: {error}") from error


def _try_out(settings: Settings, parts: Parts, folder: Path) -> None:
    """Two rows of the data, from end to end."""
    data = Task(settings, 0, folder, torch.device("cpu"))
    x, _ = data.batch(torch.arange(2), torch.Generator())
    for part in parts[:3]:
        if part is not None:
            part.eval()
    with torch.no_grad():
        a = parts.read_in(x)
        wanted = a.shape[1] if parts.through is None else parts.through.reservoir.in_features
        if a.shape[1] != wanted:
            raise ValueError(f"read_in has {a.shape[1]} outputs, and the box {wanted} inputs")
        answer = parts.read_out(a if parts.through is None else parts.through(a))
    if answer.shape[1] != data.outputs:
        raise ValueError(f"read_out has {answer.shape[1]} outputs, and {settings.data} {data.outputs} to predict")


def overview() -> Table:
    """All of the paper's results, with what they cost at its full protocol. Fits into 80 columns."""
    table = Table(title="The paper's results, at full protocol", box=None, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for heading in ("runs", "epochs", "steps", "rows to\nthe box"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("data")
    same = []
    for name in config.names():
        experiment = config.load(config.PAPER / f"{name}.yaml")
        if experiment.name != name:
            same.append(f"{name} comes with {experiment.name}")
        elif not experiment.runs:
            table.add_row(name, *[""] * 4, "no training")
        else:
            total = cost(experiment)
            data = sorted({run.data.removeprefix("california_") for run in experiment.runs})
            epochs = max(run.epochs for run in experiment.runs)
            runs = len(experiment.runs) * len(experiment.seeds)
            table.add_row(name, str(runs), str(epochs), f"{total.steps:,}", f"{total.evaluations:.0e}", ", ".join(data))
    table.caption = "; ".join(same)
    return table
