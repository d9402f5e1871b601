"""What runs leave in a folder: by which command, with which settings, beside which others."""

import os
import shutil

import pytest
import torch
import yaml

from bondgrad.experiments import config, store
from bondgrad.experiments.trainer import Run
from tests.experiments.test_experiments import SMALL, invoke, results


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


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


def test_file_names_are_tame():
    assert store.slug("NEN BOND, through time/..") == "NEN_BOND_through_time_.."
