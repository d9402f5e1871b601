"""Evaluators: where the box is evaluated."""

from bondgrad.evaluators._calls import evaluate_rows
from bondgrad.evaluators._driver import Driver, Outcome, Progress
from bondgrad.evaluators._evaluator import Answer, Call, Description, Evaluator, Request
from bondgrad.evaluators._executor import Executor
from bondgrad.evaluators._journal import Journal
from bondgrad.evaluators._journal_file import JournalFile
from bondgrad.evaluators._local import Local
from bondgrad.evaluators._processes import Processes
from bondgrad.evaluators._ray import Ray
from bondgrad.evaluators._record import WorkerStats
from bondgrad.evaluators._replay import Replay
from bondgrad.evaluators._threads import Threads
from bondgrad.evaluators._umbridge import UMBridge

__all__ = [
    "Answer",
    "Call",
    "Description",
    "Driver",
    "Evaluator",
    "Executor",
    "Journal",
    "JournalFile",
    "Local",
    "Outcome",
    "Processes",
    "Progress",
    "Ray",
    "Replay",
    "Request",
    "Threads",
    "UMBridge",
    "WorkerStats",
    "evaluate_rows",
]
