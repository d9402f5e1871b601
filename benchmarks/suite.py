"""Runs all tests and writes down which of them ran on a GPU.

    python benchmarks/suite.py

The table of what works (docs/pytorch.md) is made from this.
"""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from record import save


class Outcomes:
    """A pytest plugin that counts what passed, by test function, on the CPU and on a GPU."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self.functions: dict[str, Counter[str]] = {}
        self._on_gpu: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Note which tests use a GPU: those that say so, and those that cannot do without."""
        for item in items:
            parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
            marks = [mark.kwargs.get("reason") for mark in item.iter_markers("skipif")]
            if parameters.get("device") == "cuda" or "needs a CUDA device" in marks:
                self._on_gpu.add(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count."""
        if report.when == "call" or report.outcome != "passed":
            self.totals[report.outcome] += 1
            if report.outcome == "passed":
                where = "cuda" if report.nodeid in self._on_gpu else "cpu"
                self.functions.setdefault(report.nodeid.partition("[")[0], Counter())[where] += 1


def main() -> None:
    """Run, print, save."""
    outcomes = Outcomes()
    root = Path(__file__).parent.parent
    # Benchmark plugins, where there are any, complain about warnings being errors.
    status = pytest.main(["-q", "-p", "no:benchmark", "--rootdir", str(root), *sys.argv[1:]], plugins=[outcomes])
    sys.argv = sys.argv[:1]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(dict(outcomes.totals))
    save(f"suite_{device}", {"totals": outcomes.totals, "functions": outcomes.functions})
    sys.exit(status)


if __name__ == "__main__":
    main()
