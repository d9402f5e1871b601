"""The table in the terminal: what it shows, and that training goes on whatever becomes of it."""

import builtins
import io
import logging
import sys
import time

import pytest
import torch
from torch import nn

import bondgrad
from bondgrad import BlackBox, LiveTable
from bondgrad.evaluators import Local, Threads
from tests.helpers import gradient

console = pytest.importorskip("rich.console")


def written_to(terminal=False):
    """A console that writes into a string."""
    return console.Console(file=io.StringIO(), width=150, force_terminal=terminal, color_system=None)


def train(layer, steps=3):
    for _ in range(steps):
        gradient(layer, torch.randn(8, 3), torch.ones(8, 3))


def cells(text, worker):
    """The numbers in the row of a worker of the last table."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    return next(row for row in reversed(rows) if row[0] == str(worker))


def slow(x: torch.Tensor):
    time.sleep(1e-3)
    return torch.sin(x)


def test_where_there_is_no_terminal_the_table_is_printed_once_at_the_end():
    out = written_to()
    with Threads(2) as evaluator, LiveTable(layer := BlackBox(slow, 3, evaluator=evaluator), console=out) as live:
        train(layer)
        assert out.file.getvalue() == ""
        assert isinstance(live, LiveTable)
    text = out.file.getvalue()
    assert text.count("worker") == 1
    assert "slow, Threads(2" in text
    assert (
        f"{layer.stats.evaluations:,} evaluations, 0 retried, 0 without an output, 0 wasted, 0 abandoned threads"
        in text
    )
    for worker in layer.stats.workers:
        row = cells(text, worker.worker)
        assert row[1] == f"{worker.rows:,}"
        assert float(row[2].replace(",", "")) > 0  # rows a second
        assert row[3].endswith("%")
        assert float(row[4]) <= float(row[5]) <= float(row[6])
        assert row[7] == "0"


def test_in_a_terminal_the_table_is_drawn_while_the_box_works():
    out = written_to(terminal=True)
    with LiveTable(layer := BlackBox(torch.sin, 3), every=0.01, console=out):
        train(layer, 1)
        deadline = time.monotonic() + 20
        while out.file.getvalue().count("evaluations") < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        during = out.file.getvalue()
        train(layer, 1)
    assert during.count("evaluations") >= 3
    assert "abandoned" not in during  # it is about threads
    assert f"{layer.stats.evaluations:,} evaluations" in out.file.getvalue()[len(during) :]


def test_failures_by_kind():
    calls = 0

    def fails(x: torch.Tensor):
        nonlocal calls
        calls += 1
        if calls in (3, 7):
            raise OSError("no answer")
        return torch.sin(x)

    out = written_to()
    layer = BlackBox(fails, 3, evaluator=Local(max_rows=1))
    with LiveTable(layer, console=out), pytest.warns(UserWarning, match="asked again"):
        train(layer, 1)
    stats = layer.stats
    (worker,) = stats.workers
    assert worker.failures == 2
    assert cells(out.file.getvalue(), 0)[7] == f"{worker.failures:,}"
    text = f"{stats.retried:,} retried, 2 without an output, 0 wasted; OSError: {stats.errors['OSError']:,}"
    assert text in out.file.getvalue()


def test_several_boxes_and_none():
    out = written_to()
    first, second = BlackBox(torch.sin, 3), BlackBox(torch.cos, 3)
    with LiveTable(first, second, console=out):
        train(first)
    text = out.file.getvalue()
    assert text.index("sin, Local(") < text.index("cos, Local(")
    assert text.count("worker") == 2
    with LiveTable(console=out):
        pass


class Broken(io.StringIO):
    def write(self, text):
        raise OSError("the terminal is gone")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_broken_display_ends_the_display_only(terminal, caplog):
    out = console.Console(file=Broken(), force_terminal=terminal)
    layer = BlackBox(torch.sin, 3)
    with caplog.at_level(logging.WARNING, "bondgrad"), LiveTable(layer, every=0.01, console=out):
        train(layer)
        time.sleep(0.05)
        train(layer)
    assert layer.stats.evaluations > 0
    assert "The live table ended with OSError: the terminal is gone" in caplog.text


def test_counters_that_break_end_the_display_only(caplog, monkeypatch):
    out, layer = written_to(terminal=True), BlackBox(torch.sin, 3)
    with caplog.at_level(logging.WARNING, "bondgrad"), LiveTable(layer, every=0.01, console=out) as live:
        monkeypatch.setattr(live, "picture", lambda: 1 / 0)
        deadline = time.monotonic() + 20
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.01)
        train(layer)
    assert len(caplog.records) == 1
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("terminal", [True, False])
def test_what_the_loop_raises_comes_through(terminal):
    """Ctrl-C, too; and the terminal has its cursor back."""
    out = written_to(terminal)
    with pytest.raises(KeyboardInterrupt), LiveTable(BlackBox(torch.sin, 3), console=out):
        raise KeyboardInterrupt
    text = out.file.getvalue()
    assert "0 evaluations" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == terminal


def test_a_table_can_be_used_again():
    out, layer = written_to(), BlackBox(torch.sin, 3)
    table = LiveTable(layer, console=out)
    for _ in range(2):
        with table:
            train(layer, 1)
    assert out.file.getvalue().count("worker") == 2


def test_two_tables_in_one_terminal():
    out, layer = written_to(terminal=True), BlackBox(torch.sin, 3)
    with LiveTable(layer, console=out), LiveTable(layer, console=out):
        train(layer, 1)
    assert layer.stats.evaluations > 0


def test_long_times_and_short_ones():
    now = time.time()
    layer = BlackBox(torch.sin, 3)
    for worker, seconds in enumerate((2.5, 1.5e-6)):
        call = bondgrad.evaluators.Call(0, 1, worker, now - 5, seconds)
        layer.driver.record.add((call,), again=False)
    out = written_to()
    with LiveTable(layer, console=out):
        pass
    assert cells(out.file.getvalue(), 0)[3:7] == ["50%", "2,500", "2,500", "2,500"]
    assert cells(out.file.getvalue(), 1)[4:7] == ["0.0015", "0.0015", "0.0015"]


def test_what_is_refused():
    with pytest.raises(TypeError, match="got Sequential: give the layer itself"):
        LiveTable(nn.Sequential(BlackBox(torch.sin, 3)))
    with pytest.raises(ValueError, match="every"):
        LiveTable(BlackBox(torch.sin, 3), every=0)


def test_without_rich(monkeypatch):
    real = builtins.__import__

    def missing(name, *rest):
        if name.split(".")[0] == "rich":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'bondgrad\[cli\]'"):
        LiveTable(BlackBox(torch.sin, 3))
