"""Runs all tests and writes down which of them ran on a GPU.

    python benchmarks/suite.py [arguments of pytest]

The table of what works (docs/pytorch.md) is made from this by `python docs/generate/tables.py`.
"""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from record import save

# Whether the documents say what results/ says, of which this is about to write a part.
FIGURES = "tests/docs/test_documentation.py::test_the_figures_are_those_of_the_results"


class Outcomes:
    """A pytest plugin that counts what passed, by test function, on the CPU and on a GPU."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self.functions: dict[str, Counter[str]] = {}
        self.failures: dict[str, str] = {}  # tests that failed, and the first line of why

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count. Tests that need a GPU, and no others, are marked to be skipped where there is none."""
        if report.when == "call" or report.outcome != "passed":
            self.totals[report.outcome] += 1
            if report.outcome == "passed":
                where = "cuda" if "skipif" in report.keywords else "cpu"
                self.functions.setdefault(report.nodeid.partition("[")[0], Counter())[where] += 1
            elif report.failed:
                crash = getattr(report.longrepr, "reprcrash", None)
                why = str(report.longrepr) if crash is None else crash.message
                self.failures[report.nodeid] = (why.strip().splitlines() or ["no reason given"])[0]


def main() -> None:
    """Run, print, save."""
    outcomes = Outcomes()
    root = Path(__file__).parent.parent
    # Benchmark plugins, where there are any, complain about warnings being errors.
    options = ["-q", "-p", "no:benchmark", "--rootdir", str(root), "--deselect", FIGURES]
    status = pytest.main([*options, *sys.argv[1:]], plugins=[outcomes])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(dict(outcomes.totals))
    save(f"suite_{device}", vars(outcomes))
    sys.exit(status)


if __name__ == "__main__":
    main()
