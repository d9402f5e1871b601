"""Experiments while they run: what they leave, and how they go on when they were stopped."""

import json
import os
import shutil
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


def test_runs_of_several_commands_come_together(small, tmp_path):
    for only in ("A*", "BOND"):
        invoke("run", small, "--output", tmp_path / "out", "--only", only, "--seed", "1", "--device", "cpu")
    assert list(results(tmp_path / "out")) == [("AD", 1), ("BOND", 1)]
    assert list(yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())["runs"]) == ["AD", "BOND"]


def test_each_run_may_have_a_protocol_of_its_own(small, tmp_path):
    """What a command changes, it changes of the runs that it makes; the others stay as they were made."""
    out = ("--output", tmp_path / "out", "--seed", "1", "--device", "cpu")
    assert invoke("run", small, *out, "--only", "AD", "--epochs", "2").exit_code == 0
    assert invoke("run", small, *out, "--only", "BOND", "--epochs", "1").exit_code == 0
    assert [run["epochs_run"] for run in results(tmp_path / "out").values()] == [2, 1]
    saved = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert [run["epochs"] for run in saved["runs"].values()] == [2, 1]
    assert saved["planned"]["epochs"] == {"AD": 3, "BOND": 3}
    assert "done before" in invoke("run", small, *out, "--only", "AD", "--epochs", "2").output
    refused = invoke("run", small, *out, "--only", "AD", "--epochs", "1")
    assert "was made with other settings (epochs was 2, is 1)" in " ".join(refused.output.split())


def test_commands_that_start_together_keep_each_other_s_settings(small, tmp_path):
    """Each has read the folder before the other has written anything."""
    whole = config.load(small)
    first, second = (whole.only([name]).changed((1,), epochs=n) for name, n in (("AD", 2), ("BOND", 1)))
    one, other = (store.Store(tmp_path / "out", whole, "", chosen=chosen) for chosen in (first, second))
    for each in (one, other):
        each.config()
    saved = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert [run["epochs"] for run in saved["runs"].values()] == [2, 1]
    one.close()
    other.close()


def test_what_was_begun_compiled_does_not_go_on_otherwise(small, tmp_path):
    whole = config.load(small)
    compiled = whole.changed((1,), compile=True)
    begun = store.Store(tmp_path / "out", whole, "", chosen=compiled)
    run = Run(compiled.runs[0], 1, tmp_path, torch.device("cpu"))
    begun.save(run)
    with pytest.raises(ValueError, match="compile was True, is None"):
        store.Store(tmp_path / "out", whole, "", chosen=whole.changed((1,)))


def test_checkpoints_of_other_versions_are_refused(small, tmp_path):
    experiment = config.load(small)
    kept = store.Store(tmp_path / "out", experiment, "")
    run = Run(experiment.runs[0], 1, tmp_path, torch.device("cpu"))
    state = run.state()
    state["columns"] = state["columns"][:-1]
    torch.save(state, kept.path("AD", 1, "pt"))
    with pytest.raises(ValueError, match="was begun by another version of bondgrad: move it away"):
        kept.resume(run)


def test_the_same_run_of_another_experiment_is_not_made_again(small, tmp_path):
    options = ("--seed", "1", "--device", "cpu", "--output")
    assert invoke("run", small, *options, tmp_path / "results" / "first").exit_code == 0
    other = tmp_path / "other.yaml"
    other.write_text(SMALL.replace("  BOND: {}", "  Mine: {}\n  Forward: {gradient: {method: forward}}"))
    done = invoke("run", other, *options, tmp_path / "results" / "second")
    assert "Mine, seed 1: the same run was done in first, BOND" in " ".join(done.output.split())
    first, second = results(tmp_path / "results" / "first"), results(tmp_path / "results" / "second")
    assert second["Mine", 1]["curve"] == first["BOND", 1]["curve"]
    assert second["Mine", 1]["same_as"] == "first, BOND"
    assert "same_as" not in second["Forward", 1]
    assert second["Forward", 1]["curve"] != first["BOND", 1]["curve"]
    alone = invoke("run", other, *options, tmp_path / "elsewhere" / "third", "--only", "Mine", "--epochs", "2")
    assert "the same run" not in alone.output
    longer = invoke("run", other, *options, tmp_path / "results" / "fourth", "--only", "Mine", "--epochs", "2")
    assert "the same run" not in longer.output


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


def test_other_settings_are_not_mixed_in(small, tmp_path):
    invoke("run", small, "--output", tmp_path / "out", "--device", "cpu")
    done = invoke("run", small, "--output", tmp_path / "out", "--epochs", "5", "--device", "cpu")
    assert done.exit_code == 2
    assert "was made with other settings (epochs was 3, is 5)" in " ".join(done.output.split())
    assert yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())["runs"]["AD"]["epochs"] == 3
    shutil.rmtree(tmp_path / "out" / "runs")  # as in a fresh clone
    done = invoke("run", small, "--output", tmp_path / "out", "--epochs", "5", "--seed", "1", "--device", "cpu")
    assert done.exit_code == 2
    assert "results of other settings (AD, seed 1, 3 epochs)" in " ".join(done.output.split())


def test_unfinished_runs_of_other_settings_are_not_mixed_in(small, tmp_path):
    invoke("run", small, "--output", tmp_path / "out", "--seed", "1", "--device", "cpu")
    (tmp_path / "out" / "results.json").unlink()
    done = invoke("run", small, "--output", tmp_path / "out", "--epochs", "5", "--seed", "1", "--device", "cpu")
    assert done.exit_code == 2
    assert "other settings (epochs was 3, is 5)" in " ".join(done.output.split())


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


def test_two_commands_cannot_work_on_the_same_run(small, tmp_path):
    experiment = config.load(small)
    settings = experiment.runs[0]
    one, other = (store.Store(tmp_path / "out", experiment, "") for _ in range(2))
    assert one.lock(settings.run, 1)
    assert not other.lock(settings.run, 1)
    assert other.lock(settings.run, 2)
    done = invoke("run", small, "--output", tmp_path / "out", "--device", "cpu")
    other.close()
    one.close()
    assert done.exit_code == 2
    assert "another command is at work on AD, seed 1, AD, seed 2: all else is done" in " ".join(done.output.split())
    assert {key for key, run in results(tmp_path / "out").items() if run["epochs_run"] == 3} == {
        ("BOND", 1),
        ("BOND", 2),
    }


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


def test_what_was_half_written_is_removed(small, tmp_path, monkeypatch):
    half = tmp_path / "out" / "runs" / "AD-1.pt.123.part"
    half.parent.mkdir(parents=True)
    half.touch()
    invoke("run", small, "--output", tmp_path / "out", "--seed", "1", "--device", "cpu")
    assert not half.exists()

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    done = invoke("run", small, "--output", tmp_path / "full", "--seed", "1", "--device", "cpu")
    assert done.exit_code == 2
    assert "no space left" in done.output
    assert not list((tmp_path / "full").rglob("*.part"))


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


def test_file_names_are_tame():
    assert store.slug("NEN BOND, through time/..") == "NEN_BOND_through_time_.."
    assert task.CROP.keys() == task.PICTURES.keys()


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
