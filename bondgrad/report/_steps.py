"""Figures of the steps that were taken inside the box."""

import statistics

from matplotlib.figure import Figure

from bondgrad.report._axes import HEIGHT, INK, legend, logarithmic, panels
from bondgrad.report._colours import looks, runs_in
from bondgrad.report._experiment import Experiment, Plot
from bondgrad.report._series import of_trace, over_seeds, positive, thin


def bounds(experiment: Experiment, plot: Plot, figure: Figure) -> str | None:
    """How far steps may go, and how far they went."""
    styles = looks(experiment)
    found = {}
    for name, runs in runs_in(experiment, plot).items():
        lower, upper, steps = (positive(runs, key) for key in ("lower", "upper", "step_mean"))
        if lower and upper and steps:
            found[name] = (min(lower), max(upper), steps)
    if not found:
        return None
    (axes,) = panels(figure, 1)
    figure.set_figheight(max(0.55 * HEIGHT, 0.9 + 0.36 * len(found)))
    for place, (name, (low, high, steps)) in enumerate(found.items()):
        axes.barh(place, high - low, left=low, height=0.5, color=styles[name].colour, alpha=0.45, lw=0)
        axes.plot([min(steps), max(steps)], [place, place], color=INK, lw=1.2)
        axes.plot([statistics.fmean(steps)], [place], "o", color=INK, ms=4.5)
    ends = min(low for low, _, _ in found.values()) / 2, 2 * max(high for _, high, _ in found.values())
    axes.set(xlabel="size of a step", xlim=ends, ylim=(len(found) - 0.4, -0.6))
    axes.set_yticks(range(len(found)), list(found))
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    logarithmic(axes, "x")
    return (
        "Bars: from the least lower to the largest upper bound. "
        "Lines: mean sizes of steps, from the smallest to the largest; dots: their mean."
    )


def magnitudes(experiment: Experiment, plot: Plot, figure: Figure) -> str | None:
    """Sizes of steps and norms of gradients in the course of training."""
    styles = looks(experiment)
    named = {name: runs for name, runs in runs_in(experiment, plot).items() if positive(runs, "step_mean")}
    if not named:
        return None
    with_norms = any(positive(runs, "gradient_norm") for runs in named.values())
    step_axes, *norm_axes = panels(figure, 1 + with_norms)
    entries = []
    for name, runs in named.items():
        look = styles[name]
        x, mean, _, _ = over_seeds(of_trace(runs, "step_mean"))
        (line,) = step_axes.plot(thin(x, min), thin(mean, statistics.fmean), color=look.colour, ls=look.dash, lw=1.6)
        entries.append((line, name))
        x, _, _, largest = over_seeds(of_trace(runs, "step_max"))
        step_axes.plot(thin(x, min), thin(largest, max), color=look.colour, lw=0.8, alpha=0.6)
        for axes in norm_axes:
            x, mean, _, _ = over_seeds(of_trace(runs, "gradient_norm"))
            axes.plot(thin(x, min), thin(mean, statistics.fmean), color=look.colour, ls=look.dash, lw=1.2)
    step_axes.set(ylabel="size of a step")
    for axes in norm_axes:
        axes.set(ylabel="norm of the gradient")
    for axes in (step_axes, *norm_axes):
        logarithmic(axes, "y")
    (norm_axes or [step_axes])[-1].set(xlabel="step of training")
    legend(figure, entries)
    below = " Below: the norm of the gradient." if with_norms else ""
    return f"Mean size of steps, and in thin lines the largest, by step of training.{below}"
