"""Reads files of results, and writes tables of them in Markdown."""

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def load(name: str) -> dict[str, Any]:
    """Return what is in results/NAME.json."""
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, with numbers to the right."""
    lines = [" | ".join(headings), " | ".join(["---", *["---:"] * (len(headings) - 1)])]
    return "\n".join(f"| {line} |" for line in [*lines, *(" | ".join(row) for row in rows)])


def spread(values: Sequence[float], digits: int) -> str:
    """Return mean ± deviation."""
    return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def source(result: dict[str, Any]) -> str:
    """Return command, versions and machine, as a line of small print."""
    return source_cpu(result | {"machine": result["gpu"]}) if result["gpu"] else source_cpu(result)


def source_cpu(result: dict[str, Any]) -> str:
    """Return the same line for what did not use the GPU, if there was one."""
    return f"`{result['command']}`, bondgrad {result['bondgrad']}, torch {result['torch']}, {result['machine']}."
