"""What times of calls side by side say, and which evaluator follows from them."""

import math
import os

import pytest

from bondgrad.probing._advice import TrainingStep, advise
from bondgrad.probing._overlap import Overlap
from bondgrad.probing._speed import Speed
from tests.probing.test_report import History, RowCoupling, noisy, quiet, report


def overlap(together, cores, busy=None, children=0.0, safe=True, picklable=True):
    """Two calls of a second each."""
    return Overlap(2.0, cores, children, cores if busy is None else busy, together, safe, picklable)


WAITS = overlap(1.0, 0.1)
ONE_AT_A_TIME = overlap(2.0, 0.1)
PROGRAMS = overlap(1.0, 0.1, children=0.9)
COMPUTES = overlap(None, 1.0)
STUCK = overlap(None, 1.0, picklable=False)
SEVERAL_CORES = overlap(None, 1.9)
UNSAFE = overlap(math.inf, 0.1, safe=False)
BUSY_MACHINE = overlap(None, 0.2, busy=0.9)  # others had the cores during the calls


@pytest.mark.parametrize(
    ("found", "threads", "processes", "words"),
    [
        (WAITS, True, False, "it waits, so that threads help."),
        (ONE_AT_A_TIME, False, False, "it does one thing at a time."),
        (PROGRAMS, True, False, "it waits, so that threads help."),
        (COMPUTES, False, True, "on one core: it computes."),
        (SEVERAL_CORES, False, False, "a single call keeps 1.9 cores busy."),
        (UNSAFE, False, False, "threads must not share it."),
        (BUSY_MACHINE, False, True, "on one core: it computes."),
    ],
)
def test_findings(found, threads, processes, words):
    assert (found.threads_help, found.processes_help) == (threads, processes)
    assert found.words.endswith(words)


def test_times_in_words():
    assert WAITS.words.startswith("Two calls take 2.0 s one after the other, 1.0 s in two threads: ")


ROWS = Speed(0.02, {1: 0.02, 8: 0.16}, None)
SINGLE = Speed(0.02, {1: 0.02}, 1)
CALLS = Speed(0.02, {1: 0.02, 8: 0.02, 4096: 0.02}, None)
QUICK = Speed(2e-4, {1: 2e-4, 8: 2e-4, 4096: 2e-4}, None)


def advice(speed, found, eager=True):
    options = "" if speed.max_rows is None else f", max_rows={speed.max_rows}"
    given = advise(TrainingStep(32, 20, speed, "deterministic"), found, eager, options)
    return None if given is None else (given.argument, given.value)


@pytest.mark.parametrize(
    ("speed", "found", "expected"),
    [
        (ROWS, WAITS, ("evaluator", "bondgrad.evaluators.Threads(8)")),
        (SINGLE, WAITS, ("evaluator", "bondgrad.evaluators.Threads(8, max_rows=1)")),
        (ROWS, PROGRAMS, ("evaluator", "bondgrad.evaluators.Threads(os.cpu_count())")),
        (ROWS, COMPUTES, ("evaluator", "bondgrad.evaluators.Processes(os.cpu_count())")),
        (SINGLE, COMPUTES, ("evaluator", "bondgrad.evaluators.Processes(os.cpu_count(), max_rows=1)")),
        (ROWS, UNSAFE, None),
        (ROWS, ONE_AT_A_TIME, None),
        (ROWS, SEVERAL_CORES, None),
        (ROWS, None, None),
        (CALLS, WAITS, ("eager", "True")),
        (CALLS, COMPUTES, ("eager", "True")),
        (CALLS, None, ("eager", "True")),
        (QUICK, None, None),
        (SINGLE, None, None),
    ],
)
def test_advice(speed, found, expected, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert advice(speed, found) == expected
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    if expected is not None and "cpu_count" in expected[1]:
        assert advice(speed, found) == (None, "")


def test_eager_only_where_it_can_be():
    assert advice(CALLS, WAITS, eager=False) == (None, "")
    assert advice(CALLS, None, eager=False) is None


def test_why_workers_are_not_recommended(monkeypatch):
    """A step of 32 rows takes 32 · 21 times 20 ms; with one core, processes only add to that."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    found = report(speed=ROWS, overlap=COMPUTES, batch=32)
    assert found.words["Side by side"].endswith("on one core: it computes.")
    assert (
        "none is recommended, since Processes(os.cpu_count()) would bring a step of 32 rows "
        in (found.words["Evaluator"])
    )
    assert found.words["Evaluator"].endswith("which is not much shorter.")
    assert "evaluator" not in found.reasons


def test_the_step_before_and_after():
    """32 rows and 20 evaluations for each of them, 20 ms each."""
    words = advise(TrainingStep(32, 20, SINGLE, "deterministic"), WAITS, True, ", max_rows=1").words
    step = "a step of 32 rows from 13 s to 1.7 s"
    assert words == f"20 ms a row, one row at a time, deterministic: Threads(8, max_rows=1) brings {step}."
    words = advise(TrainingStep(32, 20, CALLS, ""), None, True).words
    assert words.startswith("20 ms a call: eager=True brings a step of 32 rows from 40 ms to 20 ms, ")


def test_a_box_that_cannot_be_sent(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert advice(ROWS, STUCK) == (None, "")
    found = report(speed=ROWS, overlap=STUCK)
    assert "Processes(os.cpu_count(), factory) would bring" in found.words["Evaluator"]
    assert "evaluator" not in found.reasons


@pytest.mark.parametrize(
    "found",
    [
        {"evaluator_given": True},
        {"history": History(True, 0.1)},
        {"company": RowCoupling(True, 0.1)},
        {"speed": None},
    ],
)
def test_where_nothing_is_recommended(found):
    known = {"speed": ROWS, "overlap": WAITS, "randomness": quiet()}
    assert report(**known).advice is not None
    assert report(**known | found).advice is None
    assert "Evaluator" not in report(**known | found).words


def test_in_the_report(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    made = report(speed=SINGLE, overlap=COMPUTES, randomness=noisy(), batch=10)
    assert "Side by side: Two calls take 2.0 s" in str(made)
    assert "Evaluator: 20 ms a row, one row at a time, random: Processes(os.cpu_count(), max_rows=1) " in str(made)
    assert "Processes(n, factory) makes one in each of them instead." in str(made)
    assert made.code.startswith("import os\n\nimport bondgrad\n\nbox")
    assert made.reasons["evaluator"] == "brings a step of 10 rows from 1.8 s to 470 ms; it takes one row at a time"
    assert made.as_dict()["overlap"]["picklable"] is True
