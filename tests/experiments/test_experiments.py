"""Experiments while they run: what they leave, and how they go on when they were stopped."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml
from rich.console import Console
from typer.testing import CliRunner

from bondgrad.cli import main
from bondgrad.experiments import config, store, task
from bondgrad.experiments.runner import Runner
from bondgrad.experiments.trainer import Run

SMALL = """
title: Small
data: california_housing
loss: huber
batch: 64
epochs: 3
steps: 30
seeds: [1, 2]
read_in: {kind: ffnn, sizes: [8, 20, 5], activation: relu}
box: {kind: fixed, d_in: 5, hidden: 20, d_out: 5}
read_out: {kind: ffnn, sizes: [5, 20, 1]}
runs:
  AD: {gradient: {method: AD}}
  BOND: {}
"""


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


def invoke(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def results(folder):
    return {(run["run"], run["seed"]): run for run in json.loads((folder / "results.json").read_text())["runs"]}


def test_a_file_runs_and_says_what_it_did(small, tmp_path):
    done = invoke("run", small, "--output", tmp_path / "out", "--device", "cpu")
    assert done.exit_code == 0, done.output
    runs = results(tmp_path / "out")
    assert set(runs) == {("AD", 1), ("AD", 2), ("BOND", 1), ("BOND", 2)}
    assert runs["BOND", 1]["sign_accuracy"] > 0.98
    assert runs["BOND", 1]["epochs_run"] == 3
    saved = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert saved["runs"]["BOND"]["gradient"]["policy"] == {"kind": "bond"}
    assert saved["runs"]["AD"]["batch"] == 64
    lines = (tmp_path / "out" / "runs" / "BOND-1.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2, 3]
    again = invoke("run", small, "--output", tmp_path / "out", "--device", "cpu")
    assert again.output.count("done before") == 4


def test_side_by_side_or_one_after_the_other_is_the_same(small, tmp_path):
    for n in (1, 4):
        invoke("run", small, "--output", tmp_path / str(n), "--side-by-side", n, "--device", "cpu")
    one, four = results(tmp_path / "1"), results(tmp_path / "4")
    assert {key: run["curve"] for key, run in one.items()} == {key: run["curve"] for key, run in four.items()}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_killed_or_interrupted_it_goes_on_as_it_would_have(how, tmp_path):
    path, whole, broken = tmp_path / "long.yaml", tmp_path / "whole", tmp_path / "broken"
    path.write_text(SMALL.replace("epochs: 3", "epochs: 4").replace("steps: 30", "steps: 120"))
    options = ("run", path, "--device", "cpu", "--seed", "1", "--output")
    assert invoke(*options, whole).exit_code == 0
    program = "import bondgrad.experiments.runner as r; r.SAVE_EVERY = 0.1; from bondgrad.cli import main; main()"
    command = [sys.executable, "-c", program, *map(str, options), str(broken)]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    checkpoint, lines = broken / "runs" / "BOND-1.pt", broken / "runs" / "BOND-1.jsonl"
    while first.poll() is None and not (checkpoint.exists() and lines.exists() and lines.read_text().count("\n") >= 2):
        time.sleep(0.02)
    os.kill(first.pid, how)
    said = first.communicate()[0]
    assert first.returncode == (-9 if how == signal.SIGKILL else 130), said
    assert checkpoint.exists()
    second = invoke(*options, broken)
    assert second.exit_code == 0, second.output
    assert "goes on after" in second.output
    clock = {"loop_ms": 0, "loop_quartiles": 0, "seconds": 0, "command": ""}
    one, other = ({key: run | clock for key, run in results(folder).items()} for folder in (whole, broken))
    assert one == other
    assert lines.read_text() == (whole / "runs" / "BOND-1.jsonl").read_text()
    assert not checkpoint.exists()


def test_killed_after_the_last_epoch_nothing_is_missing(small, tmp_path, monkeypatch):
    """At each of the writes."""
    real = store._write
    for victim in ("jsonl", "BOND-1.json", "results.json"):
        folder = tmp_path / victim

        def dying(path, text, victim=victim):
            if path.name.endswith(victim) and text.count("\n") and '"epoch": 3' in text.replace("\n", ""):
                raise OSError("the end")
            real(path, text)

        monkeypatch.setattr(store, "_write", dying)
        invoke("run", small, "--output", folder, "--seed", "1", "--only", "BOND", "--device", "cpu")
        monkeypatch.setattr(store, "_write", real)
        done = invoke("run", small, "--output", folder, "--seed", "1", "--only", "BOND", "--device", "cpu")
        assert done.exit_code == 0, done.output
        assert len((folder / "runs" / "BOND-1.jsonl").read_text().splitlines()) == 3
        assert results(folder)["BOND", 1]["epochs_run"] == 3
        assert not (folder / "runs" / "BOND-1.pt").exists()


@pytest.fixture
def burning():
    """BOND's box, in the second epoch."""

    def broken(self, *args):
        if self.settings.run == "BOND" and self.epoch == 1:
            raise RuntimeError("the box is on fire")
        return whole(self, *args)

    whole = Run.turn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "turn", broken)
        yield patch


def test_what_is_done_is_in_the_results_though_the_rest_fails(small, tmp_path, burning):
    done = invoke("run", small, "--output", tmp_path / "out", "--seed", "1", "--side-by-side", "1", "--device", "cpu")
    assert isinstance(done.exception, RuntimeError)
    runs = results(tmp_path / "out")
    assert (runs["AD", 1]["epochs_run"], runs["BOND", 1]["epochs_run"]) == (3, 1)


def test_what_fails_in_one_run_does_not_cost_the_others_what_they_have(small, tmp_path, burning):
    invoke("run", small, "--output", tmp_path / "out", "--seed", "1", "--device", "cpu")
    burning.undo()
    done = invoke("run", small, "--output", tmp_path / "out", "--seed", "1", "--device", "cpu")
    assert "AD, seed 1: goes on after" in done.output
    assert done.exit_code == 0


def test_an_interrupt_does_not_wait_for_the_other_runs(small, tmp_path, monkeypatch):
    experiment = config.load(small).changed(seeds=[1])
    kept = store.Store(tmp_path / "out", experiment, "")
    runner = Runner(experiment, kept, tmp_path, torch.device("cpu"))
    one = Run._one

    def pressed(self, *args, **kwargs):
        one(self, *args, **kwargs)
        runner.stopped = self.steps == 6  # in the middle of the first run's second turn

    monkeypatch.setattr(Run, "_one", pressed)
    assert not runner.run(Console(quiet=True))
    steps = {run: torch.load(kept.path(run, 1, "pt"), weights_only=True)["at"][2] for run in ("AD", "BOND")}
    kept.close()
    assert steps == {"AD": 6, "BOND": 4}


def test_the_resolved_file_can_be_run(small, tmp_path):
    invoke("run", small, "--output", tmp_path / "out", "--seed", "1", "--epochs", "2", "--device", "cpu")
    done = invoke("run", tmp_path / "out" / "config.yaml", "--output", tmp_path / "again", "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert "Shortened: 2 of 3 epochs, 1 of 2 seeds" in " ".join(done.output.split())
    clock = {"loop_ms": 0, "loop_quartiles": 0, "seconds": 0, "command": ""}
    one, other = ({k: run | clock for k, run in results(tmp_path / f).items()} for f in ("out", "again"))
    assert one == other


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "Our own protocol"),
        (("--steps", "5"), "Shortened: 5 steps an epoch, not 30"),
        (("--steps", "5000"), "Shortened: all steps an epoch, not 30"),
        (("--epochs", "2"), "Shortened: 2 of 3 epochs"),
        (("--epochs", "4"), "Shortened: 4 epochs instead of 3"),
        (("--bfloat16",), "Shortened: networks in bfloat16"),
    ],
)
def test_what_was_changed_is_said(options, says, small, tmp_path):
    done = invoke("run", small, "--output", tmp_path / "out", "--device", "cpu", "--measure-every", "0", *options)
    assert says in " ".join(done.output.split())


def test_a_run_that_diverges_does_not_take_the_others_with_it(small, tmp_path):
    small.write_text(SMALL + "  wild: {gradient: {method: AD}, optimizer: {kind: sgd, rate: 1e30}}\n")
    done = invoke("run", small, "--output", tmp_path / "out", "--seed", "1", "--device", "cpu")
    assert done.exit_code == 0
    runs = results(tmp_path / "out")
    assert runs["wild", 1]["failed"]
    assert runs["BOND", 1]["epochs_run"] == 3
    assert "1 run failed" in done.output
    again = invoke("run", small, "--output", tmp_path / "out", "--seed", "1", "--device", "cpu")
    assert "wild, seed 1: done before and failed: the loss was" in " ".join(again.output.split())


def test_tensorboard(small, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = invoke("run", small, "--output", tmp_path / "out", "--tensorboard", "--seed", "1", "--device", "cpu")
    assert done.exit_code == 0, done.output
    events = EventAccumulator(str(tmp_path / "out" / "runs" / "tensorboard" / "BOND-1")).Reload()
    written = [event.value for event in events.Scalars("test_loss")]
    assert written == pytest.approx(results(tmp_path / "out")["BOND", 1]["curve"]["test_loss"], rel=1e-5)


def test_a_report_of_nothing_says_what_to_do(tmp_path):
    done = invoke("report", tmp_path, "--output", tmp_path / "page")
    assert done.exit_code == 2
    assert "bondgrad reproduce NAME" in done.output


def test_steps_are_kept_one_by_one_where_a_figure_shows_them(small, tmp_path):
    for kind, kept in (("curves, y: test_loss", set()), ("magnitudes, runs: [BOND]", {"BOND"}), ("bounds", {"BOND"})):
        small.write_text(f"{SMALL}figures:\n  - {{title: it, kind: {kind}}}\n")
        invoke("run", small, "--output", tmp_path / kind[:5], "--seed", "1", "--device", "cpu")
        runs = results(tmp_path / kind[:5])
        assert {name for name, _ in runs if runs[name, 1]["trace"]} == kept


def test_every_set_of_pictures_says_how_far_they_are_moved():
    assert task.CROP.keys() == task.PICTURES.keys()
