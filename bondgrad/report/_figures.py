"""Draws an experiment's figures."""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path

from matplotlib import style
from matplotlib.figure import Figure

from bondgrad.report._axes import GRID, HEIGHT, INK, STYLE, WIDTH
from bondgrad.report._colours import METHODS
from bondgrad.report._curves import curves, lines, sweep
from bondgrad.report._experiment import Experiment, Plot
from bondgrad.report._html import Html
from bondgrad.report._steps import bounds, magnitudes

PAINTERS: dict[str, Callable[[Experiment, Plot, Figure], str | None]] = {
    "curves": curves,
    "sweep": sweep,
    "bounds": bounds,
    "magnitudes": magnitudes,
    "lines": lines,
}


@dataclass(frozen=True)
class Drawn:
    """A figure, or the reason why there is none."""

    stem: str  # of its files
    title: str
    caption: str
    svg: str | None


def draw(experiment: Experiment, folder: Path) -> list[Drawn]:
    """Write the figures as PNG files into this folder.

    Args:
        experiment: What `read` returned.
        folder: Is made if it is not there.

    Returns:
        One for each figure that the experiment asks for, in this order.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return [
        _drawn(experiment, plot, f"{slug(experiment.folder)}-{number}-{plot.kind}", folder)
        for number, plot in enumerate(experiment.plots, 1)
    ]


def _drawn(experiment: Experiment, plot: Plot, stem: str, folder: Path) -> Drawn:
    with style.context(["default", STYLE]):  # nobody's own settings get in
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        caption = PAINTERS[plot.kind](experiment, plot, figure)
        if caption is None:
            return Drawn(stem, plot.title, "Nothing to draw: no run has what this figure shows.", None)
        figure.savefig(folder / f"{stem}.png", dpi=160, facecolor="white")
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    return Drawn(stem, plot.title, caption, _shorter(written.getvalue()))


def inline(drawn: Drawn) -> Html:
    """The figure as a part of a page: with ids that no other has, in the page's own colours, and with words."""
    assert drawn.svg is not None
    body = drawn.svg[drawn.svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r'(\bid="|url\(#|href="#)', lambda found: f"{found[0]}{drawn.stem}-", body)
    for colour, name in {INK: "ink", GRID: "grid", METHODS["BOND"]: "blue"}.items():
        body = body.replace(colour, f"var(--{name})")
    words = escape(f"{drawn.title}. {drawn.caption}")
    head = re.compile(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>')
    return Html(head.sub(lambda found: f'<svg viewBox="{found[1]}" role="img" aria-label="{words}">', body, count=1))


def slug(name: str) -> str:
    """A name that is good for files and anchors. Different names stay different."""
    return re.sub(r"[^A-Za-z0-9_-]", lambda found: f".{ord(found[0]):x}.", name)


def _shorter(svg: str) -> str:
    """Coordinates with two digits: a hundredth of a point cannot be seen."""
    paths = re.compile(r' d="[^"]*"')
    return paths.sub(lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), svg)
