"""What all figures share: type, colours, axes, and a legend that covers nothing."""

from collections.abc import Iterable
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

INK, GRID = "#30363d", "#d5d9de"  # the page puts its own in their place, by day and by night
WIDTH, HEIGHT = 5.4, 3.1  # inches; of a phone's width, so that type stays legible there

STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: small, searchable, in the reader's font
    "svg.hashsalt": "bondgrad",  # the same figure has the same bytes
    "text.parse_math": False,  # a $ in the name of a run is a $
    "font.family": "DejaVu Sans",  # comes with matplotlib, and is wider than what browsers take for it
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "legend.frameon": False,
    "figure.constrained_layout.w_pad": 0.08,
    "figure.constrained_layout.h_pad": 0.06,
}


def logarithmic(axes: Axes, which: Literal["x", "y"]) -> None:
    """Make this axis logarithmic, with ticks like 1e-3. To be called when all is drawn."""
    axes.set(**{f"{which}scale": "log"})
    axis = getattr(axes, f"{which}axis")
    low, high = axis.get_view_interval()
    ticks = FuncFormatter(lambda x, _: power(x))
    axis.set_major_locator(LogLocator(numticks=8))
    axis.set_major_formatter(ticks)
    narrow = high < 30 * low  # hardly a power of ten in it
    axis.set_minor_locator(LogLocator(subs=(2, 5)) if narrow else NullLocator())
    axis.set_minor_formatter(ticks if narrow else NullFormatter())


def power(x: float) -> str:
    """As house style has it: 1e-3, and not 0.001 or 1e-03."""
    mantissa, exponent = f"{x:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def legend(figure: Figure, entries: Iterable[tuple[Any, str]]) -> None:
    """Below the axes. The figure grows by it, so that the axes do not shrink."""
    handles, labels = zip(*entries, strict=True)
    columns = max(1, min(len(labels), int(72 // (max(map(len, labels)) + 8))))
    rows = -(-len(labels) // columns)
    figure.set_figheight(figure.get_figheight() + 0.2 * rows)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=2.6, columnspacing=1.4)


def panels(figure: Figure, number: int) -> list[Axes]:
    """One above the other, with a common x axis."""
    figure.set_figheight(HEIGHT + (number - 1) * 0.62 * HEIGHT)
    return list(figure.subplots(number, 1, sharex=True, squeeze=False)[:, 0])
