"""The command `bondgrad probe`: measure, show, and leave the numbers behind."""

import contextlib
import ctypes
import importlib
import json
import math
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console, Group, RenderableType
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


def sample_rows(
    path: Path | None, in_features: int, limits: tuple[float, float] | None, seed: int
) -> tuple[Tensor, str]:
    """Typical rows [N, in_features], and in words where they came from."""
    if path is not None:
        try:
            array = np.load(path)
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"--sample {path} could not be read as a .npy file: {error}") from error
        if not isinstance(array, np.ndarray):
            array.close()
            raise UserError(f"--sample {path} holds several arrays: save the rows by themselves, with numpy.save")
        if array.ndim != 2 or array.shape[1] != in_features or array.dtype.kind not in "fiu":
            raise UserError(
                f"--sample must be numbers [rows, --in-features {in_features}], got {list(array.shape)}, {array.dtype}"
            )
        rows = from_numpy(array)
        rows = rows if rows.dtype.is_floating_point else rows.float()
        return rows, f"{len(rows):,} rows of {path.name}"
    generator = torch.Generator().manual_seed(seed)
    if limits is not None:
        low, high = limits
        if not all(abs(limit) < torch.finfo(torch.float32).max / 2 for limit in limits):
            raise UserError(f"no rows can be drawn within --limits {low:g} {high:g}: give finite ones, or a --sample")
        drawn = torch.rand(DRAWN, in_features, generator=generator)
        return low + (high - low) * drawn, f"{DRAWN} rows drawn uniformly within the limits"
    words = f"{DRAWN} rows drawn from a standard normal distribution (give --sample for typical ones)"
    return torch.randn(DRAWN, in_features, generator=generator), words


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
    limits: tuple[float, float] | None,
    sample: Path | None,
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
            if limits is not None:
                Limits(limits, in_features)
            x, words = sample_rows(sample, in_features, limits, options["seed"])
            session = Session(fn, x, limits=limits, **options)
            report = run_probe(session, Console(stderr=True) if as_json else console)
            report = replace(report, name=name, module=module, sample=words, batch=batch)
        except (BoxError, ValueError) as error:
            raise UserError(str(error)) from error
    if as_json:
        sys.stdout.write(json.dumps(report.as_dict(batch, steps), indent=1, allow_nan=False) + "\n")
    else:
        console.print(render(report, batch, steps))
    if plot_file is not None:
        plot(report, plot_file)


def render(report: Report, batch: int = DEFAULT_BATCH, steps: int = DEFAULT_STEPS) -> RenderableType:
    """The report for a terminal."""
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
    code = Syntax(narrow(report.code), "python", background_color="default", word_wrap=True)
    verdict = Panel(Text(report.verdict, style="bold green"), title=report.name, title_align="left")
    return Group(verdict, Text(report.about, style="dim"), "", findings, "", code, "", costs)


def narrow(code: str, width: int = 78) -> str:
    """The code with the comments of long lines on lines of their own, so that it can be pasted from a terminal."""
    lines = []
    for line in code.splitlines():
        statement, mark, comment = line.partition("  # ")
        if len(line) > width and mark:
            indent = " " * (len(line) - len(line.lstrip()))
            lines += textwrap.wrap(comment, width, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
            line = statement
        lines.append(line)
    return "\n".join(lines)


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
