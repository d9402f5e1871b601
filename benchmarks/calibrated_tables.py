"""What was measured about steps, checks and probes, as tables."""

import statistics
from collections.abc import Sequence
from typing import Any

from calibrated_boxes import SCALES, TUNED, UNSEEN, WEAK
from markdown import load, source, source_cpu, table

METHODS = {"calibrated": "Calibrated", "bond, told": "Bond, told", "bond, auto": "Bond, auto", "bond": "Bond"}


def _results(boxes: Sequence[str]) -> list[list[dict[str, Any]]]:
    """The runs of each box and noise."""
    numbers = load("calibrated")["numbers"]
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
    """Sign accuracy on the boxes that steps were tuned on, and on others."""
    result = load("calibrated")
    return _gaps([*TUNED, *UNSEEN]) + "\n\n" + source_cpu(result)


def gaps_elsewhere() -> str:
    """The same for scales and weak spots."""
    return _gaps([*SCALES, *WEAK]) + "\n\n" + source_cpu(load("calibrated"))


def losses() -> str:
    """Test losses."""
    rows = []
    for runs in _results([*TUNED, *UNSEEN]):
        means = []
        for method in ("exact", *METHODS):
            values = [n["test_loss"] for n in runs if n["method"] == method]
            means.append(f"{statistics.fmean(values):.3f} ± {statistics.stdev(values):.2f}" if len(values) > 1 else "-")
        rows.append([f"{runs[0]['box']}, {runs[0]['noise']:.0e}", *means])
    return table(["box, noise", "exact gradient", *METHODS.values()], rows) + "\n\n" + source_cpu(load("calibrated"))


def extra() -> str:
    """How many more evaluations trials cost, in per cent of all of training."""
    runs = [n for n in load("calibrated")["numbers"] if n["box"] in ("5-500-5", "50 inputs")]
    cost = {}
    for box in ("5-500-5", "50 inputs"):
        mine, other = (
            statistics.fmean(n["evaluations"] for n in runs if n["box"] == box and n["method"] == method)
            for method in ("calibrated", "bond")
        )
        cost[box] = 100 * (mine / other - 1)
    return ", ".join(f"{value:.1f} % with {box}" for box, value in cost.items())


def probes() -> str:
    """What `probe` calls some boxes."""
    result = load("probe_gallery")
    rows = [[n["box"], n["verdict"]] for n in result["numbers"]]
    lines = ["| box | verdict |", "| --- | --- |", *(f"| {box} | {verdict} |" for box, verdict in rows)]
    return "\n".join(lines) + "\n\n" + source(result)


def check_power() -> str:
    """How often `check` is right."""
    result = load("check_power")
    rows = [
        [
            ", ".join(key),
            *(
                f"{n['right']} / {n['wrong']} / {n['undecided']}"
                + (f" / {n['beyond tolerance']}" if n["beyond tolerance"] else "")
                for n in result["numbers"]
                if (n["gradient"], n["mistake"]) == key
            ),
        ]
        for key in dict.fromkeys((n["gradient"], n["mistake"]) for n in result["numbers"])
    ]
    noises = list(dict.fromkeys(n["noise"] for n in result["numbers"]))
    headings = ["gradient, mistake", *(f"noise {noise:g}" for noise in noises)]
    return table(headings, rows) + "\n\n" + source(result)
