"""The tables for a terminal."""

from rich import box
from rich.markup import escape
from rich.table import Table

from bondgrad.report._compare import beside, heading
from bondgrad.report._experiment import Experiment


def tables(experiment: Experiment) -> list[Table]:
    """For every table of the experiment what was measured and, where the paper has anything, the paper's value."""
    found = []
    for of in experiment.tables:
        title = of.title or experiment.title
        shown = Table(title=escape(title), box=box.SIMPLE)
        shown.add_column("", overflow="fold")
        for column in of.columns:
            shown.add_column(escape(heading(experiment, of, column)), justify="right")
        for row in of.rows:
            cells = [beside(experiment, row, column) for column in of.columns]
            shown.add_row(escape(row.run), *map(escape, cells))
            if any("[" in cell for cell in cells):
                shown.caption = "in square brackets: the paper's"
        found.append(shown)
    return found
