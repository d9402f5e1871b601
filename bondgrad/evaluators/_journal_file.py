"""The file of a journal: evaluations in SQLite, how they are read, and how recorded requests are found in it."""

import json
import math
import os
import sqlite3
import weakref
from collections.abc import Collection, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bondgrad.errors import BoxError, RemoteError, RequestCancelled, note_calls
from bondgrad.evaluators._calls import nothing
from bondgrad.evaluators._evaluator import RECORDED, Answer, Call, Purpose, Request

FORMAT = 1  # of the tables below; changed when older versions of bondgrad cannot read them any more
TABLES = """
CREATE TABLE IF NOT EXISTS journal (key TEXT PRIMARY KEY, value TEXT); -- facts about the box, as JSON
CREATE TABLE IF NOT EXISTS evaluations (
  run INTEGER,        -- counts the openings of this file, from 1 on
  number INTEGER,     -- of the request
  attempt INTEGER,    -- later attempts at a request have the rows for which earlier ones brought no output
  row INTEGER,        -- in the attempt
  call INTEGER,       -- rows of one attempt with the same number here went to the box together
  step INTEGER,       -- training steps before
  purpose TEXT,       -- base, gradient, trial, structure or probe
  pairs INTEGER,      -- whether rows 2k and 2k + 1 are the two signs of one perturbation
  seed INTEGER,       -- given to the box; NULL: none
  inputs BLOB,        -- raw numbers, little-endian
  input_type TEXT,    -- of inputs: float32, float64
  context BLOB,       -- what else the box was given, one tensor after the other; NULL: nothing
  context_type TEXT,  -- type and shape of each of them: float32[3];int64[]
  outputs BLOB,       -- raw numbers, little-endian; NULL: none came
  output_type TEXT,
  rounding REAL,      -- relative, of the outputs, in the type that the box returned
  worker INTEGER,
  start REAL,         -- of its call, seconds since the epoch
  duration REAL,      -- of its call, divided by the rows of that call
  status TEXT,        -- ok, not finite, failed, missing, mistake, memory or cancelled
  failure TEXT,       -- what the box raised: RuntimeError: laser is off
  error TEXT          -- the whole message
);
CREATE INDEX IF NOT EXISTS requests ON evaluations (number, attempt, run);
"""
LATEST_RUN = """
SELECT run FROM evaluations WHERE number = ? AND attempt = ? AND run >= ? AND purpose != 'probe'
ORDER BY run DESC LIMIT 1
"""
ATTEMPT = """
SELECT row, call, inputs, input_type, context, context_type, seed, outputs, output_type, rounding, status, failure,
error FROM evaluations WHERE number = ? AND attempt = ? AND run = ? ORDER BY row
"""


class JournalFile:
    """Reads the file that a `Journal` writes, also while it does.

    The table `evaluations` has a row for each attempt at an evaluation; numbers are stored as they were, so that any
    program can read them. With numpy, the inputs of all evaluations that brought finite outputs::

        rows = sqlite3.connect(path).execute("SELECT inputs FROM evaluations WHERE status = 'ok'")
        x = np.stack([np.frombuffer(inputs, "<f4") for (inputs,) in rows])  # "<f8", if input_type is float64

    Contexts of the type bfloat16 are the upper halves of float32.

    Args:
        path: The file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).resolve()
        if not self.path.is_file():
            raise FileNotFoundError(f"there is no journal {path}: give the file that evaluators.Journal wrote")
        # SQLite keeps files beside one that may be written to, except for one that is said not to change.
        still = not os.access(self.path.parent, os.W_OK) and not self.path.with_name(f"{self.path.name}-wal").exists()
        address = f"{self.path.as_uri()}?{'immutable=1' if still else 'mode=ro'}"
        self._connection = sqlite3.connect(address, uri=True, check_same_thread=False)
        self.close = weakref.finalize(self, self._connection.close)  # closes the file, also at the end of the program
        try:
            self.facts = read_facts(self._connection)
        except sqlite3.DatabaseError as error:
            self.close()
            raise ValueError(
                f"{path} is not a journal ({error}): give the file that evaluators.Journal wrote"
            ) from error

    def select(self, query: str, *values: object) -> list[Any]:
        """The rows that an SQL query finds."""
        return self._connection.execute(query, values).fetchall()

    def history(self) -> "History":
        """The recorded requests, to be followed from the first one."""
        return History(self._connection)

    def to_arrays(self, purposes: Collection[Purpose] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Inputs [N, d] and outputs [N, d_out] of all evaluations that brought finite outputs, in their order.

        Args:
            purposes: Of the evaluations: "base", "gradient", "trial", "structure", "probe". None: all.
        """
        wanted = None if purposes is None else json.dumps(list(purposes))
        rows = self.select(
            "SELECT input_type, length(inputs), output_type, length(outputs), inputs, outputs FROM evaluations "
            "WHERE status = 'ok' AND (?1 IS NULL OR purpose IN (SELECT value FROM json_each(?1))) ORDER BY rowid",
            wanted,
        )
        parts = [list(part) for _, part in groupby(rows, lambda row: row[:4])]
        if not parts:
            raise ValueError(
                f"{self.path} has no finite outputs of these purposes: {purposes or 'any'}. Record some first"
            )
        if len({(n / width_of(kind), m / width_of(other)) for (kind, n, other, m, *_), *_ in parts}) > 1:
            raise ValueError(f"rows of {self.path} have different widths: read its table `evaluations` with sqlite3")
        x = [numbers([row[4] for row in part], part[0][0]).numpy() for part in parts]
        y = [numbers([row[5] for row in part], part[0][2]).numpy() for part in parts]
        return np.concatenate(x), np.concatenate(y)


def read_facts(connection: sqlite3.Connection) -> dict[str, Any]:
    """What a journal says about its box. Raises ValueError if it is of another format."""
    facts = {key: json.loads(value) for key, value in connection.execute("SELECT key, value FROM journal")}
    if facts.get("format") != FORMAT:
        raise ValueError(
            f"this journal has format {facts.get('format')}, written by bondgrad {facts.get('bondgrad')}, and format "
            f"{FORMAT} is needed: read it with that version, or begin a new file"
        )
    return facts


class AskedRows:
    """The rows of a request as they are recorded, copied before the box can overwrite them."""

    def __init__(self, request: Request) -> None:
        self.seed = request.seed
        self.inputs, self.input_type = raw_rows(request.points), type_name(request.points)
        self.context: list[bytes] | list[None] = [None] * len(self.inputs)
        self.context_type: str | None = None
        if request.context:
            self.context = [b"".join(parts) for parts in zip(*map(raw_rows, request.context), strict=True)]
            self.context_type = ";".join(
                type_name(c) + str(list(c.shape[1:])).replace(" ", "") for c in request.context
            )


class _Row(NamedTuple):
    """A row of the table `evaluations`, without what all rows of an attempt have in common."""

    row: int
    call: int
    inputs: bytes
    input_type: str
    context: bytes | None
    context_type: str | None
    seed: int | None
    outputs: bytes | None
    output_type: str | None
    rounding: float
    status: str
    failure: str | None
    error: str | None


class RecordedRequest:
    """One attempt at a request, as a journal has it.

    Args:
        rows: At least one.
    """

    def __init__(self, rows: list[_Row]) -> None:
        self._rows = rows
        self.status = rows[0].status

    def difference(self, asked: AskedRows) -> str | None:
        """The first difference between the rows that are asked now and those that were recorded; None: they agree."""
        n, first = len(self._rows), self._rows[0]
        if len(asked.inputs) != n:
            return f"it has {len(asked.inputs)} rows, and {n} are recorded"
        if asked.seed != first.seed:
            return f"its seed is {asked.seed}, and {first.seed} is recorded"
        here = f"{asked.input_type}[{len(asked.inputs[0]) // width_of(asked.input_type)}]"
        there = f"{first.input_type}[{len(first.inputs) // width_of(first.input_type)}]"
        if here != there:
            return f"its rows are {here}, and {there} is recorded"
        if asked.context_type != first.context_type:
            return f"its context is {asked.context_type}, and {first.context_type} is recorded"
        for row, now, then in zip(self._rows, asked.inputs, asked.context, strict=True):
            if now != row.inputs:
                a, b = (numbers([blob], first.input_type)[0].numpy() for blob in (now, row.inputs))
                which = next(i for i in range(len(a)) if a[i].tobytes() != b[i].tobytes())
                return f"in row {row.row}, input {which}, it has {a[which]!s}, and {b[which]!s} is recorded"
            if then != row.context:
                return f"in row {row.row} its context is another one than recorded"
        return None

    def answer(self, request: Request) -> Answer:
        """The recorded answer, for a request that does not differ. What was raised then is raised again."""
        first = self._rows[0]
        if self.status == "cancelled":
            raise RequestCancelled(0)
        if self.status in ("memory", "mistake"):
            error = MemoryError(first.error) if self.status == "memory" else recorded_error(first, mistake=True)
            note_calls(error, self._calls())
            raise error
        calls = tuple(self._calls())
        came = torch.tensor([row.outputs is not None for row in self._rows])  # [N]
        if not bool(came.any()):
            return Answer(nothing(request), came, calls)
        answered = [row for row in self._rows if row.outputs is not None]
        outputs = numbers([row.outputs or b"" for row in answered], answered[0].output_type or "")
        y = outputs.new_full((len(came), outputs.shape[1]), math.nan)  # [N, d_out]
        y[came] = outputs
        y = y.to(request.points.device)
        learn: Any = getattr(request.function, "learn", None)
        if learn is not None:
            learn(request.points, y, answered[0].rounding)
        return Answer(y, None if bool(came.all()) else came, calls)

    def _calls(self) -> Iterator[Call]:
        for _, group in groupby(sorted(self._rows, key=lambda row: row.call), lambda row: row.call):
            rows = list(group)
            error = None if rows[0].error is None else recorded_error(rows[0])
            yield Call(rows[0].row, len(rows), RECORDED, error=error)


def recorded_error(row: _Row, mistake: bool = False) -> BoxError:
    """The error with which the call of a row ended."""
    failure = row.failure or ""
    error = BoxError(row.error)
    error.__cause__ = RemoteError(failure.partition(":")[0], failure, mistake)
    return error


class History:
    """Finds recorded requests, along the runs of one training.

    The latest run that has a request is the one that counts. From there on runs before it are left aside: it was
    resumed from them, and has taken another way since.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._turns: list[tuple[int, int]] = []  # numbers of requests from which on a run counts, and this run

    def find(self, request: Request) -> RecordedRequest | None:
        """The recorded attempt of the number of this request; None: there is none."""
        since = max((run for number, run in self._turns if number <= request.number), default=0)
        which = request.number, request.attempt
        found = self._connection.execute(LATEST_RUN, (*which, since)).fetchone()
        if found is None:
            return None
        if found[0] > since:
            self._turns.append((request.number, found[0]))
        return RecordedRequest([_Row(*row) for row in self._connection.execute(ATTEMPT, (*which, found[0]))])


def raw_rows(t: Tensor) -> list[bytes]:
    """The rows of a tensor [N, ...] as the bytes of their numbers."""
    n, width = t.shape[0], math.prod(t.shape[1:])
    whole, size = t.detach().cpu().contiguous().view(n, width).view(torch.uint8).numpy().tobytes(), width * t.itemsize
    return [whole[i * size : (i + 1) * size] for i in range(n)]


def type_name(t: Tensor) -> str:
    """The name of the type of a tensor: float32."""
    return str(t.dtype).removeprefix("torch.")


def width_of(name: str) -> int:
    """The bytes of a number of the type of this name."""
    kind: torch.dtype = getattr(torch, name)
    return kind.itemsize


def numbers(rows: list[bytes], name: str) -> Tensor:
    """The tensor [N, d] of which `raw_rows` made these bytes."""
    kind: torch.dtype = getattr(torch, name)
    return torch.frombuffer(bytearray(b"".join(rows)), dtype=kind).view(len(rows), -1)
