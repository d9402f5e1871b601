"""Verdicts: computed from claims, and never better than the results."""

from pathlib import Path

import pytest
import yaml

from bondgrad.experiments.config import PAPER, load
from bondgrad.report import paper_results, read, verdicts
from bondgrad.report._claims import FAILS, HOLDS, OPEN
from bondgrad.report._quantities import expression, filled, measured, quantity
from bondgrad.report._verdicts import VERDICTS, refuse_unknown_runs
from tests.report.synthetic_results import calhouse, device, put, run, steps

RESULTS = Path(__file__).parents[2] / "results"
TABLES = ("calhouse", "fmnist_cifar10", "bondvsadam_sign", "cifar100", "bound_testing", "forwardvscentral")
FIGURES = ("calhouse_loss", "calhouse_scaling", "cifar100", "fixed_perturbation_sweep", "stacked", "four_plots")
FIGURES += ("decaying_perturbation_magnitudes", "bondsVSspsa", "cifar10_qr", "qr_sweep")

TRUE = {"says": "BOND learns.", "value": "NFN BOND|test_loss", "below": "NFN SPSA|test_loss"}
FALSE = {"says": "SPSA learns.", "value": "NFN SPSA|test_loss", "below": "NFN BOND|test_loss"}


def experiments_of(tmp_path, **folders):
    for name, (config, found) in folders.items():
        put(tmp_path / name, config, found)
    return {name: read(tmp_path / name) for name in folders}


def verdict_on(experiments, *claims, **entry):
    entry = {"label": "Table it", "about": "it", "experiment": "calhouse", "claims": list(claims), **entry}
    (found,) = verdicts(paper_results(yaml.safe_dump({"results": [entry]})).results, experiments)
    return found


@pytest.fixture
def made(tmp_path):
    return experiments_of(tmp_path, calhouse=calhouse())


def test_all_claims_hold_with_the_full_protocol(made):
    verdict = verdict_on(made, TRUE, found=["BOND has {NFN BOND|sign_accuracy} %."])
    assert (verdict.kind, verdict.sentence, verdict.checked) == (
        "reproduced",
        "BOND has 99.995 %.",
        "1 of 1 claims hold",
    )


@pytest.mark.parametrize(
    ("claim", "holds"),
    [
        ({"value": "NFN BOND|sign_accuracy", "paper": 99.95, "tolerance": 0.05}, True),
        ({"value": "NFN BOND|sign_accuracy", "paper": 99.95, "tolerance": 0.04}, False),
        ({"value": "NFN SPSA|sign_accuracy", "paper": 60, "tolerance": 5}, False),
        ({"value": "NFN BOND|test_loss", "below": "NFN BONDS|test_loss"}, True),
        ({"value": "NFN BOND|test_loss", "below": "NFN BONDS|test_loss", "by": 0.3}, True),
        ({"value": "NFN BOND|test_loss", "below": "NFN BONDS|test_loss", "by": 0.5}, False),
        ({"value": "NFN BOND|test_loss", "above": "NFN BONDS|test_loss"}, False),
        ({"value": "NFN BOND|test_loss", "below": "NFN BOND|test_loss"}, False),
        ({"value": "NFN BOND|test_loss / NFN AD|test_loss", "range": [0.99, 1.01]}, True),
        ({"value": "NFN BONDS|test_loss / NFN AD|test_loss", "range": [0.97, 1.03]}, False),
        ({"value": "NFN BONDS|test_loss - NFN AD|test_loss", "range": [0.3, None]}, True),
        ({"value": "NFN BONDS|test_loss - NFN AD|test_loss", "range": [None, 0.3]}, False),
    ],
)
def test_kinds_of_claims(made, claim, holds):
    verdict = verdict_on(made, TRUE, {"says": "It is so.", **claim})
    assert verdict.findings[1].state == (HOLDS if holds else FAILS)
    assert verdict.kind == ("reproduced" if holds else "not reproduced")


def test_a_false_claim_is_never_outvoted(made):
    """Not by other claims, a reading, a substitute, or an explanation."""
    true = [{**TRUE, "reading": "as we read it"}] * 9
    because = "SPSA ends at {NFN SPSA|test_loss}."
    spare = {"experiment": "calhouse", "instead": "This instead.", "claims": [TRUE]}
    verdict = verdict_on(made, *true, {**FALSE, "because": because}, substitute=spare, instead="With another box.")
    assert verdict.kind == "not reproduced"
    assert verdict.sentence == "With another box. SPSA ends at 5.000."
    assert "SPSA learns. This was not found (5.000 against 3.020" in verdict_on(made, FALSE).sentence


def test_a_reading_is_named(made):
    verdict = verdict_on(made, TRUE, {**TRUE, "reading": "signs at the parameters"})
    assert verdict.kind == "reproduced under a named reading"
    assert "signs at the parameters" in verdict.sentence


def test_what_was_not_run_is_not_reproduced(made):
    verdict = verdict_on(made, TRUE, experiment="elsewhere")
    assert (verdict.kind, verdict.checked) == ("not run", "1 claim, open")
    assert "`bondgrad reproduce elsewhere`" in verdict.sentence


def test_a_shortened_protocol_is_not_reproduced(tmp_path):
    config, found = calhouse()
    signs = {"says": "Signs are right.", "value": "NFN BOND|sign_accuracy", "range": [99, None]}
    others = [each for each in found["runs"] if each["run"] != "NFN BOND" or each["seed"] == 1]
    made = experiments_of(tmp_path, calhouse=(config, {**found, "runs": others}))
    verdict = verdict_on(made, signs)
    assert verdict.kind == "shortened"
    assert "1 of 3 seeds" in verdict.sentence
    # Runs that no claim names do not matter.
    assert verdict_on(made, {**signs, "value": "NFN SPSA|sign_accuracy", "range": [49, 51]}).kind == "reproduced"


@pytest.mark.parametrize("claim", [TRUE, FALSE])
@pytest.mark.parametrize("change", [{"epochs": 8, "epochs_run": 8}, {"epochs_run": 40}, {"steps_of_epoch": 200}])
def test_the_end_of_training_is_not_known_before_it(tmp_path, claim, change):
    config, found = calhouse()
    for each in found["runs"]:
        each.update(change)
    made = experiments_of(tmp_path, calhouse=(config, found))
    signs = {"says": "Signs are right.", "value": "NFN BOND|sign_accuracy", "range": [99, None]}
    verdict = verdict_on(made, claim, signs)
    assert [finding.state for finding in verdict.findings] == [OPEN, HOLDS]
    assert verdict.kind == "shortened"


@pytest.mark.parametrize(
    ("claim", "says"),
    [
        (
            {"value": "NEN BOND, column-wise|test_loss", "above": "NFN AD|test_loss"},
            "NEN BOND, column-wise was not run",
        ),
        (
            {"value": "NFN BOND|parameter_sign_accuracy", "range": [0, 100]},
            "parameter_sign_accuracy of NFN BOND was not",
        ),
        ({"value": "AD|loop_ms|ablations", "range": [0, 100]}, "ablations was not run"),
        ({"value": "NFN BOND|loop_ms / AD|loop_ms|ablations", "range": [0, 100]}, "ablations was not run"),
    ],
)
def test_what_is_not_known_is_open(made, claim, says):
    verdict = verdict_on(made, TRUE, {"says": "It is so.", **claim})
    assert (verdict.findings[1].state, verdict.kind) == (OPEN, "shortened")
    assert f"1 of 2 claims are open: {says}" in verdict.sentence


@pytest.mark.parametrize("claim", [{"above": "NFN AD|loop_ms"}, {"range": [1, None]}])
@pytest.mark.parametrize("change", [{"gpu": "another"}, {"graph": True}, {"compiled": True}, {"precision": "bfloat16"}])
def test_times_are_compared_only_if_taken_alike(tmp_path, claim, change):
    value = "NFN BOND|loop_ms" if "above" in claim else "NFN BOND|loop_ms / NFN AD|loop_ms"
    config, found = calhouse()
    slower = {"says": "It takes longer.", "value": value, **claim}
    alike = experiments_of(tmp_path / "alike", calhouse=(config, found))
    assert verdict_on(alike, slower).findings[0].state == HOLDS
    for each in found["runs"]:
        each.update(change if each["run"] == "NFN BOND" else {})
    unlike = experiments_of(tmp_path / "unlike", calhouse=(config, found))
    finding = verdict_on(unlike, slower).findings[0]
    assert (finding.state, "not timed under the same conditions" in finding.words) == (OPEN, True)


def test_what_does_not_hold_of_a_shortened_run_says_that_it_was_shortened(tmp_path):
    config, found = calhouse()
    for each in found["runs"]:
        each.update({"epochs": 8, "epochs_run": 8})
    made = experiments_of(tmp_path, calhouse=(config, found))
    wrong = {
        "says": "Signs are wrong.",
        "value": "NFN BOND|sign_accuracy",
        "range": [None, 50],
        "because": "They are right.",
    }
    verdict = verdict_on(made, wrong)
    assert verdict.kind == "not reproduced"
    assert verdict.sentence.startswith("They are right. Short of the paper's protocol: 8 of 100 epochs")


def test_a_failed_run_says_nothing(tmp_path):
    config, found = calhouse()
    for each in found["runs"]:
        each["failed"] = "the loss was nan"
    made = experiments_of(tmp_path, calhouse=(config, found))
    assert verdict_on(made, TRUE).findings[0].words == "NFN BOND failed"


def test_a_substitute_says_so_and_gives_way(made, tmp_path):
    instead = "California Housing stands in."
    spare = {"experiment": "calhouse", "instead": instead, "claims": [TRUE]}
    of_images = {"value": "A|accuracy", "range": [0, 100], "says": "It learns."}
    verdict = verdict_on(made, of_images, experiment="images", substitute=spare)
    assert (verdict.kind, verdict.sentence) == ("shortened", instead)
    assert (
        verdict_on(made, of_images, experiment="images", substitute={**spare, "claims": [FALSE]}).kind
        == "not reproduced"
    )
    config = {"name": "images", "planned": {"seeds": [1], "epochs": {"A": 100}}}
    made |= experiments_of(tmp_path, images=(config, {"runs": [run("A", 1, accuracy=0.5)]}))
    verdict = verdict_on(made, of_images, experiment="images", substitute=spare)
    assert (verdict.kind, verdict.sentence) == ("reproduced", "")


def seeds_of(name, losses):
    return [run(name, seed, test_loss=loss) for seed, loss in enumerate(losses)]


def test_comparisons_are_paired_by_seed(tmp_path):
    """One seed that is far off makes a mean, but no claim."""
    config = {"name": "it", "planned": {"seeds": [0, 1, 2], "epochs": {"A": 100, "B": 100, "C": 100}}}
    runs = seeds_of("A", [1, 2, 3]) + seeds_of("B", [1.1, 2.1, 2.9]) + seeds_of("C", [0.9, 1.9, 9])
    made = experiments_of(tmp_path, it=(config, {"runs": runs}))
    below = verdict_on(made, {"says": "", "value": "A|test_loss", "below": "B|test_loss"}, experiment="it").findings[0]
    assert (below.state, below.words) == (HOLDS, "2.000 against 2.033, 2 of 3 seeds agree")
    below = verdict_on(made, {"says": "", "value": "A|test_loss", "below": "C|test_loss"}, experiment="it").findings[0]
    assert (below.state, below.words) == (FAILS, "2.000 against 3.933, 1 of 3 seeds agree")


@pytest.mark.parametrize(
    ("sentence", "says"),
    [
        ("{NFN BOND|test_loss} of {NFN BOND|sign_accuracy} %", "3.020 of 99.995 %"),
        ("{NFN BOND|test_loss - NFN AD|test_loss}", "+0.020"),
        ("{NFN AD|test_loss - NFN AD|test_loss}", "+0.000"),
        ("{NFN BOND|loop_ms / NFN AD|loop_ms|calhouse}", "1.50"),
        (
            "{NFN BOND|test_loss > NFN AD|test_loss}, {NFN BOND|test_loss < NFN AD|test_loss}",
            "3 of 3 seeds, 0 of 3 seeds",
        ),
        ("{best of NFN BOND*|test_loss}, {best of NFN B*|sign_accuracy}", "3.020, 99.995"),
    ],
)
def test_placeholders(made, sentence, says):
    assert filled(sentence, "calhouse", made) == says


def test_a_sentence_without_its_numbers_is_left_out(made):
    found = ["Known: {NFN AD|test_loss}.", "Unknown: {NEN BOND, column-wise|test_loss}."]
    assert verdict_on(made, TRUE, found=found).sentence == "Known: 3.000."


def test_traces_and_lines(tmp_path):
    made = experiments_of(tmp_path, steps=steps(), device=device())

    def value(text):
        (number,) = measured(quantity(text, "steps"), made).values()
        return number

    assert value("with root 6|step_change") < 0.3  # falls by e^-2
    assert value("with root 6|upper_bound") == pytest.approx(100 * value("with root 6|step_size"))
    assert value("with root 6|lower_bound") == pytest.approx(value("with root 6|step_size") / 1000)
    assert value("with root 6|generalization_gap") > 0
    assert value("gate 3, phase|roughness|device") > 3 * value("gate 1, phase|roughness|device")
    two = expression("a, phase / rad|roughness / b|roughness|it", "device")
    assert [q.run for q in two.quantities] == ["a, phase / rad", "b"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"value": "NFN BONDD|test_loss"}, "Table it: calhouse has no run called 'NFN BONDD'; it has NFN AD, NFN BOND"),
        ({"below": "NFM AD|test_loss"}, "has no run called 'NFM AD'"),
        ({"because": "It ends at {nobody|test_loss}."}, "has no run called 'nobody'"),
        ({"value": "NFN BOND|speed"}, "no metric is called 'speed'; there are test_loss"),
        ({"value": "NFN BOND"}, "RUN|metric|folder, got 'NFN BOND'"),
        (
            {"above": "NFN AD|test_loss"},
            "Table it, claims[0] must have one of tolerance (with paper), range",
        ),
        ({"value": "NFN BOND|test_loss / NFN AD|test_loss"}, "value must be a quantity, or with a range"),
        ({"verdict": "reproduced"}, "nothing is called verdict"),
    ],
)
def test_messages(made, change, says):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        verdict_on(made, TRUE | change)
    assert says in str(error.value)


def test_a_result_without_claims_is_refused(made):
    with pytest.raises(ValueError, match="Table it: there must be at least one claim"):
        verdict_on(made)


def test_every_result_of_the_paper_has_an_entry():
    paper = paper_results()
    labels = [f"Table {name}" for name in TABLES] + [f"Figure {name}" for name in FIGURES]
    assert sorted(result.label for result in paper.results) == sorted(labels)
    assert len(paper.text) >= 7


def test_every_run_that_is_named_is_in_the_experiments_file():
    paper = paper_results()
    every = [*paper.results, *paper.text]
    folders = {q.folder for result in every for q in result.quantities}
    folders |= {result.substitute.experiment for result in every if result.substitute}
    experiments = {folder: load(PAPER / f"{folder}.yaml") for folder in folders}
    runs = {folder: [each.run for each in of.runs] for folder, of in experiments.items() if not of.sweep}
    assert len(runs) > 8
    for result in every:
        refuse_unknown_runs(result, runs)


def test_what_is_false_of_the_committed_results_is_explained():
    experiments = {path.parent.name: read(path.parent) for path in RESULTS.glob("*/config.yaml")}
    paper = paper_results()
    found = verdicts([*paper.results, *paper.text], experiments)
    assert {verdict.kind for verdict in found} <= set(VERDICTS)
    assert all(verdict.sentence for verdict in found)
    false = [finding.claim for verdict in found for finding in verdict.findings if finding.state == FAILS]
    assert [claim.says for claim in false if not claim.because] == []
    for verdict in found:
        if verdict.kind.startswith("reproduced"):
            assert {finding.state for finding in verdict.findings} == {HOLDS}
