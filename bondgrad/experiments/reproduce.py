"""`bondgrad run` and `bondgrad reproduce`: from a file to results."""

from dataclasses import dataclass
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bondgrad import report
from bondgrad.experiments import config
from bondgrad.experiments.config import Experiment
from bondgrad.experiments.cost import cost
from bondgrad.experiments.gate_sweep import gate_sweep
from bondgrad.experiments.runner import AT_ONCE, Runner
from bondgrad.experiments.store import Store


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
    graph: bool | None = None
    at_once: int = AT_ONCE
    timed: bool = True
    tensorboard: bool = False


def run_experiment(experiment: Experiment, options: Options, console: Console) -> bool:
    """All its runs, and what they brought in `options.output`; False if it was interrupted."""
    changes = {name: getattr(options, name) for name in ("epochs", "steps", "measure_every", "precision", "graph")}
    whole = experiment.changed(options.seeds, **changes)
    chosen = whole.only(options.only) if options.only else whole
    store = Store(options.output, whole, options.command, options.tensorboard)
    store.config()
    if chosen.sweep is not None:
        store.results(gate_sweep(**chosen.sweep))
    finished = Runner(chosen, store, options.pictures, options.device, options.at_once, options.timed).run(console)
    store.results()
    found = report.read(options.output)
    for table in report.tables(found):
        console.print(table)
    report.draw(found, options.output)
    where = escape(str(options.output))
    if not finished:
        console.print(f"[yellow]Interrupted.[/] The same command goes on where this one was; so far: {where}")
        return False
    console.print(f"Results and figures in [bold]{where}[/]; `bondgrad report` makes a page of all there are.")
    return True


def overview() -> Table:
    """All of the paper's results, with what they cost at its full protocol."""
    table = Table(title="The paper's results, at full protocol", box=box.SIMPLE)
    for heading in ("", "data", "runs, seeds, epochs", "steps", "evaluations"):
        words = heading in ("", "data")
        table.add_column(heading, justify="left" if words else "right", overflow="fold", min_width=9)
    for name in config.names():
        experiment = config.load(config.PAPER / f"{name}.yaml")
        if experiment.name != name:
            table.add_row(name, f"as {experiment.name}")
        elif not experiment.runs:
            table.add_row(name, "sweep only")
        else:
            total = cost(experiment)
            data = sorted({run.data.removeprefix("california_") for run in experiment.runs})
            epochs = max(run.epochs for run in experiment.runs)
            size = f"{len(experiment.runs)} x {len(experiment.seeds)} x {epochs}"
            table.add_row(name, ", ".join(data), size, f"{total.steps:,}", f"{total.evaluations:.1e}")
    return table
