"""The tables of the page."""

from bondgrad.report._compare import FAILED, NOT_RUN, NOTHING, compare, elsewhere, of_paper, quartiles
from bondgrad.report._experiment import Experiment, Row, Table
from bondgrad.report._html import Html, element
from bondgrad.report._metrics import METRICS


def comparison(experiment: Experiment, table: Table) -> Html:
    """The paper's, ours and the difference, for every row and column."""
    parts = {column: _parts(experiment, table, column) for column in table.columns}
    above = [
        element("th", METRICS[column].label, scope="colgroup", colspan=str(len(parts[column])), class_="metric")
        for column in table.columns
    ]
    below = [
        element("th", _heading(experiment, column, part), scope="col", class_="first" if i == 0 else part)
        for column in table.columns
        for i, part in enumerate(parts[column])
    ]
    baselines = _baselines(table)
    caption = table.title or "The paper's values and ours"
    if len(baselines) == 1:  # said once for all
        caption += f"; against {baselines[0]}"
    content = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", element("td", rowspan="2"), *above), element("tr", *below)),
        element("tbody", *(_row(experiment, table, row, parts) for row in table.rows)),
        class_="comparison",
    )
    # Scrolls by itself, also by keyboard, so that the page need not.
    return element("div", content, class_="scroll", role="region", tabindex="0", aria_label=caption)


def _parts(experiment: Experiment, table: Table, column: str) -> tuple[str, ...]:
    """Without what no row of the table has."""
    if all(of_paper(experiment, row, column) is None for row in table.rows):
        return ("ours",)
    return ("paper", "ours") if METRICS[column].hardware else ("paper", "ours", "difference")


def _heading(experiment: Experiment, column: str, part: str) -> str:
    """Of one part of a column: the paper's times say on which machine they were taken."""
    return f"paper, {elsewhere(experiment, column)}" if part == "paper" and elsewhere(experiment, column) else part


def _baselines(table: Table) -> list[str]:
    """What its rows are measured against, if anything."""
    relative = {"gain", "loop_ratio", "paired_difference"} & set(table.columns)
    return list(dict.fromkeys(row.baseline for row in table.rows if row.baseline and relative))


def _row(experiment: Experiment, table: Table, row: Row, parts: dict[str, tuple[str, ...]]) -> Html:
    notes = []
    if row.baseline and len(_baselines(table)) > 1:
        notes.append(f"against {row.baseline}")
    if any(run.epochs_run < run.epochs and not run.failed for run in experiment.of(row.run)):
        notes.append("unfinished")
    cells = []
    for column in table.columns:
        cell = compare(experiment, row, column)
        for i, part in enumerate(parts[column]):
            words = {"paper": cell.paper, "ours": cell.ours, "difference": cell.difference}[part]
            more = quartiles(experiment, row, column) if part == "ours" else ""
            classes = [part, *["first"] * (i == 0), *["nothing"] * (words in (NOTHING, NOT_RUN, FAILED))]
            cells.append(element("td", *_in_lines(words, more), class_=" ".join(classes)))
    small = [element("small", ", ".join(notes))] if notes else []
    return element("tr", element("th", element("div", row.run, *small), scope="row"), *cells)


def _in_lines(words: str, more: str) -> list[str]:
    """What stands in brackets at the end goes to a line of its own, as does what is said besides."""
    first, _, bracket = words.partition(" (") if words.endswith(")") else (words, "", "")
    return [first, *(element("small", part) for part in (bracket.removesuffix(")"), more) if part)]
