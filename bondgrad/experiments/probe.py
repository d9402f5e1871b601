"""The command `bondgrad probe`: measure, show, and leave the numbers behind."""

import contextlib
import ctypes
import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console, Group
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text
from torch import Tensor

from bondgrad.calling._answers import from_numpy
from bondgrad.calling._inputs import Limits
from bondgrad.errors import BoxError, checked_seed
from bondgrad.probing import Report, Session
from bondgrad.probing._number_format import duration
from bondgrad.probing._report import DEFAULT_BATCH, DEFAULT_STEPS

DRAWN = 256  # rows, where no sample is given
BARS = "▁▂▃▄▅▆▇█"
FINEST = 1e-4  # disagreement of slopes that is drawn as nothing
MEASUREMENTS = 13  # names that a session gives, at most


class UserError(Exception):
    """A mistake in what was asked for; its text is all that need be shown."""


def load_function(target: str) -> Callable[..., Any]:
    """The function that MODULE:FUNCTION names, the current directory being searched as well."""
    module_name, colon, name = target.partition(":")
    if not colon or not module_name or not name:
        raise UserError(f"{target!r} is not of the form MODULE:FUNCTION, such as my_simulator:run")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise UserError(f"the module {module_name!r} of {target!r} could not be imported: {why}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise UserError(f"{module_name!r} has no {name!r}: check the part behind the colon of {target!r}")
        found = getattr(found, part)
    if not callable(found):
        raise UserError(f"{target!r} is not a function but {type(found).__name__}")
    if isinstance(found, type):
        raise UserError(f"{target!r} is a class: name an instance of it, or a function that makes rows of outputs")
    function: Callable[..., Any] = found
    return function


def parse_limits(texts: tuple[str, str], in_features: int) -> tuple[list[float], list[float]]:
    """The lower and the upper limit of every input, of numbers or lists such as -1,-1,0."""
    try:
        low, high = ([float(number) for number in text.split(",")] for text in texts)
    except ValueError as error:
        raise UserError(f"--limits must be numbers, or one for each input as -1,-1,0, got {' '.join(texts)}") from error
    low, high = (limit * in_features if len(limit) == 1 else limit for limit in (low, high))
    Limits((low, high), in_features)
    return low, high


def load_array(option: str, path: Path) -> Tensor:
    """The tensor in a .npy file of numbers."""
    try:
        array = np.load(path)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{option} {path} could not be read as a .npy file: {error}") from error
    if not isinstance(array, np.ndarray):
        array.close()
        raise UserError(f"{option} {path} holds several arrays: save each by itself, with numpy.save")
    if array.dtype.kind not in "fiu":
        raise UserError(f"{option} {path} must hold numbers, got {array.dtype}")
    return from_numpy(array)


def sample_rows(
    path: Path | None, in_features: int, limits: tuple[list[float], list[float]] | None, seed: int
) -> tuple[Tensor, str]:
    """Typical rows [N, in_features], and in words where they came from."""
    if path is not None:
        rows = load_array("--sample", path)
        if rows.ndim != 2 or rows.shape[1] != in_features:
            raise UserError(f"--sample must be [rows, --in-features {in_features}], got {list(rows.shape)}")
        rows = rows if rows.dtype.is_floating_point else rows.float()
        return rows, f"{len(rows):,} rows of {path.name}"
    generator = torch.Generator().manual_seed(seed)
    if limits is not None:
        low, high = (torch.tensor(limit, dtype=torch.float64) for limit in limits)
        if not bool((torch.cat((low, high)).abs() < torch.finfo(torch.float32).max / 2).all()):
            raise UserError("no rows can be drawn within infinite --limits: give finite ones, or a --sample")
        drawn = torch.rand(DRAWN, in_features, generator=generator)
        return (low + (high - low) * drawn).float(), f"{DRAWN} rows drawn uniformly within the limits"
    words = f"{DRAWN} rows drawn from a standard normal distribution (give --sample for typical ones)"
    return torch.randn(DRAWN, in_features, generator=generator), words


def context_of(paths: list[Path], rows: int, sampled: bool) -> tuple[Tensor, ...]:
    """The contexts [rows, ...] in .npy files; those of rows that were drawn are taken in turn."""
    contexts = [load_array("--context", path) for path in paths]
    for path, context in zip(paths, contexts, strict=True):
        if context.ndim == 0 or (sampled and len(context) != rows):
            raise UserError(f"--context {path} must have one entry for each of the {rows} rows of --sample")
    return tuple(context[torch.arange(rows) % len(context)] for context in contexts)


@contextlib.contextmanager
def _nothing_printed() -> Iterator[None]:
    """What the box and its libraries print goes to the standard error, so that the output is JSON and nothing else."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        with contextlib.suppress(OSError, TypeError, AttributeError):  # what C has printed and not yet written
            ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)


def run_probe(session: Session, console: Console) -> Report:
    """Run the session, with progress shown. An interrupt ends the measuring, not the report."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[asked]:,} evaluations"))
    with contextlib.closing(session.run()) as names, Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=MEASUREMENTS, asked=0)
        try:
            for name in names:
                progress.update(task, description=name, advance=1, asked=session.sampler.evaluations)
        except KeyboardInterrupt:
            console.print("[yellow]Interrupted:[/] what follows is what was measured until now.")
    return session.report()


def probe_command(
    target: str,
    in_features: int,
    *,
    limits: tuple[str, str] | None,
    sample: Path | None,
    context: list[Path],
    options: dict[str, Any],
    batch: int,
    steps: int,
    as_json: bool,
    plot_file: Path | None,
    console: Console,
) -> None:
    """All of `bondgrad probe`. `options` go to the session: budget, seconds, seed."""
    if plot_file is not None and not plot_file.parent.is_dir():
        raise UserError(f"--plot {plot_file} cannot be written: there is no folder {plot_file.parent}")
    module, _, name = target.partition(":")
    with _nothing_printed() if as_json else contextlib.nullcontext():
        fn = load_function(target)
        try:
            checked_seed(options["seed"])
            bounds = None if limits is None else parse_limits(limits, in_features)
            x, words = sample_rows(sample, in_features, bounds, options["seed"])
            contexts = context_of(context, len(x), sample is not None)
            session = Session(fn, x, contexts, limits=bounds, **options)
            report = run_probe(session, Console(stderr=True) if as_json else console)
            report = replace(report, name=name, module=module, sample=words, batch=batch)
        except (BoxError, ValueError) as error:
            raise UserError(str(error)) from error
    if as_json:
        sys.stdout.write(json.dumps(report.as_dict(batch, steps), indent=1, allow_nan=False) + "\n")
    else:
        show(report, console, batch, steps)
    if plot_file is not None:
        plot(report, plot_file)


def show(report: Report, console: Console, batch: int = DEFAULT_BATCH, steps: int = DEFAULT_STEPS) -> None:
    """Print the report in a terminal."""
    findings = Table.grid(padding=(0, 2))
    findings.add_column(style="bold", no_wrap=True)
    findings.add_column()
    for title, words in report.words.items():
        findings.add_row(title, Text(words))
        if title == "Steps" and report.steps is not None:
            findings.add_row("", ladder(report))
    for text in report.left_out:
        findings.add_row("[yellow]Left out[/]", Text(text))
    for text in report.warnings:
        findings.add_row("[yellow]Mind[/]", Text(text))
    costs = Table(title=f"Cost of {steps:,} training steps of {batch} rows, the box alone", title_justify="left")
    for heading in ("estimator", "evaluations a step", "time of a step", "in all", ""):
        costs.add_column(heading, justify="left" if heading == "estimator" else "right")
    for estimator, cost in report.cost(batch, steps).items():
        times = ["-" if cost.seconds is None else duration(n * cost.seconds) for n in (1, steps)]
        costs.add_row(estimator, f"{cost.evaluations:,}", *times, "extrapolated" if cost.extrapolated else "")
    verdict = Panel(Text(report.verdict, style="bold green"), title=report.name, title_align="left")
    console.print(Group(verdict, Text(report.about, style="dim"), "", findings, ""))
    # Lines of code are never broken, nor filled up with spaces: the terminal does what it must, and they can be pasted.
    console.print(Syntax("", "python", background_color="default").highlight(report.code), soft_wrap=True)
    console.print(costs)


def ladder(report: Report) -> Text:
    """How well slopes agree, by step: low is good."""
    steps = report.steps
    assert steps is not None
    text = Text(f"{steps.ladder[0]:.0e} ", style="dim")
    for step, error in zip(steps.ladder, steps.disagreement, strict=False):
        within = steps.low_5 is not None and steps.high_5 is not None and steps.low_5 <= step < steps.high_5
        text.append(" " if error is None else BARS[_height(error)], style="green" if within else "red")
    text.append(f" {steps.ladder[-1]:.0e} of the spread: how much slopes disagree, lower is better", style="dim")
    return text


def _height(error: float) -> int:
    """Of the bar, on a logarithmic scale up to one."""
    share = 1 - math.log(max(min(error, 1.0), FINEST)) / math.log(FINEST)
    return round(share * (len(BARS) - 1))


def plot(report: Report, path: Path) -> None:
    """The ladder of steps as a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps = report.steps
    if steps is not None:
        known = [(h, e) for h, e in zip(steps.ladder, steps.disagreement, strict=False) if e]
        if known:
            axes.loglog(*zip(*known, strict=True), "o-", lw=1.5, label="disagreement with the next step")
        if steps.low_5 is not None and steps.high_5 is not None:
            axes.axvspan(steps.low_5, steps.high_5, color="tab:green", alpha=0.15, label="agree to 5 %")
        if steps.best is not None:
            axes.axvline(steps.best, color="tab:green", ls="--", label="best step")
        axes.axhline(0.05, color="grey", lw=0.8)
        axes.legend()
    axes.set(xlabel="step, in spreads of the input", ylabel="relative difference of slopes", title=report.verdict)
    axes.title.set_fontsize(9)
    axes.title.set_wrap(True)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
