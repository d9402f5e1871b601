"""The command `bondgrad journal`."""

import re
import warnings

import pytest
import torch
from typer.testing import CliRunner

from bondgrad import BlackBox
from bondgrad.cli import main
from bondgrad.evaluators import Answer, Call, Evaluator, Journal, JournalFile, Request, Threads
from bondgrad.experiments.journal import read
from tests.evaluators.journals import unsure


class Told(Evaluator):
    """Answers with the call that it is told to have made."""

    def evaluate(self, request):
        return Answer(request.points, calls=(request.function,))


def written(path, calls):
    with Journal(Told(), path) as journal:
        for number, call in enumerate(calls):
            journal.evaluate(Request(call, torch.ones(call.rows, 2), number=number))


@pytest.fixture
def cli(monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    return lambda *arguments: CliRunner().invoke(main, ["journal", *map(str, arguments)])


def lines(output):
    """The cells of every line of a table."""
    return [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in output.splitlines() if "│" in line]


def test_a_file_that_is_being_written(tmp_path, cli):
    path, picture = tmp_path / "box.journal", tmp_path / "box.png"
    with Journal(Threads(2), path) as journal:
        layer = BlackBox(unsure, 3, evaluator=journal, seed=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(3):
                layer(torch.randn(64, 3, requires_grad=True)).sum().backward()
        done = cli(path, "--plot", picture)
        assert done.exit_code == 0, done.output
        stats = layer.stats
    assert f"{stats.evaluations:,} evaluations of unsure (3 inputs, 3 outputs)" in done.output
    table = {line[0]: line[1:] for line in lines(done.output)}
    for worker in stats.workers:
        assert table[str(worker.worker)][0] == f"{worker.rows:,}"
    assert table["all"][0] == f"{stats.evaluations:,}"
    assert {"base", "gradient", "trial"} <= table.keys()
    assert table["RuntimeError"] == [f"{stats.errors['RuntimeError']:,}", "laser is off"]
    assert int(table["not finite"][0].replace(",", "")) > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_by_hour_and_by_worker(tmp_path, cli):
    path, day = tmp_path / "box.journal", 1_700_006_400.0
    calls = [Call(0, 5, worker, day + 3600 * hour, 1800.0 - 900 * worker) for hour in range(5) for worker in (0, 1)]
    written(path, [*calls, Call(0, 1, 1, day + 3600 * 4.5, 60.0, RuntimeError("[cold] head"))])
    done = cli(path)
    assert done.exit_code == 0, done.output
    table = lines(done.output)
    hours = [line for line in table if line[0].endswith(":00")]
    assert [line[1] for line in hours] == ["10", "10", "10", "10", "11"]
    assert [line[2] for line in hours] == ["0", "0", "0", "0", "1"]
    by_name = {line[0]: line[1:] for line in table}
    # The first worker was busy for 2.5 h of the 4.517 h between the first beginning and the last end.
    assert by_name["0"] == ["25", "0", "55 %", "6.0 min", "6.0 min", "6.0 min", "6.0 min"]
    assert by_name["1"][:3] == ["26", "1", "28 %"]
    assert by_name["RuntimeError"] == ["1", "[cold] head"]


def test_time_between_two_runs_is_not_idle(tmp_path):
    path = tmp_path / "box.journal"
    written(path, [Call(0, 2, 0, 1e9, 10.0)])
    written(path, [Call(0, 2, 0, 2e9, 10.0)])  # is answered from the file
    assert read(JournalFile(path)).seconds() == 10
    with Journal(Told(), path) as journal:
        journal.evaluate(Request(Call(0, 2, 0, 2e9, 10.0), torch.ones(2, 2), number=1))
    assert read(JournalFile(path)).seconds() == 20


def test_many_hours_and_many_workers(tmp_path, cli):
    path, picture = tmp_path / "box.journal", tmp_path / "box.png"
    written(path, [Call(0, 1, n % 12, 1_700_006_400.0 + 3600 * n, 0.0) for n in range(60)])
    done = cli(path, "--plot", picture)
    assert "By hour, the last 48 of 60" in done.output
    assert picture.exists()


def test_what_cannot_be_shown(tmp_path, cli):
    done = cli(tmp_path / "none")
    assert (done.exit_code, "there is no journal" in done.stderr) == (2, True)
    written(tmp_path / "empty", [])
    done = cli(tmp_path / "empty")
    assert (done.exit_code, "has no evaluations yet" in done.stderr) == (2, True)
    written(tmp_path / "one", [Call(0, 1)])
    done = cli(tmp_path / "one", "--plot", tmp_path / "nowhere" / "box.png")
    assert (done.exit_code, "there is no folder" in done.stderr) == (2, True)
    assert cli(tmp_path / "one").exit_code == 0
