"""Where the box of a run is evaluated: evaluators in experiments' files."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import yaml
from rich.console import Console

from bondgrad import evaluators
from bondgrad.evaluators import Answer, Description, Evaluator, Threads
from bondgrad.experiments import config, evaluation, store
from bondgrad.experiments.model import build
from bondgrad.experiments.runner import Runner
from bondgrad.experiments.trainer import Run
from bondgrad.reservoirs import Parallel
from tests.experiments.test_experiments import SMALL, invoke

START = SMALL.partition("runs:")[0].replace("batch: 64", "batch: 8").replace("steps: 30", "steps: 3")
OTHER = ("run", "settings", "loop_ms", "loop_quartiles", "seconds", "command")  # what is not the same in equal runs


def written(tmp_path, *runs, start=START):
    """A file with these runs, by the words for their evaluators."""
    path = tmp_path / "mine.yaml"
    path.write_text(
        start + "runs:\n" + "".join(f"  {name}: {{gradient: {{evaluator: {how}}}}}\n" for name, how in runs)
    )
    return path


def run_file(path, output):
    return invoke("run", path, "--output", output, "--seed", "1", "--device", "cpu")


def record(folder, run):
    """What a run has brought, to the last digit."""
    found = json.loads((folder / "runs" / f"{run}-1.json").read_text())
    return {name: value for name, value in found.items() if name not in OTHER}


def test_workers_change_nothing_where_rows_are_evaluated_one_by_one(tmp_path, monkeypatch):
    pool = ThreadPoolExecutor(2)  # a client of Dask is such an executor, too
    monkeypatch.setattr(evaluation, "dask_client", {"there": pool}.get)
    path = written(
        tmp_path,
        ("here", "{kind: local, max_rows: 1}"),
        ("threads", "{kind: threads, n: 3, max_rows: 1, timeout: 50}"),
        ("processes", "{kind: processes, n: 2, max_rows: 1}"),
        ("dask", "{kind: dask, address: there, n: 2, max_rows: 1}"),
    )
    with pool:
        done = run_file(path, tmp_path / "out")
    assert done.exit_code == 0, done.output
    one, *others = (record(tmp_path / "out", name) for name in ("here", "threads", "processes", "dask"))
    assert one["evaluations_per_step"] == 8 * 11
    assert others == [one] * 3
    saved = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert saved["runs"]["threads"]["gradient"]["evaluator"] == {
        "kind": "threads",
        "n": 3,
        "max_rows": 1,
        "timeout": 50,
    }


def test_runs_without_one_keep_their_settings(tmp_path):
    """Otherwise results that were made before there were evaluators would be refused."""
    path = written(tmp_path, ("none", "null"))
    assert "evaluator" not in config.load(path).runs[0].as_dict()["gradient"]


@pytest.mark.parametrize("end", ["done", "stopped", "interrupted", "failed"])
def test_evaluators_are_closed_in_the_end(end, tmp_path, monkeypatch):
    experiment = config.load(written(tmp_path, ("threads", "{kind: threads, n: 2}"))).changed(seeds=[1])
    kept = store.Store(tmp_path / "out", experiment, "")
    runner = Runner(experiment, kept, tmp_path, torch.device("cpu"))
    one, close, closed = Run._one, Threads.close, []

    def step(self, *args, **kwargs):
        one(self, *args, **kwargs)
        runner.stopped = end == "stopped"
        if end in ("interrupted", "failed"):
            raise KeyboardInterrupt if end == "interrupted" else RuntimeError("the box is on fire")

    monkeypatch.setattr(Run, "_one", step)
    monkeypatch.setattr(Threads, "close", lambda self: (closed.append(self), close(self)))
    try:
        assert runner.run(Console(quiet=True)) == (end == "done")
    except (KeyboardInterrupt, RuntimeError):
        assert end in ("interrupted", "failed")
    finally:
        kept.close()
    assert len(closed) == 1


def test_a_journal_for_every_run_and_seed(tmp_path, monkeypatch):
    """A run that is killed before it was saved gets the same answers again, without asking the box."""
    how = f"{{kind: threads, n: 2, max_rows: 1, journal: {tmp_path / 'journals'}}}"
    path, one = written(tmp_path, ("a run", how)), Run._one

    def dying(self, *args, **kwargs):
        one(self, *args, **kwargs)
        if self.steps == 2:
            raise RuntimeError("killed")

    assert run_file(path, tmp_path / "whole").exit_code == 0
    assert [file.name for file in (tmp_path / "journals").iterdir()] == ["a_run-1.journal"]
    (tmp_path / "journals" / "a_run-1.journal").unlink()
    monkeypatch.setattr(Run, "_one", dying)
    assert run_file(path, tmp_path / "out").exit_code == 1
    monkeypatch.setattr(Run, "_one", one)
    done = run_file(path, tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert record(tmp_path / "out", "a_run") == record(tmp_path / "whole", "a_run")
    file = evaluators.JournalFile(tmp_path / "journals" / "a_run-1.journal")
    runs = dict(file.select("SELECT run, count(*) FROM evaluations GROUP BY run"))
    file.close()
    assert runs == {1: 2 * 8 * 11, 2: 7 * 8 * 11}


class Server(Evaluator):
    """Stands for a service that has the box."""

    def __init__(self, url, model):
        super().__init__()
        self.box = Parallel(2, 3, 20, 2, seed=0)

    def describe(self):
        return Description("remote")

    def evaluate(self, request):
        return Answer(self.box(request.points))


def test_a_box_on_a_server(tmp_path, monkeypatch):
    """What the file says of the box is known of the one on the server."""
    monkeypatch.setattr(evaluators, "UMBridge", Server)
    box = "kind: parallel, blocks: 2, n_in: 3, hidden: 20, n_out: 2"
    start = START.replace("kind: fixed, d_in: 5, hidden: 20, d_out: 5", box)
    start = start.replace("20, 5]", "20, 6]").replace("[5, 20", "[4, 20")
    path = written(tmp_path, ("served", "{kind: umbridge, url: there, model: forward}"), start=start)
    parts = build(config.load(path).runs[0], 1, torch.device("cpu"))
    assert parts.black_box.fn.__name__ == "remote"
    assert parts.black_box.structure == parts.exact.reservoir.structure
    assert torch.equal(parts.black_box(torch.ones(2, 6)), parts.black_box.evaluator.box(torch.ones(2, 6)))
    assert run_file(path, tmp_path / "out").exit_code == 0


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("threads", "evaluator must have names and values, as in {kind: ...}, got 'threads'"),
        ("{n: 4}", "kind of an evaluator must be one of local, threads, processes, ray"),
        ("{kind: thread, n: 4}", "kind of an evaluator must be one of local, threads"),
        ("{kind: threads, n: 4, max_row: 1}", "evaluator, threads: nothing is called max_row; there are n, max_rows"),
        ("{kind: threads, n: 4, factory: sin}", "nothing is called factory"),
        ("{kind: threads, n: 0}", "evaluator, threads: n must be a positive integer, got 0"),
        ("{kind: threads}", "missing 1 required positional argument: 'n'"),
        ("{kind: dask, n: 2}", "evaluator, dask: address must be that of a scheduler, such as tcp://localhost:8786"),
        ("{kind: dask, executor: 2}", "nothing is called executor; there are address, n"),
        ("{kind: umbridge, url: 'http://localhost:1', model: m}", "could not make its box: "),
        ("{kind: local, journal: true}", "journal must be the name of a folder, got True"),
        ("{kind: local}, method: AD", "an evaluator is for BOND, BONDS, forward, not for AD: say evaluator: null"),
        ("{kind: local}, method: SPSA", "not for SPSA"),
        ("{kind: threads, n: 2}}, box: {noise: 0.1", "a box with noise or a bench answers one row after the other"),
    ],
)
def test_mistakes_are_named(how, says, tmp_path):
    done = run_file(written(tmp_path, ("mine", how)), tmp_path / "out")
    assert done.exit_code == 2, done.output
    assert says in " ".join(done.output.split())


def test_what_holds_for_all_runs_can_be_taken_back(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        START
        + """
gradient: {evaluator: {kind: threads, n: 2}}
runs:
  two: {}
  three: {gradient: {evaluator: {n: 3}}}
  exact: {gradient: {method: AD, evaluator: null}}
"""
    )
    found = [run.gradient.evaluator for run in config.load(path).runs]
    assert found == [{"kind": "threads", "n": 2}, {"kind": "threads", "n": 3}, None]
