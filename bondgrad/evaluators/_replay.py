"""A recorded training again, without the box."""

import threading
from pathlib import Path

from bondgrad.errors import BoxError
from bondgrad.evaluators._evaluator import Answer, Description, Evaluator, Request
from bondgrad.evaluators._journal_file import AskedRows, JournalFile


class Replay(Evaluator):
    """Answers every request with what a `Journal` recorded for it, bit for bit, also for a noisy box.

    The box belongs to this evaluator: ``BlackBox(None, in_features, evaluator=Replay(path))``. Model, data, seeds and
    the other arguments of `BlackBox` have to be those of the recorded training, `structure` as well if the box said it
    itself. A request that differs from the recorded one raises `BoxError`, and so does one that was not recorded.
    `stats.recorded` counts the rows.

    Args:
        path: The file that a `Journal` wrote.
    """

    def __init__(self, path: str | Path) -> None:
        self.file = JournalFile(path)
        facts = self.file.facts
        if "box" not in facts:
            raise ValueError(f"{path} has no evaluations yet: train with Journal(evaluator, path) first")
        if facts["has_memory"]:
            raise ValueError(f"{path} was recorded of a box with memory, which cannot be replayed: use the box itself")
        super().__init__(max_rows=facts["max_rows"], memory=facts["memory"], retries=facts["retries"])
        self.overlaps = facts["overlaps"]  # so that requests are divided as they were
        self._history, self._lock = self.file.history(), threading.Lock()

    def __reduce__(self) -> tuple[type["Replay"], tuple[Path]]:
        return Replay, (self.file.path,)

    def __repr__(self) -> str:
        return f"Replay({str(self.file.path)!r})"

    def describe(self) -> Description:
        """See `Evaluator.describe`."""
        return Description(self.file.facts["box"], self.file.facts["takes_seed"])

    def evaluate(self, request: Request) -> Answer:
        """See `Evaluator.evaluate`."""
        with self._lock:
            recorded = self._history.find(request)
        if recorded is None:
            (last,) = self.file.select("SELECT max(number) FROM evaluations")[0]
            raise BoxError(
                f"request {request.number}, attempt {request.attempt}, is not in the journal {self.file.path}, which "
                f"ends with request {last}: stop there, or go on with the box and evaluator=Journal(..., path)"
            )
        difference = recorded.difference(AskedRows(request)) if recorded.status != "cancelled" else None
        if difference is not None:
            raise BoxError(
                f"request {request.number} differs from what {self.file.path} has recorded: {difference}. Replay needs "
                "the model, data, seeds and arguments of BlackBox with which the journal was written."
            )
        return recorded.answer(request)
