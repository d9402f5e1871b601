"""The demo, short."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from bondgrad._version import __version__
from bondgrad.experiments.demo import run_demo
from bondgrad.experiments.trainer import Run


def bondgrad(*arguments, cwd):
    program = Path(sys.executable).parent / "bondgrad"
    command = [str(program)] if program.exists() else [sys.executable, "-c", "from bondgrad.cli import main; main()"]
    return subprocess.run([*command, *arguments], cwd=cwd, capture_output=True, text=True)


def test_two_epochs(tmp_path):
    done = bondgrad("demo", "--epochs", "2", "--output", "here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout  # "sign" stands above it where columns are narrow
    results = json.loads((tmp_path / "here" / "demo.json").read_text())
    runs = {run["method"]: run for run in results["runs"]}
    assert list(runs) == ["AD", "BOND", "BONDS", "SPSA"]
    assert runs["BOND"]["sign_accuracy"] > 0.999
    assert 0.55 < runs["BONDS"]["sign_accuracy"] < 0.8
    assert 0.45 < runs["SPSA"]["sign_accuracy"] < 0.55
    assert abs(runs["BOND"]["test_loss"][-1] / runs["AD"]["test_loss"][-1] - 1) < 0.02
    evaluations = {method: run["evaluations_per_step"] for method, run in runs.items()}
    assert evaluations == {"AD": 64, "BOND": 64 * 11, "BONDS": 64 * 3, "SPSA": 64 * 3}
    assert (results["bondgrad"], results["seeds"], results["epochs"]) == (__version__, [42], 2)
    assert {method: run["policy"] for method, run in runs.items()} == {
        "AD": None,
        "BOND": "bond",
        "BONDS": "bond",
        "SPSA": None,
    }
    assert 'BOND, policy="bond"' in done.stdout
    assert (tmp_path / "here" / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_it_works_in_one_thread_and_restores_their_number(tmp_path, monkeypatch):
    before, seen, whole = torch.get_num_threads(), [], Run.turn

    def counted(self, steps, timed):
        seen.append(torch.get_num_threads())
        return whole(self, steps, timed)

    monkeypatch.setattr(Run, "turn", counted)
    monkeypatch.setattr(Run, "steps_of_epoch", 2)
    torch.set_num_threads(2)
    try:
        run_demo(1, [42], tmp_path, Console(quiet=True))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}
    assert json.loads((tmp_path / "demo.json").read_text())["threads"] == 1


def test_an_interrupt_loses_nothing(tmp_path, monkeypatch):
    whole = Run.turn

    def interrupted(self, steps, timed):
        if len(self.history) == 1 and self.settings.gradient.method == "BONDS":
            raise KeyboardInterrupt
        return whole(self, steps, timed)

    monkeypatch.setattr(Run, "turn", interrupted)
    monkeypatch.setattr(Run, "steps_of_epoch", 8)
    run_demo(5, [42], tmp_path, Console(quiet=True))
    assert [len(run["test_loss"]) for run in json.loads((tmp_path / "demo.json").read_text())["runs"]] == [1] * 4


@pytest.mark.parametrize(("arguments", "says"), [(["--version"], __version__), (["--help"], "demo")])
def test_the_command_line(arguments, says, tmp_path):
    done = bondgrad(*arguments, cwd=tmp_path)
    assert done.returncode == 0
    assert says in done.stdout


def test_bad_arguments_are_named(tmp_path):
    done = bondgrad("demo", "--epochs", "0", cwd=tmp_path)
    assert done.returncode == 2
    assert "epochs" in done.stderr
