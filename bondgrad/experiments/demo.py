"""The demo: California Housing through a black box, by four methods side by side."""

import contextlib
import json
import os
import platform
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from bondgrad._version import __version__
from bondgrad.experiments import config
from bondgrad.experiments.comparison import column
from bondgrad.experiments.trainer import Run

# SPSA has a tenth of the paper's rate, with which it hardly leaves the start here: see benchmarks/spsa_search.py.
RUNS = ("NFN AD", "NFN BOND", "NFN BONDS", "NFN SPSA, rate 0.001")
COLOURS = {"AD": "#444444", "BOND": "#1f77b4", "BONDS": "#2ca02c", "SPSA": "#d62728"}


def run_demo(epochs: int, seeds: list[int], output: Path, console: Console) -> None:
    """Train, show, and leave `demo.json` and `demo.png` in `output`. An interrupt ends the training, not the demo."""
    console.print(
        "[bold]California Housing through a black box.[/] The network before the box is trained with the box's exact "
        "gradient (AD), and with three methods that may only call the box: BOND, BONDS and SPSA.\n"
    )
    output.mkdir(parents=True, exist_ok=True)
    runs: list[Run] = []
    try:
        with one_thread():
            for seed in seeds:
                batch = demo_runs(seed, epochs)
                runs += batch
                train_side_by_side(batch, console)
    except KeyboardInterrupt:
        console.print("[yellow]Interrupted:[/] what follows is what was measured until now.")
    runs = [run for run in runs if run.history]
    if not runs:
        console.print("Not one epoch was finished, so there is nothing to show.")
        return
    results = summary(runs, epochs)
    console.print(results_table(results))
    (output / "demo.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(runs, output / "demo.png")
    console.print(f"Curves in [bold]{output / 'demo.png'}[/], numbers in [bold]{output / 'demo.json'}[/].")


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """A context in which torch works in one thread: networks as small as these lose more by waiting for others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def demo_runs(seed: int, epochs: int) -> list[Run]:
    """The paper's experiment, one run for each method."""
    paper = config.load(config.PAPER / "calhouse.yaml").only(RUNS)
    here = torch.device("cpu")
    return [Run(replace(settings, epochs=epochs, measure_every=1), seed, Path(), here) for settings in paper.runs]


def train_side_by_side(runs: list[Run], console: Console) -> None:
    """One step of each in turn, so that whatever else the machine does falls on all alike."""
    columns = (
        TextColumn("{task.description:<22s}"),
        BarColumn(),
        TextColumn("epoch {task.fields[epoch]}  test loss {task.fields[loss]}  signs {task.fields[signs]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        total = runs[0].settings.epochs * runs[0].steps_of_epoch
        tasks = {
            run: progress.add_task(label(method(run), policy(run)), total=total, epoch=0, loss="-", signs="-")
            for run in runs
        }
        while not runs[-1].done:
            for run in runs:
                progress.advance(tasks[run], run.turn(1, timed=True))
                if run.batch == 0:
                    last, measured = run.history[-1], signs(run)
                    mean = f"{100 * statistics.fmean(measured):.2f} %" if measured else "-"
                    progress.update(tasks[run], epoch=run.epoch, loss=f"{last['test_loss']:.3f}", signs=mean)


def method(run: Run) -> str:
    """AD, BOND, BONDS or SPSA."""
    return run.settings.gradient.method


def policy(run: Run) -> str | None:
    """The name of the policy that chooses the steps; None where no policy does."""
    return str(run.settings.gradient.policy["kind"]) if method(run) in ("BOND", "BONDS") else None


def label(method: str, policy: str | None) -> str:
    """The name of a method with that of its policy, as a BlackBox would be given it."""
    return method if policy is None else f'{method}, policy="{policy}"'


def test_losses(run: Run) -> list[float]:
    """After each epoch."""
    return [entry["test_loss"] for entry in run.history]


def signs(run: Run) -> list[float]:
    """The share of right ones in each step of the epochs that are over, for SPSA at the parameters; none for AD."""
    where = "parameter_sign_accuracy" if method(run) == "SPSA" else "sign_accuracy"
    return column(run.trace, where)


def summary(runs: list[Run], epochs: int) -> dict[str, Any]:
    """All that was measured, and how."""
    return {
        "what": "California Housing, read-in 8-100-100-5, frozen tanh box 5-500-5, read-out 5-100-100-1, Huber loss",
        "epochs": epochs,
        "seeds": sorted({run.seed for run in runs}),
        "batch": runs[0].settings.batch,
        "spsa_mu": runs[-1].settings.gradient.mu,
        "bondgrad": __version__,
        "torch": torch.__version__,
        "threads": 1,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "runs": [
            {
                "method": method(run),
                "policy": policy(run),
                "seed": run.seed,
                "test_loss": [round(loss, 5) for loss in test_losses(run)],
                "sign_accuracy": statistics.fmean(measured) if (measured := signs(run)) else None,
                "ms_per_step": statistics.median(run.milliseconds),
                "evaluations_per_step": run.asked / run.steps,
            }
            for run in runs
        ],
    }


def by_method(results: dict[str, Any], key: str) -> dict[str, list[float]]:
    """One number per seed, for each method that has it."""
    values: dict[str, list[float]] = {}
    for run in results["runs"]:
        value = run[key][-1] if isinstance(run[key], list) else run[key]
        if value is not None:
            values.setdefault(run["method"], []).append(value)
    return values


def results_table(results: dict[str, Any]) -> Table:
    """What a person wants to see."""
    seeds = ", ".join(map(str, results["seeds"]))
    table = Table(title=f"{results['epochs']} epochs, batch {results['batch']}, seeds {seeds}")
    for heading in ("", "policy", "test loss", "sign accuracy", "ms per step", "x AD", "evaluations per step"):
        table.add_column(heading, justify="right")
    losses, right = by_method(results, "test_loss"), by_method(results, "sign_accuracy")
    times, evaluations = by_method(results, "ms_per_step"), by_method(results, "evaluations_per_step")
    policies = {run["method"]: run["policy"] for run in results["runs"]}
    for name, loss in losses.items():
        time = statistics.fmean(times[name])
        table.add_row(
            name,
            policies[name] or "-",
            spread(loss, "{:.3f}"),
            spread([100 * s for s in right[name]], "{:.3f}") + " %" if name in right else "exact",
            f"{time:.2f}",
            f"{time / statistics.fmean(times['AD']):.2f}" if "AD" in times else "-",
            f"{statistics.fmean(evaluations[name]):.0f}",
        )
    return table


def spread(values: list[float], form: str) -> str:
    """The mean, and the deviation where there is more than one value."""
    mean = form.format(statistics.fmean(values))
    return mean if len(values) == 1 else f"{mean} ± {form.format(statistics.stdev(values))}"


def plot(runs: list[Run], path: Path) -> None:
    """Test loss by epoch, and sign accuracy in the course of training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    loss_axes, sign_axes = figure.subplots(1, 2)
    for run in runs:
        style = {
            "color": COLOURS[method(run)],
            "label": label(method(run), policy(run)) if run.seed == runs[0].seed else None,
        }
        dashed = "--" if method(run) == "BOND" else "-"  # lies on AD's curve
        losses, measured = test_losses(run), signs(run)
        loss_axes.plot(range(1, len(losses) + 1), losses, dashed, lw=2, **style)
        if measured:
            window = max(1, len(measured) // 100)
            means = torch.tensor(measured[: len(measured) // window * window]).view(-1, window).mean(1)
            steps = [window * (i + 1) for i in range(len(means))]
            sign_axes.plot(steps, 100 * means, lw=1.5, **style)
    loss_axes.set(xlabel="epoch", ylabel="test loss (Huber, 10,000 USD)", title="The network learns")
    sign_axes.set(xlabel="step", ylabel="right signs (%)", title="How right the gradient's signs are", ylim=(0, 102))
    for axes in (loss_axes, sign_axes):
        axes.grid(alpha=0.3)
    loss_axes.legend(loc="upper right")
    sign_axes.legend(loc="lower right")
    figure.savefig(path, dpi=130)
