"""Evaluators: where the box is evaluated."""

from bondgrad.evaluators._calls import evaluate_rows
from bondgrad.evaluators._driver import Driver, Outcome, Progress
from bondgrad.evaluators._evaluator import Answer, Call, Description, Evaluator, Request
from bondgrad.evaluators._local import Local
from bondgrad.evaluators._processes import Processes
from bondgrad.evaluators._record import WorkerStats
from bondgrad.evaluators._threads import Threads

__all__ = [
    "Answer",
    "Call",
    "Description",
    "Driver",
    "Evaluator",
    "Local",
    "Outcome",
    "Processes",
    "Progress",
    "Request",
    "Threads",
    "WorkerStats",
    "evaluate_rows",
]
