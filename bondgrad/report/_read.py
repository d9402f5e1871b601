"""Reads a folder of results. What is not as it should be is named, and never guessed."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn

import yaml

from bondgrad.report._checks import columns_of, count, entry, items, known, mapping, number, text, value
from bondgrad.report._experiment import Experiment, Line, Paper, Plot, Row, Run, Table, Value
from bondgrad.report._metrics import COLUMNS, CURVES, FINALS, STEP_DEVIATIONS

KINDS = ("curves", "sweep", "bounds", "magnitudes", "lines")


def read(folder: Path) -> Experiment:
    """The experiment in this folder.

    Args:
        folder: Has `config.yaml` and `results.json`.

    Raises:
        ValueError: Something is missing or is not what it should be. The message says what, and in which file.
    """
    try:
        asked = shown(mapping(yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))), folder.name)
    except (ValueError, yaml.YAMLError, OSError) as error:
        raise ValueError(f"config.yaml: {error}") from error
    try:
        content = (folder / "results.json").read_text(encoding="utf-8")
        found = mapping(json.loads(content, parse_constant=_refuse_constant))
        runs = [_run(raw, f"runs[{i}]") for i, raw in enumerate(items(found, "runs"))]
        lines = [_line(raw, f"lines[{i}]") for i, raw in enumerate(items(found, "lines"))]
    except (ValueError, OSError) as error:
        raise ValueError(f"results.json: {error}") from error
    return replace(asked, runs=runs, lines=lines)


def shown(config: dict[str, Any], folder: str = "") -> Experiment:
    """What is to be shown of an experiment, which has no results yet.

    Raises:
        ValueError: It is not what it should be.
    """
    name = text(config, "name")
    planned = mapping(entry(config, "planned"), "planned")
    epochs = mapping(entry(planned, "epochs", "planned"), "planned.epochs")
    steps, precisions = (mapping(planned.get(key) or {}, f"planned.{key}") for key in ("steps", "precision"))
    experiment = Experiment(
        folder=folder,
        name=name,
        title=text(config, "title", needed=False) or name,
        says=text(config, "says", needed=False),
        notes=text(config, "notes", needed=False),
        paper=_paper(config.get("paper")),
        tables=[_table(raw, f"tables[{i}]") for i, raw in enumerate(items(config, "tables"))],
        plots=[_plot(raw, f"figures[{i}]") for i, raw in enumerate(items(config, "figures"))],
        planned_epochs={run: count(epochs, run, "planned.epochs") for run in epochs},
        planned_seeds=[count({"seed": seed}, "seed", "planned") for seed in items(planned, "seeds", "planned")],
        planned_steps={run: count(steps, run, "planned.steps", needed=False) for run in steps},
        planned_precision={run: text(precisions, run, "planned.precision") for run in precisions},
        runs=[],
        lines=[],
    )
    named = [run for table in experiment.tables for row in table.rows for run in (row.run, row.baseline) if run]
    for run in (*named, *(run for plot in experiment.plots for run in plot.runs)):
        if run not in experiment.planned_epochs:
            raise ValueError(f"a table or a figure has {run!r}, but no run is called so")
    return experiment


def _paper(raw: object) -> Paper:
    paper = {} if raw is None else mapping(raw, "paper")
    return Paper(
        text(paper, "label", "paper", needed=False),
        text(paper, "gpu", "paper", needed=False),
        raw is None or bool(paper.get("ours")),
    )


def _table(raw: object, where: str) -> Table:
    table = known(mapping(raw, where), ("title", "columns", "rows"), where)
    columns = [str(column) for column in items(table, "columns", where)]
    if not columns or not set(columns) <= set(COLUMNS):
        raise ValueError(f"{where}: columns must be out of {', '.join(COLUMNS)}, got {columns}")
    rows = []
    for i, item in enumerate(items(table, "rows", where)):
        here = f"{where}.rows[{i}]"
        row = known(mapping(item, here), ("run", "baseline", *COLUMNS), here)
        paper = {key: Value(*value(row[key], f"{here}.{key}")) for key in COLUMNS if row.get(key) is not None}
        rows.append(Row(text(row, "run", here), text(row, "baseline", here, needed=False), paper))
    return Table(text(table, "title", where, needed=False), columns, rows)


def _plot(raw: object, where: str) -> Plot:
    plot = known(mapping(raw, where), [field.name for field in fields(Plot)], where)
    kind = text(plot, "kind", where)
    if kind not in KINDS:
        raise ValueError(f"{where}: kind must be one of {', '.join(KINDS)}, got {kind!r}")
    measured = {"curves": CURVES, "sweep": FINALS}.get(kind)
    y = text(plot, "y", where, needed=measured is not None)
    if measured is not None and y not in measured:
        raise ValueError(f"{where}: y must be one of {', '.join(measured)}, got {y!r}")
    return Plot(
        kind,
        text(plot, "title", where),
        x=text(plot, "x", where, needed=kind == "sweep"),
        y=y,
        series=text(plot, "series", where, needed=kind == "sweep"),
        runs=[str(name) for name in items(plot, "runs", where)],
        first=count(plot, "first", where, needed=False) or 1,
        x_label=text(plot, "x_label", where, needed=False),
        y_label=text(plot, "y_label", where, needed=False),
    )


def _run(raw: object, where: str) -> Run:
    run = mapping(raw, where)
    numbers = (*FINALS, *STEP_DEVIATIONS.values())
    finals = {key: number(run[key], f"{where}.{key}") for key in numbers if run.get(key) is not None}
    return Run(
        run=text(run, "run", where),
        seed=count(run, "seed", where),
        method=text(run, "method", where),
        command=text(run, "command", where),
        bondgrad=text(run, "bondgrad", where),
        torch=text(run, "torch", where),
        machine=text(run, "machine", where),
        gpu=text(run, "gpu", where, needed=False),
        precision=text(run, "precision", where),
        graph=bool(entry(run, "graph", where)),
        same_as=text(run, "same_as", where, needed=False),
        compiled=bool(run.get("compiled")),  # which earlier versions did not have
        epochs=count(run, "epochs", where),
        epochs_run=count(run, "epochs_run", where),
        failed=text(run, "failed", where, needed=False),
        batch=count(run, "batch", where, needed=False),
        steps_of_epoch=count(run, "steps_of_epoch", where, needed=False),
        finals=finals,
        loop_quartiles=[number(part, f"{where}.loop_quartiles") for part in items(run, "loop_quartiles", where)],
        at=_at(run, where),
        curve=columns_of(run, "curve", "epoch", where),
        trace=columns_of(run, "trace", "step", where),
    )


def _at(run: dict[str, Any], where: str) -> dict[str, float | str]:
    found = mapping(run.get("at") or {}, f"{where}.at")
    for key, part in found.items():
        if not isinstance(part, int | float | str):
            raise ValueError(f"{where}.at.{key} must be a number or text, got {part!r}")
    return found


def _line(raw: object, where: str) -> Line:
    line = mapping(raw, where)
    found = columns_of({"line": {"x": entry(line, "x", where), "y": entry(line, "y", where)}}, "line", "x", where)
    return Line(text(line, "label", where), text(line, "panel", where, needed=False), found["x"], found["y"])


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON: null says that there is no number")
