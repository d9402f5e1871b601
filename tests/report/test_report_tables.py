"""The tables of the report: what varies, differences by seed, times of another machine, and verdicts on the page."""

import re
from io import StringIO

import pytest
from rich.console import Console

from bondgrad.report import draw, label, read, report_command, tables
from bondgrad.report._compare import beside, compare, heading
from bondgrad.report._verdicts import VERDICTS
from tests.report.synthetic_results import calhouse, fashion, put, run, write
from tests.report.test_report import Page, page_of


def experiment_of(tmp_path, config, runs):
    put(tmp_path / "it", config, {"runs": runs})
    return read(tmp_path / "it")


def cell_of(experiment, name, column):
    row = next(row for row in experiment.tables[0].rows if row.run == name)
    return compare(experiment, row, column)


@pytest.mark.parametrize("metric", ["sign_accuracy", "parameter_sign_accuracy"])
def test_deviations_over_seeds_and_over_steps_are_told_apart(tmp_path, metric):
    config, _ = calhouse()
    deviation = {"sign_accuracy": "sign_deviation", "parameter_sign_accuracy": "parameter_sign_deviation"}[metric]
    config["tables"][0]["columns"] = [metric]
    config["tables"][0]["rows"] = [
        {"run": "NFN BOND", metric: {"mean": 76.13, "over_steps": 22.94}},
        {"run": "NFN BONDS", metric: [76.13, 22.94]},
        {"run": "NFN SPSA", metric: 50},
    ]
    runs = [run("NFN BOND", seed, **{metric: 0.7 + 0.01 * seed, deviation: 0.03 * seed}) for seed in (1, 2)]
    runs += [run("NFN BONDS", 1, **{metric: 0.6, deviation: 0.139}), run("NFN SPSA", 1, **{metric: 0.5})]
    made = experiment_of(tmp_path, config, runs)
    over_steps = cell_of(made, "NFN BOND", metric)
    assert over_steps.paper == "76.13 (steps ± 22.94)"
    assert over_steps.ours == "71.500 ± 0.707 (steps ± 4.5)"  # the root of the mean of 3² and 6²
    over_seeds = cell_of(made, "NFN BONDS", metric)
    assert over_seeds.paper == "76.13 ± 22.94"
    assert over_seeds.ours == "60.000 (steps ± 13.9)"
    assert cell_of(made, "NFN SPSA", metric).ours == "50.000"  # an old record: not known


def test_the_paper_may_have_both_deviations(tmp_path):
    config, found = calhouse()
    config["tables"][0]["rows"][1]["sign_accuracy"] = {"mean": 76.13, "over_seeds": 0.5, "over_steps": 22.9}
    made = experiment_of(tmp_path, config, found["runs"])
    assert cell_of(made, "NFN BOND", "sign_accuracy").paper == "76.13 ± 0.50 (steps ± 22.9)"
    config["tables"][0]["rows"][1]["sign_accuracy"] = {"mean": 76.13, "steps": 22.9}
    with pytest.raises(ValueError, match="nothing is called steps; there are mean, over_seeds, over_steps"):
        experiment_of(tmp_path, config, found["runs"])


def test_signs_at_the_parameters_have_a_curve(tmp_path):
    config, found = calhouse()
    config["figures"] = [{"kind": "curves", "title": "Signs", "y": "parameter_sign_accuracy", "runs": ["NFN BOND"]}]
    made = experiment_of(tmp_path, config, found["runs"])
    assert "Nothing to draw" in draw(made, tmp_path)[0].caption  # old records
    for each in found["runs"]:
        each["curve"]["parameter_sign_accuracy"] = [0.9] * 100
    made = experiment_of(tmp_path, config, found["runs"])
    (drawn,) = draw(made, tmp_path)
    assert drawn.caption.startswith("Right signs at the parameters by epoch")
    assert "right signs at the parameters, %" in drawn.svg


def paired(tmp_path, key, base, own):
    config, _ = fashion()
    config["tables"][0]["columns"] = ["paired_difference"]
    runs = [run("AD", seed, **{key: number}) for seed, number in base.items()]
    runs += [run("BOND", seed, **{key: number}) for seed, number in own.items()]
    return cell_of(experiment_of(tmp_path, config, runs), "BOND", "paired_difference").ours


def test_differences_are_from_the_same_seed(tmp_path):
    base, own = {1: 2.0, 2: 3.0, 3: 4.0, 4: 100.0}, {1: 1.9, 2: 2.9, 3: 4.1, 5: 0.0}
    assert paired(tmp_path, "test_loss", base, own) == "-0.033 (2 of 3 seeds better)"
    base, own = {1: 0.5, 2: 0.6}, {1: 0.51, 2: 0.63}
    assert paired(tmp_path, "accuracy", base, own) == "+2.00 (2 of 2 seeds better)"
    assert paired(tmp_path, "accuracy", {1: 0.5}, {1: 0.4}) == "-10.00 (0 of 1 seed better)"
    assert paired(tmp_path, "accuracy", {1: 0.5}, {2: 0.4}) == "-"


def test_what_failed_has_no_difference(tmp_path):
    config, _ = fashion()
    config["tables"][0]["columns"] = ["paired_difference"]
    runs = [run("AD", 1, accuracy=0.5), run("BOND", 1, accuracy=0.1, failed="the loss was nan", epochs_run=1)]
    assert cell_of(experiment_of(tmp_path, config, runs), "BOND", "paired_difference").ours == "failed"


def test_times_of_another_machine_say_so(tmp_path):
    config, found = fashion()
    page = page_of(tmp_path, config, found)
    assert "paper, on A10G" in page.words["it"]
    config["paper"].pop("gpu")
    assert "paper, on another GPU" in page_of(tmp_path, config, found).words["it"]
    config["paper"]["gpu"] = "H200"
    there = [each for each in found["runs"] if each["gpu"]]
    page = page_of(tmp_path, config, {**found, "runs": there})
    assert "paper, on" not in page.words["it"]


def test_headings_of_documents_and_terminals(tmp_path):
    config, found = fashion()
    made = experiment_of(tmp_path, config, found["runs"])
    (table,) = made.tables
    assert heading(made, table, "loop_ratio") == "loop time / baseline [the paper's: on A10G]"
    assert heading(made, table, "accuracy") == "accuracy, %"
    assert beside(made, table.rows[1], "loop_ratio") == "1.50 [1.31]"
    said = StringIO()
    Console(file=said, width=300).print(*tables(made))
    assert "loop time / baseline [the paper's: on A10G]" in said.getvalue()


def test_the_page_begins_with_verdicts(tmp_path):
    write(tmp_path / "results")
    report_command(tmp_path / "results", tmp_path / "page", Console(quiet=True))
    text = (tmp_path / "page" / "index.html").read_text()
    page = Page(text)
    first, second, third = [table for where, table in page.tables if where == "summary"]
    assert (len(first), first[0]) == (1 + 16, ["Result", "Verdict", "What came out"])
    assert len(second) >= 1 + 7
    assert third[0][0] == "Experiment"
    assert {row[1] for row in [*first[1:], *second[1:]]} <= set(VERDICTS)
    assert page.rows("summary", "Table cifar100")[0] == "not run"
    assert page.rows("summary", "BONDS against SPSA")[0] == "shortened"
    assert "bondgrad reproduce cifar100" in page.rows("summary", "Table cifar100")[1]
    assert "`" not in page.words["summary"]
    assert re.search(r'<span class="pill none">not run</span>', text)


def test_a_page_of_one_experiment_has_only_its_verdicts(tmp_path):
    config, found = calhouse()
    put(tmp_path / "calhouse", config, found)
    report_command(tmp_path / "calhouse", tmp_path / "page", Console(quiet=True))
    page = Page((tmp_path / "page" / "index.html").read_text())
    (first, *_) = [table for where, table in page.tables if where == "summary"]
    names = [row[0].replace("_ ", "_") for row in first[1:]]
    assert [name.split(" ")[:2] for name in names] == [["Table", "calhouse"], ["Figure", "calhouse_loss"]]


def test_gains_are_over_a_baseline_that_trained_as_long(tmp_path):
    config, found = fashion()
    made = experiment_of(tmp_path, config, found["runs"])
    assert cell_of(made, "BOND", "gain").ours != "-"
    bond = next(result for result in found["runs"] if result["run"] == "BOND")
    bond["epochs"] = bond["epochs_run"] = 100
    longer = experiment_of(tmp_path, config, found["runs"])
    assert cell_of(longer, "BOND", "gain").ours == "-"
    assert "8 of 100 epochs in 2 of 3 runs" in label(longer).words
