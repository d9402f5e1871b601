"""The command `bondgrad journal`: what a file of evaluations holds, as tables and as a picture."""

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from bondgrad.evaluators import JournalFile
from bondgrad.probing._number_format import duration, percent
from bondgrad.report._colours import PALETTE

QUERY = """
SELECT run, worker, start, duration,
  start + duration * count(*) OVER (PARTITION BY run, number, attempt, call), purpose,
  CASE WHEN failure IS NOT NULL THEN failure WHEN status = 'ok' THEN '' ELSE status END
FROM evaluations ORDER BY rowid
"""
UNITS = (("hour", 3600.0, "%Y-%m-%d %H:00"), ("minute", 60.0, "%H:%M"))
SHORT = 3 * 3600.0  # seconds up to which evaluations are counted by minute
MOST_LINES = 48  # of the table by time
BAR = 30  # characters of its longest bar
QUANTILES = (0.5, 0.9, 0.99)
BINS = 60  # of the picture


@dataclass(frozen=True)
class Evaluations:
    """What is shown of the N evaluations of a journal."""

    run: np.ndarray  # [N] openings of the file
    worker: np.ndarray  # [N] numbers
    start: np.ndarray  # [N] seconds since the epoch
    duration: np.ndarray  # [N] seconds for a row
    end: np.ndarray  # [N] of the call, which may have had several rows
    purpose: np.ndarray  # [N]
    failure: np.ndarray  # [N] what became of those without a finite output; "" for all others

    @property
    def failed(self) -> np.ndarray:
        """Which brought no finite output, [N]."""
        return np.asarray(self.failure != "")

    def seconds(self) -> float:
        """The time over which evaluations were made, without that between two openings of the file."""
        runs = [self.run == run for run in np.unique(self.run)]
        return float(sum(self.end[run].max() - self.start[run].min() for run in runs))


def read(file: JournalFile) -> Evaluations:
    """All evaluations of a journal."""
    rows = file.select(QUERY)
    if not rows:
        raise ValueError(f"{file.path} has no evaluations yet: train with evaluator=Journal(..., path) first")
    return Evaluations(*map(np.array, zip(*rows, strict=True)))


def journal_command(path: Path, plot_file: Path | None, console: Console) -> None:
    """All of `bondgrad journal`."""
    if plot_file is not None and not plot_file.parent.is_dir():
        raise ValueError(f"--plot {plot_file} cannot be written: there is no folder {plot_file.parent}")
    file = JournalFile(path)
    try:
        found = read(file)
        console.print(render(found, file))
        if plot_file is not None:
            plot(found, f"{file.facts.get('box')}, {file.path.name}", plot_file)
    finally:
        file.close()


def render(found: Evaluations, file: JournalFile) -> RenderableType:
    """The whole report."""
    facts, n, failed = file.facts, len(found.start), int(found.failed.sum())
    began, ended = found.start.min(), found.end.max()
    runs = len(np.unique(found.run))
    about = Text(
        f"{n:,} evaluations of {facts.get('box')} ({facts.get('in_features')} inputs, {facts.get('out_features')} "
        f"outputs), {failed:,} without a finite output, from {_clock(began)} to {_clock(ended)} in {runs} "
        f"{'run' if runs == 1 else 'runs'}, {n / max(found.seconds(), 1e-9):,.3g} a second",
        style="bold",
    )
    tables: list[RenderableType] = [about, "", by_time(found), "", by_worker(found), "", by_purpose(found)]
    return Group(*tables, "", by_failure(found)) if failed else Group(*tables)


def by_time(found: Evaluations) -> Table:
    """Evaluations by hour, or by minute if there are few hours."""
    name, size, form = UNITS[int(np.ptp(found.start) < SHORT)]
    all_of_them = Counter((found.start // size).astype(int).tolist())
    failed = Counter((found.start[found.failed] // size).astype(int).tolist())
    shown = sorted(all_of_them)[-MOST_LINES:]
    left_out = len(all_of_them) - len(shown)
    table = _table(f"By {name}" + (f", the last {len(shown)} of {len(all_of_them)}" if left_out else ""))
    for heading in (name, "evaluations", "failed", ""):
        table.add_column(heading, justify="left" if heading in (name, "") else "right")
    most = max(all_of_them[each] for each in shown)
    for each in shown:
        bar = "█" * max(1, round(BAR * all_of_them[each] / most))
        when = time.strftime(form, time.localtime(each * size))
        table.add_row(when, f"{all_of_them[each]:,}", f"{failed[each]:,}", bar)
    return table


def by_worker(found: Evaluations) -> Table:
    """What each worker has done, and all of them together."""
    table = _table("By worker, with the time that one evaluation takes")
    for heading in (
        "worker",
        "evaluations",
        "failed",
        "busy",
        "median",
        *(f"{100 * q:g} %" for q in QUANTILES[1:]),
        "most",
    ):
        table.add_column(heading, justify="right")
    seconds, workers = max(found.seconds(), 1e-9), np.unique(found.worker)
    groups = [(str(worker), found.worker == worker) for worker in workers]
    if len(workers) > 1:
        groups.append(("all", np.ones(len(found.worker), dtype=bool)))
    for name, chosen in groups:
        latency = found.duration[chosen]
        busy = latency.sum() / seconds / (len(workers) if name == "all" else 1)
        times = [*np.quantile(latency, QUANTILES).tolist(), float(latency.max())]
        counts = int(chosen.sum()), int(found.failed[chosen].sum())
        table.add_row(name, *(f"{c:,}" for c in counts), percent(min(busy, 1.0)), *map(duration, times))
    return table


def by_purpose(found: Evaluations) -> Table:
    """What evaluations were for."""
    table = _table("By purpose")
    for heading in ("purpose", "evaluations", "share", "failed"):
        table.add_column(heading, justify="left" if heading == "purpose" else "right")
    for name, count in Counter(found.purpose.tolist()).most_common():
        failed = int(found.failed[found.purpose == name].sum())
        table.add_row(name, f"{count:,}", percent(count / len(found.purpose)), f"{failed:,}")
    return table


def by_failure(found: Evaluations) -> Table:
    """Evaluations without a finite output, by the type of the error, with the last message of each type."""
    table = _table("Failures")
    for heading in ("kind", "evaluations", "last message"):
        table.add_column(heading, justify="right" if heading == "evaluations" else "left")
    failures = found.failure[found.failed].tolist()
    last = {text.partition(":")[0]: text.partition(":")[2].strip() for text in failures}
    for kind, count in Counter(text.partition(":")[0] for text in failures).most_common():
        table.add_row(kind, f"{count:,}", Text(last[kind]))
    return table


def plot(found: Evaluations, title: str, path: Path) -> None:
    """Evaluations over time, by worker, with failures marked, above the distribution of latencies."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), layout="constrained")
    over_time, latencies = figure.subplots(2)
    elapsed = found.start - found.start.min()
    unit, size = next((u, s) for u, s in (("h", 3600.0), ("min", 60.0), ("s", 1.0)) if elapsed.max() >= 3 * s or s == 1)
    edges = np.linspace(0, max(elapsed.max(), 1e-9), BINS + 1)
    busiest = [worker for worker, _ in Counter(found.worker.tolist()).most_common(len(PALETTE) - 1)]
    groups = [(f"worker {worker}", found.worker == worker) for worker in sorted(busiest)]
    rest = ~np.isin(found.worker, busiest)
    groups += [("other workers", rest)] if rest.any() else []
    below = np.zeros(BINS)
    for (name, chosen), colour in zip(groups, PALETTE, strict=False):
        counts, _ = np.histogram(elapsed[chosen], edges)
        over_time.bar(edges[:-1] / size, counts, edges[1] / size, below, align="edge", color=colour, label=name)
        below = below + counts
    failed, _ = np.histogram(elapsed[found.failed], edges)
    where = failed > 0
    middle = (edges[:-1] + edges[1:]) / 2 / size
    over_time.plot(middle[where], below[where], "x", color="black", label="with failures")
    over_time.set(xlabel=f"time ({unit})", ylabel="evaluations", title=title)
    over_time.set_ylim(0, 1.25 * max(1, below.max()))  # room for the legend
    over_time.legend(fontsize=8, ncols=4, loc="upper center")
    positive = found.duration > 0
    if positive.any():
        low, high = np.log10(found.duration[positive].min()), np.log10(found.duration[positive].max())
        steps = np.logspace(low - 0.05, high + 0.05, BINS + 1)
        for chosen, name, colour in ((~found.failed, "finite", PALETTE[0]), (found.failed, "failed", PALETTE[4])):
            latencies.hist(found.duration[positive & chosen], steps, color=colour, label=name, alpha=0.7)
        latencies.legend(fontsize=8)
    latencies.set(xscale="log", yscale="log", xlabel="latency of an evaluation (s)", ylabel="evaluations")
    figure.savefig(path, dpi=130)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold")


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
