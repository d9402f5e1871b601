"""Makes the tables of how close each policy's steps are to the best."""

import statistics
from collections.abc import Sequence
from typing import Any

from results_markdown import load, source_cpu, table

# Boxes by their names in results/calibrated.json, in the order of the rows.
TUNED = ("5-500-5", "weights x 5", "50 inputs")
UNSEEN = ("interferometer", "enzymes", "oscillators")
SCALES = ("50 inputs, blocks", "inputs 1e-3 to 1e3", "loss x 1e6", "loss x 1e-6", "3 decimals", "pendulum")
WEAK = ("exp(5x)", "NaN outside", "1 decimal")
METHODS = {"calibrated": "Calibrated", "bond, told": "Bond, told", "bond, auto": "Bond, auto", "bond": "Bond"}


def _results(boxes: Sequence[str]) -> list[list[dict[str, Any]]]:
    """Return the runs of each box and noise. A box that no table would show is an error."""
    numbers = load("calibrated")["numbers"]
    if unknown := {n["box"] for n in numbers} - {*TUNED, *UNSEEN, *SCALES, *WEAK}:
        raise ValueError(
            f"no table shows the boxes {sorted(unknown)} of results/calibrated.json: "
            "name them at the top of docs/generate/measured_steps.py"
        )
    keys = dict.fromkeys((box, n["noise"]) for box in boxes for n in numbers if n["box"] == box)
    return [[n for n in numbers if (n["box"], n["noise"]) == key] for key in keys]


def _gaps(boxes: Sequence[str]) -> str:
    rows = []
    for runs in _results(boxes):
        mine = [n for n in runs if n["method"] == "calibrated"]
        if len(mine) < 3:
            continue
        signs = [statistics.fmean(n["signs"] for n in runs if n["method"] == method) for method in METHODS]
        gaps = sorted(n["gap"] for n in mine)
        rows.append(
            [
                f"{mine[0]['box']}, {mine[0]['noise']:.0e}",
                *(f"{value:.2f}" for value in signs),
                f"{statistics.fmean(n['best_fixed'] for n in mine):.2f}",
                " / ".join(f"{gap:+.2f}" for gap in gaps),
            ]
        )
    return table(["box, noise", *METHODS.values(), "best fixed step", "gap, three seeds"], rows)


def gaps() -> str:
    """Return the table of sign accuracy on the boxes that steps were tuned on, and on those they were not."""
    result = load("calibrated")
    return _gaps([*TUNED, *UNSEEN]) + "\n\n" + source_cpu(result)


def gaps_elsewhere() -> str:
    """Return the same table for other scales, and for boxes that are hard for every policy."""
    return _gaps([*SCALES, *WEAK]) + "\n\n" + source_cpu(load("calibrated"))


def losses() -> str:
    """Return the table of test losses."""
    rows = []
    for runs in _results([*TUNED, *UNSEEN]):
        means = []
        for method in ("exact", *METHODS):
            values = [n["test_loss"] for n in runs if n["method"] == method]
            means.append(f"{statistics.fmean(values):.3f} ± {statistics.stdev(values):.2f}" if len(values) > 1 else "-")
        rows.append([f"{runs[0]['box']}, {runs[0]['noise']:.0e}", *means])
    return table(["box, noise", "exact gradient", *METHODS.values()], rows) + "\n\n" + source_cpu(load("calibrated"))


def extra() -> str:
    """Return how many more evaluations trials cost, in per cent of all of training."""
    runs = [n for n in load("calibrated")["numbers"] if n["box"] in ("5-500-5", "50 inputs")]
    cost = {}
    for box in ("5-500-5", "50 inputs"):
        mine, other = (
            statistics.fmean(n["evaluations"] for n in runs if n["box"] == box and n["method"] == method)
            for method in ("calibrated", "bond")
        )
        cost[box] = 100 * (mine / other - 1)
    return ", ".join(f"{value:.1f} % with {box}" for box, value in cost.items())
