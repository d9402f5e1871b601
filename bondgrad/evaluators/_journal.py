"""A journal: every evaluation of a box goes into a file, from which training can be resumed."""

import json
import os
import sqlite3
import threading
import time
import warnings
import weakref
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from bondgrad._version import __version__
from bondgrad.errors import BoxError, RequestCancelled, is_mistake, is_out_of_memory, kind_of, noted_calls
from bondgrad.evaluators._calls import nothing
from bondgrad.evaluators._evaluator import Answer, Call, Description, Evaluator, Purpose, Request
from bondgrad.evaluators._journal_file import (
    FORMAT,
    TABLES,
    AskedRows,
    History,
    JournalFile,
    RecordedRequest,
    raw_rows,
    read_facts,
    type_name,
)

try:
    import fcntl
except ImportError:  # on Windows, where nobody is kept from opening a journal twice
    fcntl = None  # type: ignore[assignment]

SETTINGS = ("max_rows", "memory", "retries", "rate", "max_evaluations")  # that are those of the evaluator inside


class Journal(Evaluator):
    """Writes every evaluation of another evaluator into an SQLite file, and answers from it what it holds already.

    Each request is one transaction: a program that is killed loses the request under way, never the file. Training
    that is resumed from a checkpoint asks again what was evaluated after the checkpoint. Requests of which the file has
    the number, with inputs, context and seed that are equal bit for bit, are answered from it; `stats.recorded` counts
    them. At the first difference a warning names it, and everything from there on is evaluated. A box with memory is
    recorded, and always evaluated.

    A journal belongs to one layer, and one program at a time may write it. `JournalFile` says what is in the file and
    how to read it; `Replay` trains again from it, without the box.

    Args:
        evaluator: Evaluates what the file does not hold.
        path: The file; it is made, if there is none.

    Example:
        >>> folder = getfixture("tmp_path")
        >>> journal = Journal(bondgrad.evaluators.Local(max_rows=1), folder / "device.journal")
        >>> y = bondgrad.BlackBox(torch.sin, 3, evaluator=journal)(torch.zeros(8, 3))
        >>> journal.to_arrays()[0].shape
        (8, 3)
        >>> journal.close()
    """

    def __init__(self, evaluator: Evaluator, path: str | Path) -> None:
        if not isinstance(evaluator, Evaluator):
            raise ValueError(f"evaluator must be one from bondgrad.evaluators, such as Local(), got {evaluator!r}")
        super().__init__(**{name: getattr(evaluator, name) for name in SETTINGS})
        self.overlaps = evaluator.overlaps
        self.evaluator, self.path = evaluator, Path(path).resolve()
        self._lock = threading.Lock()  # of the writer
        self._writer: Writer | None = Writer(self.path)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_writer": None, "_lock": None}  # what is loaded opens the file when it is asked

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Journal({self.evaluator!r}, {str(self.path)!r})"

    def describe(self) -> Description | None:
        """See `Evaluator.describe`: the box of the evaluator inside, if it has one."""
        return self.evaluator.describe()

    def evaluate(self, request: Request) -> Answer:
        """See `Evaluator.evaluate`."""
        asked = AskedRows(request)
        with self._lock:
            self._writer = self._writer or Writer(self.path)
            recorded = self._writer.find(request, asked)
        return self._evaluate(request, asked) if recorded is None else recorded.answer(request)

    def _evaluate(self, request: Request, asked: AskedRows) -> Answer:
        """Evaluate a request, and record what came of it."""
        start, clock, n = time.time(), time.perf_counter(), len(asked.inputs)
        try:
            answer = self.evaluator.evaluate(request)
        except RequestCancelled as error:
            self._record(request, asked, Answer(nothing(request), calls=noted_calls(error) or ()), "cancelled")
            raise
        except Exception as error:
            memory = is_out_of_memory(error)
            if memory or isinstance(error, BoxError):  # of others nothing is known, and they end the training
                status = "memory" if memory else "mistake" if is_mistake(error) else "failed"
                call = Call(0, n, 0, start, time.perf_counter() - clock, error)
                self._record(request, asked, Answer(nothing(request), calls=(call,)), status)
            raise
        calls = answer.calls or (Call(0, n, 0, start, time.perf_counter() - clock),)
        self._record(request, asked, answer._replace(calls=calls), "ok")
        return answer

    def _record(self, request: Request, asked: AskedRows, answer: Answer, status: str) -> None:
        rows = list(journal_rows(request, asked, answer, status))
        function = request.function
        facts = {
            "box": getattr(function, "name", getattr(function, "__name__", type(function).__name__)),
            "in_features": getattr(function, "time_features", None) or request.points.shape[1],
            "out_features": getattr(function, "out_features", None) or answer.y.shape[1] or None,
            "takes_seed": getattr(function, "seed_position", None) is not None,
            "overlaps": self.overlaps,
            **{name: getattr(self, name) for name in ("max_rows", "memory", "retries")},
        }
        with self._lock:
            self._writer = self._writer or Writer(self.path)  # it may have been closed meanwhile
            self._writer.write(request, rows, facts)

    def to_arrays(self, purposes: Collection[Purpose] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """See `JournalFile.to_arrays`."""
        file = JournalFile(self.path)
        try:
            return file.to_arrays(purposes)
        finally:
            file.close()

    def close(self) -> None:
        """Close the file, and what the evaluator inside has started. The next request opens it again."""
        with self._lock:
            if self._writer is not None:
                self._writer.close()
                self._writer = None
        self.evaluator.close()


class Writer:
    """One opening of the file of a journal.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = locked(path)
        self._db = sqlite3.connect(path, check_same_thread=False)
        self.close = weakref.finalize(self, _close, self._db, lock, os.getpid())  # also at the end of the program
        try:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")  # the file is always sound; a power cut may cost requests
            self._db.executescript(TABLES)
            self._facts: dict[str, Any] = {"format": FORMAT, "bondgrad": __version__}
            if self._db.execute("SELECT count(*) FROM journal").fetchone()[0] > 0:
                self._facts = read_facts(self._db)
            self._begin_run()
        except (sqlite3.DatabaseError, ValueError) as error:
            self.close()
            raise ValueError(f"{path} cannot be used as a journal: {error}. Give another path") from error
        self._history: History | None = History(self._db)  # None: the training is another one than recorded

    def find(self, request: Request, asked: AskedRows) -> RecordedRequest | None:
        """The record of a request that can be answered with it; None: it has to be evaluated."""
        if request.whole:
            self._history = None  # what a box with memory answers depends on more than the request
        if self._history is None or request.purpose == "probe":
            return None
        recorded = self._history.find(request)
        if recorded is None or recorded.status in ("mistake", "cancelled"):  # which may have been mended
            return None
        difference = recorded.difference(asked)
        if difference is None:
            return recorded
        self._history = None
        warnings.warn(
            f"request {request.number} differs from what {self._path} has recorded: {difference}. From here on "
            "requests are evaluated. To resume the recorded training, load its last checkpoint with the states of the "
            "optimiser, the data and all random numbers; another training, or another box, needs its own journal.",
            stacklevel=5,
        )
        return None

    def write(self, request: Request, rows: list[tuple[Any, ...]], facts: dict[str, Any]) -> None:
        """Add the rows of one attempt at a request, in a transaction."""
        # Numbers come again when a checkpoint is loaded into a layer that has gone further, and from measurements.
        again = "SELECT 1 FROM evaluations WHERE number = ? AND attempt = ? AND run = ?"
        if self._db.execute(again, (request.number, request.attempt, self.run)).fetchone() is not None:
            self._begin_run()
        facts = {**facts, "has_memory": request.whole or self._facts.get("has_memory", False)}
        with self._db:
            if not facts.items() <= self._facts.items():
                self._write_facts(facts)
            self._db.executemany(f"INSERT INTO evaluations VALUES ({self.run}{', ?' * 21})", rows)

    def _begin_run(self) -> None:
        self.run = int(self._facts.get("runs", 0)) + 1
        with self._db:
            self._write_facts({"runs": self.run})

    def _write_facts(self, facts: dict[str, Any]) -> None:
        self._facts |= facts
        values = [(key, json.dumps(value)) for key, value in self._facts.items()]
        self._db.executemany("INSERT OR REPLACE INTO journal VALUES (?, ?)", values)


def journal_rows(request: Request, asked: AskedRows, answer: Answer, status: str) -> Iterator[tuple[Any, ...]]:
    """The rows of the table `evaluations`, without the number of the run.

    Args:
        request: One attempt.
        asked: Its rows.
        answer: To it, with calls.
        status: "ok" if the evaluator answered; otherwise why no row has outputs.
    """
    n, y, came = len(asked.inputs), answer.y, answer.ok
    calls: dict[int, tuple[int, Call]] = {}  # by row
    for number, call in enumerate(answer.calls):
        calls |= dict.fromkeys(range(call.first, min(call.first + call.rows, n)), (number, call))
    unknown = len(answer.calls), Call(0, 1)
    ok = [status == "ok" and y.shape[1] > 0] * n if came is None or status != "ok" else came.tolist()
    finite = torch.isfinite(y).all(1).tolist()
    outputs, output_type = raw_rows(y) if any(ok) else [], type_name(y)
    rounding = getattr(request.function, "rounding", 0.0)
    common = request.step, request.purpose, request.pairs, request.seed
    texts = {id(call): failure_texts(call.error) for call in answer.calls}
    for row in calls if status == "cancelled" else range(n):
        number, call = calls.get(row, unknown)
        failure, error = texts.get(id(call), (None, None))
        became = "failed" if failure else "ok" if finite[row] else "not finite"
        became = became if ok[row] or failure else "missing"
        yield (
            *(request.number, request.attempt, row, number, *common),
            *(asked.inputs[row], asked.input_type, asked.context[row], asked.context_type),
            *((outputs[row], output_type) if ok[row] and not failure else (None, None)),
            *(rounding, call.worker, call.start, call.duration / max(1, call.rows)),
            *(became if status == "ok" else status, failure, error),
        )


def failure_texts(error: Exception | None) -> tuple[str | None, str | None]:
    """What the box raised, as its type and message, and the whole message of the error; None: it raised nothing."""
    if error is None:
        return None, None
    kind, text = kind_of(error), str(error.__cause__ or error).strip()
    text = text.rpartition("\n")[2] if text.startswith("Traceback") else text  # of another process
    text = text if text.startswith(f"{kind}:") or text == kind else f"{kind}: {text}" if text else kind
    return text, str(error)


def locked(journal: Path) -> IO[str]:
    """A locked file beside a journal. The lock ends with the process, whatever becomes of the file."""
    path = journal.with_name(f"{journal.name}.lock")
    while True:
        file = path.open("a")
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except BlockingIOError:
            file.close()
            raise ValueError(
                f"{journal} is being written by another Journal, here or in another program: close that one, or give "
                "each layer a file of its own"
            ) from None
        except FileNotFoundError:
            pass
        file.close()  # its owner removed it before it was locked


def _close(db: sqlite3.Connection, lock: IO[str], process: int) -> None:
    if process != os.getpid():  # a fork: file and lock belong to the process that opened them
        return
    db.close()
    Path(lock.name).unlink(missing_ok=True)  # while it is locked: nobody else's is removed
    lock.close()
