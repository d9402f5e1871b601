"""Evaluations that are written down: what is in the file, and who may write it."""

import io
import sqlite3

import numpy as np
import pytest
import torch

import bondgrad
from bondgrad import BlackBox
from bondgrad.evaluators import Journal, JournalFile, Local, Processes, Request, Threads
from bondgrad.policies import Fixed
from tests.evaluators.boxes import sine
from tests.evaluators.journals import Training, rows_of, unsure
from tests.helpers import gradient


@pytest.fixture
def path(tmp_path):
    return tmp_path / "box.journal"


def test_what_is_in_the_file(path):
    seen = []

    def fn(x: torch.Tensor):
        seen.append(x.clone())
        if len(seen) == 2:
            raise RuntimeError("laser is off")
        return x[:, :2] * 2

    journal = Journal(Local(max_rows=3), path)
    layer = BlackBox(fn, 3, evaluator=journal, policy=Fixed(1e-2))
    with pytest.warns(UserWarning, match="laser is off"):
        gradient(layer, torch.randn(4, 3), torch.ones(4, 2))
    columns = "number, attempt, row, step, purpose, seed, worker, status, failure"
    assert rows_of(path, columns, "number = 0") == [
        *((0, 0, row, 0, "base", None, 0, "ok", None) for row in range(3)),
        (0, 0, 3, 0, "base", None, 0, "failed", "RuntimeError: laser is off"),
        (0, 1, 0, 0, "base", None, 0, "ok", None),
    ]
    assert rows_of(path, "DISTINCT purpose, pairs") == [("base", 0), ("gradient", 1)]
    found = rows_of(path, "inputs, input_type, outputs, output_type, context, start, duration")
    inputs = np.stack([np.frombuffer(row[0], "<f4") for row in found])
    assert np.array_equal(inputs, torch.cat(seen).numpy())
    for x, (_, kind, outputs, output_kind, context, start, duration) in zip(inputs, found, strict=True):
        assert kind == "float32"
        assert context is None
        assert start > 1.6e9
        assert duration >= 0
        if outputs is not None:
            assert output_kind == "float32"
            assert np.array_equal(np.frombuffer(outputs, "<f4"), x[:2] * 2)
    x, y = journal.to_arrays()
    assert np.array_equal(y, x[:, :2] * 2)
    assert len(x) == len(found) - 1 == layer.stats.evaluations - 1
    assert len(journal.to_arrays(purposes=["base"])[0]) == 4
    with pytest.raises(ValueError, match=r"no finite outputs of these purposes: \['trial'\]"):
        journal.to_arrays(["trial"])
    facts = JournalFile(path).facts
    wanted = {"box": "fn", "in_features": 3, "out_features": 2, "bondgrad": bondgrad.__version__, "max_rows": 3}
    assert wanted.items() <= facts.items()


@pytest.mark.parametrize("kind", [Local, Threads, Processes])
def test_every_evaluation_has_a_row(path, kind):
    if kind is Processes:
        pytest.importorskip("pebble")
        pytest.importorskip("cloudpickle")
    inner = kind() if kind is Local else kind(2)
    with Journal(inner, path) as journal:
        stats = Training(journal, unsure).run(8, batch=32).box.stats
    counts = dict(rows_of(path, "status, count(*)", "1 GROUP BY status"))
    assert sum(counts.values()) == stats.evaluations
    assert counts["failed"] == stats.errors["RuntimeError"]
    assert counts["not finite"] > 0
    assert rows_of(path, "DISTINCT failure", "status = 'failed'") == [("RuntimeError: laser is off",)]
    workers = {worker.worker: (worker.rows, worker.failures) for worker in stats.workers}
    by_worker = rows_of(path, "worker, count(*), sum(status = 'failed')", "1 GROUP BY worker")
    assert {worker: tuple(counts) for worker, *counts in by_worker} == workers


def test_float64_and_contexts(path):
    def fn(x, scale, index):
        return x * scale.to(x.dtype)[:, :1] + index[:, None]

    x, scale, index = torch.randn(5, 3, dtype=torch.float64), torch.rand(5, 2, 4).bfloat16(), torch.arange(5)
    journal = Journal(Local(), path)
    y = BlackBox(lambda x, s, i: fn(x, s[:, 0], i), 3, evaluator=journal)(x, scale, index)
    found = rows_of(path, "inputs, input_type, outputs, output_type, context, context_type")
    for row, (inputs, kind, outputs, output_kind, context, context_kind) in enumerate(found):
        assert (kind, output_kind, context_kind) == ("float64", "float64", "bfloat16[2,4];int64[]")
        assert np.array_equal(np.frombuffer(inputs, "<f8"), x[row])
        assert np.array_equal(np.frombuffer(outputs, "<f8"), y[row])
        halves = np.frombuffer(context[:16], "<u2").astype("<u4") << 16
        assert np.array_equal(halves.view("<f4"), scale[row].float().flatten())
        assert np.frombuffer(context[16:], "<i8") == [row]
    journal.close()
    again = Journal(Local(), path)
    layer = BlackBox(fn, 3, evaluator=again)
    assert torch.equal(layer(x, scale, index), y)
    assert layer.stats.recorded == 5
    assert layer.out_features == 3
    assert layer.function.dtype == torch.float64
    assert layer.stats.evaluations == layer.function.evaluations == 0


def test_what_ends_the_training_is_not_recorded(path):
    def interrupted(x: torch.Tensor):
        raise KeyboardInterrupt

    with Journal(Local(), path) as journal, pytest.raises(KeyboardInterrupt):
        BlackBox(interrupted, 3, evaluator=journal)(torch.zeros(2, 3))
    assert rows_of(path, "1") == []


def test_one_writer_at_a_time(path):
    journal = Journal(Local(), path)
    lock = path.with_name("box.journal.lock")
    assert lock.exists()
    with pytest.raises(ValueError, match=r"box.journal is being written by another Journal.*a file of its own"):
        Journal(Local(), path)
    journal.close()
    assert not lock.exists()
    lock.touch()  # as a crash leaves it
    Journal(Local(), path).close()
    assert not lock.exists()
    layer = BlackBox(sine, 3, evaluator=journal)
    layer(torch.zeros(2, 3))  # opens it again
    assert lock.exists()
    del layer, journal
    assert not lock.exists()


def test_it_has_the_settings_of_the_evaluator_inside(path):
    inner = Threads(2, lambda: sine, max_rows=3, retries=None, rate=50.0, max_evaluations=7)
    with Journal(inner, path) as journal:
        names = ("max_rows", "memory", "retries", "rate", "max_evaluations", "overlaps")
        assert [getattr(journal, name) for name in names] == [getattr(inner, name) for name in names]
        assert journal.describe() == inner.describe()
        assert not journal.capturable
        assert not Journal(Local(), path.with_name("other")).capturable
        assert repr(journal) == f"Journal({inner!r}, '{path}')"
    with pytest.raises(ValueError, match=r"evaluator must be one from bondgrad\.evaluators"):
        Journal(sine, path)


def test_a_saved_model_takes_its_journal_along(path):
    journal = Journal(Local(max_rows=2), path)
    layer = BlackBox(sine, 3, evaluator=journal)
    x = torch.randn(4, 3)
    layer(x)
    file = io.BytesIO()
    torch.save(layer, file)
    journal.close()
    copy = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert torch.equal(copy(x), sine(x))
    assert copy.evaluator.max_rows == 2
    assert rows_of(path, "DISTINCT run, number") == [(1, 0), (2, 1)]
    copy.evaluator.close()


def test_files_that_are_no_journals(path):
    with pytest.raises(FileNotFoundError, match="there is no journal"):
        JournalFile(path)
    path.write_text("not a database, however long it may be" * 100)
    for make in (JournalFile, lambda path: Journal(Local(), path)):
        with pytest.raises(ValueError, match=r"is not a journal|cannot be used as a journal"):
            make(path)
    path.unlink()
    Journal(Local(), path).close()
    connection = sqlite3.connect(path)
    connection.execute("UPDATE journal SET value = '99' WHERE key = 'format'")
    connection.commit()
    connection.close()
    for make in (JournalFile, lambda path: Journal(Local(), path)):
        with pytest.raises(ValueError, match=r"has format 99, written by bondgrad .*, and format 1 is needed"):
            make(path)


def test_rows_of_different_widths_are_no_data_set(path):
    with Journal(Local(), path) as journal:
        for number, width in enumerate((2, 3)):
            journal.evaluate(Request(lambda x, seed: x, torch.ones(2, width), number=number))
        with pytest.raises(ValueError, match="different widths"):
            journal.to_arrays()
