"""Evaluators: where the box is evaluated."""

from bondgrad.evaluators._calls import evaluate_rows
from bondgrad.evaluators._driver import Driver, Outcome, Progress
from bondgrad.evaluators._evaluator import Answer, Call, Description, Evaluator, Request
from bondgrad.evaluators._executor import Executor
from bondgrad.evaluators._local import Local
from bondgrad.evaluators._processes import Processes
from bondgrad.evaluators._ray import Ray
from bondgrad.evaluators._record import WorkerStats
from bondgrad.evaluators._threads import Threads
from bondgrad.evaluators._umbridge import UMBridge

__all__ = [
    "Answer",
    "Call",
    "Description",
    "Driver",
    "Evaluator",
    "Executor",
    "Local",
    "Outcome",
    "Processes",
    "Progress",
    "Ray",
    "Request",
    "Threads",
    "UMBridge",
    "WorkerStats",
    "evaluate_rows",
]
