"""Experiments as files: those of the paper, and mistakes in those of others."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from bondgrad.cli import main
from bondgrad.experiments import config
from bondgrad.experiments.cost import cost
from bondgrad.experiments.model import NETWORKS, build
from bondgrad.experiments.settings import Schedule
from bondgrad.experiments.trainer import Run
from tests.experiments.test_experiments import SMALL, invoke, results
from tests.experiments.test_trainer import few_pictures


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


def shrunk(settings):
    """The same with networks that take no time."""
    changes = {"batch": 4, "steps": 1, "epochs": 1, "measure_every": 1, "compile": False}
    if settings.read_in["kind"] == "densenet":
        changes["read_in"] = settings.read_in | {"depth": 10, "growth": 4}
    return changes


@pytest.mark.parametrize("name", config.names())
def test_every_result_takes_a_step(name, monkeypatch, tmp_path):
    """Every box and method of each file, with networks made small."""
    few_pictures(monkeypatch)
    monkeypatch.setitem(
        NETWORKS, "resnet101", lambda out_features: nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, out_features))
    )
    experiment = config.load(config.PAPER / f"{name}.yaml")
    if experiment.sweep is not None:
        assert invoke("reproduce", name, "--output", tmp_path).exit_code == 0
        lines = json.loads((tmp_path / "results.json").read_text())["lines"]
        assert {line["label"] for line in lines} == {"on the bench", "device", "Rockmelon"}
    if experiment.name != name:
        assert experiment.name in config.names()
        return
    some = {
        repr((run.box or {}) | {"noise": 0}) + re.sub("sigma.*", "", repr(run.gradient)): run for run in experiment.runs
    }
    for settings in some.values():
        run = Run(replace(settings, **shrunk(settings)), 42, tmp_path, torch.device("cpu"))
        run.turn(1)
        record = run.record()
        assert run.done
        assert record["failed"] is None
        assert record["test_loss"] > 0
        assert (record["parameter_sign_accuracy"] is None) == (settings.gradient.method == "AD")


def test_the_paper_s_parameter_counts():
    counts = {}
    for name in ("calhouse_scaling", "cifar100"):
        experiment = config.load(config.PAPER / f"{name}.yaml")
        for settings in experiment.runs:
            if settings.gradient.method == "AD" and settings.box is not None:
                continue
            parts = build(settings, 42, torch.device("cpu"))
            trained = sum(p.numel() for part in parts[:2] for p in part.parameters())
            counts[name, settings.run] = trained, sum(p.numel() for p in parts.exact.parameters()) if parts.exact else 0
    assert counts["calhouse_scaling", "Fixed BOND"][0] == counts["calhouse_scaling", "No reservoir"][0] == 756_501
    assert counts["calhouse_scaling", "Rockmelon BOND"] == (616_601, 758_002)
    assert counts["cifar100", "Parallel BOND"] == (3_907_256, 110_500)
    assert counts["cifar100", "Rockmelon BOND"] == (3_785_756, 758_002)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("batch: 64", "bach: 64"), "nothing is called bach"),
        (("kind: fixed", "kind: fixt"), "kind must be one of fixed, parallel"),
        (("method: AD", "method: ADD"), "method must be one of AD, BOND"),
        (("hidden: 20", "hiden: 20"), "hiden"),
        (("loss: huber", "loss: hubris"), "loss of california_housing must be huber"),
        (("batch: 64", "batch: 0"), "batch must be a whole number, 1 or more"),
        (("batch: 64", "batch: true"), "batch must be a whole number"),
        (("batch: 64", "batch: 64\nbatch: 32"), "'batch' is there twice"),
        (("batch: 64", "batch: 64\nmeasure_every: 2.5"), "measure_every must be a whole number"),
        (("batch: 64", "batch: 64\noptimizer: {rate: -1e-3}"), "rate must be zero or a positive number"),
        (("batch: 64", 'batch: 64\noptimizer: {rate: "1e-3"}'), "rate must be zero or a positive number"),
        (("batch: 64", "batch: 64\noptimizer: adam"), "optimizer must have names and values"),
        (("batch: 64", "batch: 64\nschedule: {until: [50, 75], factors: [1, 0.1, 0.01]}"), "until must be parts"),
        (("batch: 64", "batch: 64\ngraph: 'no'"), "graph must be true or false"),
        (("batch: 64", "batch: 20_000"), "batch must be at most 16512, the rows there are"),
        (("box: {kind: fixed, d_in: 5, hidden: 20, d_out: 5}", "box: {}"), "without a box there is nothing for BOND"),
        (("batch: 64", "batch: 64\ntables: [{columns: [test_los], rows: []}]"), "columns must be out of"),
        (("batch: 64", "batch: 64\ntables: [{columns: [test_loss], rows: [{run: DA}]}]"), "no run is called so"),
        (("batch: 64", "batch: 64\nfigures: [{kind: curves, title: t, y: test_loss, rnus: [AD]}]"), "called rnus"),
        (("AD: {", "1: {"), "the name of a run must be text, got 1"),
        (("d_in: 5", "d_in: 6"), "read_in has 5 outputs, and the box 6 inputs"),
        (("sizes: [5, 20, 1]", "sizes: [5, 20, 2]"), "read_out has 2 outputs, and california_housing 1 to predict"),
        (("sizes: [5, 20, 1]", "sizes: [5, 20, 1], activation: gelu"), "activation must be one of relu, tanh"),
        (("seeds: [1, 2]", "seeds: [1, 1]"), "seeds must be a list of different"),
        (("data: california_housing", "data: calfornia"), "data must be one of"),
        (("AD: {", "AD: {box: {kind: none"), "small.yaml could not be read"),
        (("seeds: [1, 2]", "seeds: 1"), "seeds must be a list"),
        (("steps: 30", "steps: 0"), "steps must be a whole number"),
        (("d_out: 5}", "d_out: 5, bench: {noise: 1}}"), "a bench is for kind dots"),
    ],
)
def test_mistakes_are_named(change, says, small, tmp_path):
    small.write_text(SMALL.replace(*change))
    done = invoke("run", small, "--output", tmp_path / "out", "--device", "cpu")
    assert done.exit_code == 2
    assert says in " ".join(done.output.split())


def test_missing_pictures_are_asked_for(tmp_path):
    done = invoke("reproduce", "cifar100", "--data", tmp_path, "--output", tmp_path / "out", "--device", "cpu")
    assert done.exit_code == 2
    assert "cifar-100-binary.tar.gz" in done.output


def test_an_unknown_result_is_refused_with_those_there_are():
    done = invoke("reproduce", "calhous")
    assert done.exit_code == 2
    assert "calhouse_scaling" in done.output.replace("\n", "")


def test_the_list_names_all_with_their_cost():
    shown = CliRunner().invoke(main, ["reproduce", "--list"], env={"COLUMNS": "200"}).output
    assert all(name in shown for name in config.names())
    assert "743,040" in shown


def test_cost():
    experiment = config.load(config.PAPER / "calhouse.yaml")
    bond = experiment.only(["NFN BOND"])
    assert cost(bond) == (3 * 100 * 258, 3 * 100 * 258 * 64 * 11)
    assert cost(experiment.only(["NFN SPSA"])).evaluations == 3 * 100 * 258 * 64 * 3
    scaling = config.load(config.PAPER / "calhouse_scaling.yaml")
    parallel, rockmelon = (cost(scaling.only([f"{name} BOND"])) for name in ("Parallel", "Rockmelon"))
    assert (parallel.evaluations, rockmelon.evaluations) == tuple(3 * 80 * 516 * 32 * n for n in (11, 21))


def test_numbers_without_a_point_are_numbers(small):
    small.write_text(SMALL + "optimizer: {rate: 1e-4}\n")
    assert config.load(small).runs[0].optimizer.rate == 1e-4


def test_a_grid_of_anything_can_be_shown(small, tmp_path):
    small.write_text(
        SMALL.partition("runs:")[0].replace("epochs: 3", "epochs: 1")
        + """
grid:
  - name: "{noise}, {limit}"
    axes: {noise: [null, 0.1], limit: [.inf, 0.1]}
    run: {gradient: {noise: $noise, policy: {max_step: $limit}}}
"""
    )
    done = invoke("run", small, "--output", tmp_path / "out", "--seed", "1", "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert {run["at"]["noise"] for run in results(tmp_path / "out").values()} == {"None", 0.1}


def test_names_may_be_merged_but_not_come_twice(small):
    small.write_text(SMALL + "  both: {gradient: &g {<<: &b {n: 1}, n: 2}}\n  other: {gradient: {<<: *g, n: 3}}\n")
    assert [run.gradient.n for run in config.load(small).runs[2:]] == [2, 3]


def test_a_grid_is_all_combinations():
    sweep = config.load(config.PAPER / "fixed_perturbation_sweep_housing.yaml")
    by_name = {run.run: run for run in sweep.runs}
    assert len(by_name) == 16 * 6 + 6
    run = by_name["σ 0.001, noise 1e-05"]
    assert run.gradient.policy == {"kind": "gaussian", "sigma": 1e-3}
    assert (run.box["noise"], run.at) == (1e-5, {"noise": 1e-5, "sigma": 1e-3})
    assert by_name["BOND, noise 1e-05"].gradient.noise == 5e-6


def test_schedules_are_the_paper_s():
    housing = Schedule((0.5, 0.75), (1, 0.1, 0.01))
    assert [housing(e, 100) for e in (0, 49, 50, 75, 76, 99)] == [1, 1, 0.1, 0.1, 0.01, 0.01]
    pictures = Schedule((0.5, 0.65, 0.8, 0.9), (1, 0.5, 0.1, 0.05, 0.01))
    assert [pictures(e, 100) for e in (49, 50, 65, 66, 80, 81, 90, 91)] == [1, 0.5, 0.5, 0.1, 0.1, 0.05, 0.05, 0.01]


def test_the_file_in_the_documentation_runs(tmp_path):
    document = (Path(__file__).parents[2] / "docs" / "experiments.md").read_text()
    (tmp_path / "mine.yaml").write_text(document.partition("```yaml\n")[2].partition("```")[0])
    options = ("--output", tmp_path / "out", "--epochs", "1", "--steps", "5", "--seed", "1", "--device", "cpu")
    done = invoke("run", tmp_path / "mine.yaml", *options)
    assert done.exit_code == 0, done.output
    assert set(results(tmp_path / "out")) == {(name, 1) for name in ("exact", "quiet", "noisy", "measured")}
    assert "right signs" in done.output
    page = invoke("report", tmp_path, "--output", tmp_path / "page")
    assert page.exit_code == 0, page.output
    assert "Does noise matter?" in (tmp_path / "page" / "index.html").read_text()


def test_the_files_are_installed():
    """With the package, not only with a checkout."""
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    package = Path(config.__file__).parent.parent
    shipped = {
        path for pattern in project["tool"]["setuptools"]["package-data"]["bondgrad"] for path in package.glob(pattern)
    }
    others = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert others == shipped
