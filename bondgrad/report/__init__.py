"""The report: what the paper says beside what was measured, as a page and as figures. It only reads results."""

from bondgrad.report._command import report_command
from bondgrad.report._experiment import Experiment
from bondgrad.report._figures import draw
from bondgrad.report._paper import paper_results, verdicts
from bondgrad.report._protocol import label
from bondgrad.report._read import read, shown
from bondgrad.report._terminal import tables

__all__ = [
    "Experiment",
    "draw",
    "label",
    "paper_results",
    "read",
    "report_command",
    "shown",
    "tables",
    "verdicts",
]
