"""Results, and tables of them in Markdown."""

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def load(name: str) -> dict[str, Any]:
    """One result."""
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, numbers to the right."""
    lines = [" | ".join(headings), " | ".join(["---", *["---:"] * (len(headings) - 1)])]
    return "\n".join(f"| {line} |" for line in [*lines, *(" | ".join(row) for row in rows)])


def spread(values: Sequence[float], digits: int) -> str:
    """Mean ± deviation."""
    return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def source(result: dict[str, Any]) -> str:
    """Command, versions and machine, as a line of small print."""
    return source_cpu(result | {"machine": result["gpu"]}) if result["gpu"] else source_cpu(result)


def source_cpu(result: dict[str, Any]) -> str:
    """The same for what did not use the GPU, if there was one."""
    return f"`{result['command']}`, bondgrad {result['bondgrad']}, torch {result['torch']}, {result['machine']}."
