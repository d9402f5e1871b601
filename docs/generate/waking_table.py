"""Makes the table of docs/structure.md of dependencies that wake in the course of training, and what watching costs."""

import statistics
from typing import Any

from results_markdown import load, source_cpu, table


def waking_tables() -> dict[str, str]:
    """Return the table by its name, with what was seen where nothing wakes."""
    result = load("waking")
    numbers = result["numbers"]
    rows = []
    for now, before in zip(numbers["now"], numbers["before"], strict=True):
        rows.append(
            [
                now["box"],
                *(_steps(runs) for runs in (now["runs"], before["runs"])),
                *(f"{max(run['worst'] for run in part['runs']):.1f}" for part in (now, before)),
                *(f"{100 * statistics.fmean(run['watching'] for run in part['runs']):.1f} %" for part in (now, before)),
            ]
        )
    headings = ["five seeds each", "steps until signs are back", "before", "points lost", "before"]
    headings += ["evaluations for watching", "before"]
    quiet = numbers["quiet"]
    kinds = {run["box"] for run in quiet}
    costs = [100 * run["watching"] for run in quiet]
    return {
        "waking": f"{table(headings, rows)}\n\n"
        "Signs are back when a mean of ten steps is within half a point of a layer that was told the complete pattern; "
        "points lost are those of the worst ten steps of all seeds. Evaluations for watching are a part of all "
        "evaluations, without those of the first search; before is without the floor and without halving. "
        f"In {numbers['quiet_steps']:,} steps of each of {len(kinds)} boxes in which nothing wakes, without noise, "
        "with noise of 1e-3 and with noise that differs from row to row by a factor of a hundred, there were "
        f"{sum(run['alarms'] for run in quiet) or 'no'} false alarms, and watching took {min(costs):.1f} to "
        f"{max(costs):.1f} % of all evaluations.\n\n{source_cpu(result)}"
    }


def _steps(runs: list[dict[str, Any]]) -> str:
    return ", ".join(str(run["steps"]) for run in runs)
