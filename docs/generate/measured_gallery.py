"""Makes the tables of boxes that other people wrote: the default layer, the best fixed step, other step choosers."""

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from results_markdown import load, source_cpu, table

REFERENCES = {"slope": "", "smoothed": ", smoothed"}
OVER_DEVIATION = ", over one deviation"  # of boxes with jumps
METHODS = {
    "default": "default layer",
    "fixed": "best fixed step",
    "parameter shift": "parameter shift",
    "ECnoise, Moré-Wild, forward": "Moré, Wild, forward",
    "ECnoise, Moré-Wild, central": "central",
    "Shi et al., forward": "Shi et al., forward",
    "Shi et al., central": "central",
    "Gill et al., forward": "Gill et al., forward",
    "Stepleman-Winarsky, central": "Stepleman, Winarsky, central",
}
OWN = {"default": "default layer, 5 readings", **dict(list(METHODS.items())[3:]), "DerivKit": "DerivKit"}
KINDS = ("default", "fixed")


def gallery() -> str:
    """Return signs and cosines of the default layer beside those of the best fixed step."""
    result = load("gallery")
    rows = []
    for box in result["numbers"]:
        for reference, suffix in REFERENCES.items():
            if reference not in box["best_step"]:
                continue
            suffix = OVER_DEVIATION if box["jumps"] and not suffix else suffix
            mine, fixed = (list(zip(*(run[reference][kind] for run in box["runs"]), strict=True)) for kind in KINDS)
            evaluations = statistics.fmean(run["evaluations"] for run in box["runs"])
            rows.append(
                [
                    box["box"] + suffix,
                    *(" / ".join(f"{value:.1f}" for value in of[0]) for of in (mine, fixed)),
                    *(f"{statistics.fmean(of[1]):.3f}" for of in (mine, fixed)),
                    f"{box['best_step'][reference]:.2g}",
                    f"{evaluations:.2f} ({2 * box['d'] + 1})",
                    f"{sum(bool(run['warnings']) for run in box['runs'])} of {len(box['runs'])}",
                ]
            )
    headings = ["box", "right signs in %, three seeds", "best fixed step", "cosine", "best fixed step"]
    headings += ["that step, in deviations", "evaluations a row (least)", "runs that warned"]
    text = (
        "A box with jumps has two references: the slope over one deviation of its inputs, for which a step of one "
        "deviation is right by definition, and the slope of the box smoothed by a Gaussian as wide as the inputs."
    )
    return "\n\n".join([table(headings, rows), text, source_cpu(result)])


def choosers_in_the_gallery() -> str:
    """Return signs and cosine of the step choosers at the boxes of the gallery, at the same cost."""
    result = load("step_choosers")
    boxes = [box for box in result["numbers"] if not box["known"]]
    return _methods(boxes, METHODS, "shared", _signs_and_cosine) + "\n\n" + source_cpu(result)


def choosers_at_known_functions() -> str:
    """Return signs and errors of the step choosers at the known functions, at the same cost."""
    result = load("step_choosers")
    boxes = [box for box in result["numbers"] if box["known"]]
    columns = {name: title for name, title in METHODS.items() if name != "parameter shift"}
    return _methods(boxes, columns, "shared", _signs_and_error) + "\n\n" + source_cpu(result)


def choosers_of_every_row() -> str:
    """Return the same for steps chosen anew at every row and input, with what that costs."""

    def cell(runs: list[dict[str, Any]]) -> str:
        key = "readings" if "readings" in runs[0] else "own"
        cost = "reading evaluations" if key == "readings" else "own evaluations"
        evaluations = statistics.fmean(run[cost] for run in runs)
        signs, _, error = (statistics.fmean(values) for values in zip(*(run[key] for run in runs), strict=True))
        return f"{signs:.1f}, {error:.0e}, {evaluations:.0f}"

    return _methods(load("step_choosers")["numbers"], OWN, "own", cell) + "\n\n" + source_cpu(load("step_choosers"))


def _methods(
    boxes: Iterable[dict[str, Any]],
    columns: dict[str, str],
    kind: str,
    cell: Callable[[list[dict[str, Any]]], str],
) -> str:
    """Return a table with a row for each box and a column for each method; "-" where one was not used."""
    rows = []
    for box in boxes:
        of = {name: [run[name] for run in box["runs"] if name in run] for name in columns}
        known = {name: [run for run in runs if kind in run or "readings" in run] for name, runs in of.items()}
        rows.append([box["box"], *(cell(runs) if runs else "-" for runs in known.values())])
    return table(["", *columns.values()], rows)


def _signs_and_cosine(runs: list[dict[str, Any]]) -> str:
    signs, cosine, _ = (statistics.fmean(values) for values in zip(*(run["shared"] for run in runs), strict=True))
    return f"{signs:.1f}, {cosine:.2f}"


def _signs_and_error(runs: list[dict[str, Any]]) -> str:
    signs, _, error = (statistics.fmean(values) for values in zip(*(run["shared"] for run in runs), strict=True))
    return f"{signs:.1f}, {error:.0e}"
