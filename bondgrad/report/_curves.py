"""Figures of how training went and of what came out of it."""

import statistics
from collections.abc import Iterable

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from bondgrad.report._axes import INK, legend, logarithmic, panels, power
from bondgrad.report._checks import number
from bondgrad.report._colours import Look, looks, palette, runs_in
from bondgrad.report._experiment import Experiment, Plot
from bondgrad.report._metrics import METRICS
from bondgrad.report._series import Numbers, over_seeds, thin

FEW = 20  # points that are marked; one alone makes no line


def curves(experiment: Experiment, plot: Plot, figure: Figure) -> str | None:
    """A metric by epoch."""
    metric, styles = METRICS[plot.y], looks(experiment)
    (axes,) = panels(figure, 1)
    entries, band = [], False
    for name, runs in runs_in(experiment, plot).items():
        lines = [_from(plot.first, run.curve["epoch"], run.curve[plot.y]) for run in runs if plot.y in run.curve]
        lines = [(epochs, [metric.scale * y for y in ys]) for epochs, ys in lines]
        if any(over_seeds(lines)):
            band |= len(lines) > 1
            entries.append((_line(axes, lines, styles[name]), name))
    if not entries:
        return None
    axes.set(xlabel="epoch", ylabel=metric.label)
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    legend(figure, entries)
    return f"{_capital(plot.y)} by epoch{_of_seeds(band)}."


def sweep(experiment: Experiment, plot: Plot, figure: Figure) -> str | None:
    """What runs ended with, by one number of theirs."""
    metric = METRICS[plot.y]
    runs = [run for same in runs_in(experiment, plot).values() for run in same]
    runs = [run for run in runs if plot.series in run.at and plot.y in run.finals and not run.failed]
    if not runs:
        return None
    (axes,) = panels(figure, 1)
    entries: list[tuple[Line2D, str]] = []
    across, band = {}, False
    series = sorted({run.at[plot.series] for run in runs}, key=lambda of: (isinstance(of, str), of))
    for of, look in zip(series, palette(len(series)), strict=True):
        points: dict[float, Numbers] = {}
        levels: dict[str, Numbers] = {}
        for run in (run for run in runs if run.at[plot.series] == of):
            same = points.setdefault(number(run.at[plot.x], plot.x), []) if plot.x in run.at else None
            (levels.setdefault(run.method, []) if same is None else same).append(metric.scale * run.finals[plot.y])
        band |= any(len(ys) > 1 for ys in points.values())
        # Drawn even without a point, for the legend: a level has its colour.
        line = _line(axes, [([x] * len(ys), ys) for x, ys in points.items()], Look(look.colour, "-"))
        entries.append((line, f"{plot.series} {_word(of)}"))
        for method, ys in levels.items():
            axes.axhline(statistics.fmean(ys), color=look.colour, lw=1.4, ls="--")
            across[method] = Line2D([], [], color=INK, lw=1.4, ls="--")
    entries += [(line, f"{method}, in the colour of its {plot.series}") for method, line in across.items()]
    axes.set(xlabel=plot.x_label or plot.x, ylabel=metric.label)
    logarithmic(axes, "x")
    legend(figure, entries)
    return f"{_capital(plot.y)} at the end, by {plot.x} and {plot.series}{_of_seeds(band)}."


def lines(experiment: Experiment, plot: Plot, figure: Figure) -> str | None:
    """Lines as they are, one panel for each kind."""
    if not experiment.lines:
        return None
    names = list(dict.fromkeys(line.panel for line in experiment.lines))
    labels = list(dict.fromkeys(line.label for line in experiment.lines))
    styles = dict(zip(labels, palette(len(labels)), strict=True))
    entries = {}
    for axes, panel in zip(panels(figure, len(names)), names, strict=True):
        for line in experiment.lines:
            if line.panel == panel:
                look = styles[line.label]
                xs, ys = thin(line.x, statistics.fmean), thin(line.y, statistics.fmean)
                entries[line.label] = axes.plot(xs, ys, color=look.colour, ls=look.dash, lw=1.5)[0]
        axes.set(ylabel=plot.y_label)
        axes.set_title(panel, loc="left", fontsize="medium")
    axes.set(xlabel=plot.x_label)
    legend(figure, [(handle, label) for label, handle in entries.items()])
    return f"Each line by {plot.x_label or 'x'}."


def _line(axes: Axes, seeds: Iterable[tuple[Numbers, Numbers]], look: Look) -> Line2D:
    """The mean over seeds, and a band from the smallest to the largest."""
    xs, *ys = over_seeds(seeds)
    xs, means, lows, highs = (thin(numbers, statistics.fmean) for numbers in (xs, *ys))
    if lows != highs:
        axes.fill_between(xs, lows, highs, color=look.colour, alpha=0.16, lw=0)
    marker = "o" if len(xs) <= FEW or (look.dash == "-" and len(xs) <= 2 * FEW) else None
    return axes.plot(xs, means, color=look.colour, ls=look.dash, lw=1.6, marker=marker, ms=3.5)[0]


def _from(first: int, epochs: Numbers, ys: Numbers) -> tuple[Numbers, Numbers]:
    """Without the epochs before the first that is to be shown: what comes early hides what comes late."""
    kept = [(epoch, y) for epoch, y in zip(epochs, ys, strict=True) if epoch >= first]
    return [epoch for epoch, _ in kept], [y for _, y in kept]


def _of_seeds(band: bool) -> str:
    return "; mean over seeds, the band from the smallest to the largest" if band else ""


def _word(of: object) -> str:
    if isinstance(of, bool) or not isinstance(of, int | float):
        return str(of)
    return power(of) if of and not 1e-2 <= abs(of) < 1e4 else f"{of:g}"


def _capital(metric: str) -> str:
    """Without its unit, at the beginning of a sentence."""
    return METRICS[metric].label.split(",")[0].capitalize()
