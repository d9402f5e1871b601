"""The report: numbers, words and files of a page made of synthetic results."""

import json
import re
from html.parser import HTMLParser
from io import StringIO

import pytest
from rich.console import Console

from bondgrad.report import draw, read, report_command
from tests.report.synthetic_results import (
    EXPERIMENTS,
    HOSTILE,
    calhouse,
    device,
    fashion,
    put,
    run,
    steps,
    sweep,
    write,
)


class Page(HTMLParser):
    """Sections by id, tables as rows of words, and what the whole is made of."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.words, self.tags, self.ids, self.links = [], {}, set(), [], []
        self.section, self.cell = "", None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.tags.add(tag)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found["href"]] if tag == "a" else []
        if tag in ("header", "section"):
            self.section = found["id"]
            self.words[self.section] = ""
        elif tag == "table":
            self.tables.append((self.section, []))
        elif tag == "tr":
            self.tables[-1][1].append([])
        elif tag in ("td", "th"):
            self.cell = []

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.tables[-1][1][-1].append(" ".join(self.cell))
            self.cell = None

    def handle_data(self, data):
        if self.section:
            self.words[self.section] += data
        if self.cell is not None:
            self.cell.append(data)

    def rows(self, section, name):
        """The cells of the row that begins like this, behind its heading."""
        rows = [
            row[1:]
            for where, table in self.tables
            if where == section
            for row in table
            if f"{row[0]} ".startswith(f"{name} ")
        ]
        assert len(rows) == 1, rows
        return rows[0]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    write(folder / "results")
    said = StringIO()
    report_command(folder / "results", folder / "page", Console(file=said, width=200))
    return folder / "page", Page((folder / "page" / "index.html").read_text()), said.getvalue()


def page_of(tmp_path, config, found):
    put(tmp_path / "results" / "it", config, found)
    report_command(tmp_path / "results", tmp_path / "page", Console(quiet=True))
    return Page((tmp_path / "page" / "index.html").read_text())


def test_numbers_beside_the_papers(made):
    _, page, _ = made
    # Test loss (the paper has none), right signs, loop time and that over AD's without a difference.
    assert page.rows("calhouse", "NFN BOND") == [
        *["3.020 ± 0.010"],
        *["99.95 ± 0.02", "99.995 ± 0.000", "+0.045"],
        *["3.92 ± 0.01", "3.00 ± 0.00"],
        *["1.65", "1.50 ± 0.00"],
    ]
    assert page.rows("calhouse", "NFN AD")[1:] == ["-", "-", "-", "2.37 ± 0.04", "2.00 ± 0.00", "-", "-"]


def test_gains_ratios_and_what_was_not_run(made):
    _, page, _ = made
    # Accuracy, gain (the paper's follows from its accuracies), loop time over AD's, evaluations (only ours).
    assert page.rows("fashion", "BOND") == [
        *["93.42 ± 0.10", "90.51", "-2.91"],
        *["0.07", "0.51", "+0.44"],
        *["1.31", "1.50"],
        "1001",
    ]
    other_machine = page.rows("fashion", "BONDS")
    assert other_machine[3:6] == ["-10.10", "-9.00", "+1.10"]
    assert other_machine[6:8] == ["1.31", "-"]
    assert "With ResNet before the box; against AD" in page.words["fashion"]
    assert page.rows("fashion", "SPSA")[:6] == ["26.82", "not run", "-", "-66.53", "not run", "-"]


def test_a_ratio_is_of_the_same_seed_and_machine_and_kind_of_steps(tmp_path):
    config, _ = fashion()
    runs = [
        run("AD", 1, loop_ms=1.0),
        run("AD", 1, loop_ms=0.1, graph=not run("AD", 1)["graph"]),
        run("AD", 1, loop_ms=0.2, precision="bfloat16"),
        run("AD", 2, loop_ms=4.0),
        run("AD", 3, loop_ms=1.0, machine="another"),
        run("BOND", 1, loop_ms=2.0),
        run("BOND", 2, loop_ms=12.0),
        run("BOND", 3, loop_ms=5.0),  # its seed ran elsewhere: against the mean of those that ran here
    ]
    page = page_of(tmp_path, config, {"runs": runs})
    assert page.rows("it", "BOND")[7] == "2.33 ± 0.58"


def test_what_failed_is_no_result(tmp_path):
    config, _ = fashion()
    config["tables"][0]["columns"] = ["accuracy", "gain", "loop_ms"]
    failed = {"failed": "the loss was nan", "epochs_run": 3}
    runs = [run("AD", 1, accuracy=0.9), run("AD", 2, accuracy=0.5, loop_ms=1.0, **failed)]
    runs += [run("BOND", 1, accuracy=0.3, loop_ms=1.0, **failed)]
    page = page_of(tmp_path, config, {"runs": runs})
    assert page.rows("it", "AD")[1] == "90.00, 1 failed"
    assert page.rows("it", "BOND") == ["93.42 ± 0.10", "failed", "-", "0.07", "failed", "-", "73.57", "1.00"]
    assert "2 runs failed" in page.rows("summary", "fashion")[1]


def test_a_page_of_one_experiment(tmp_path):
    config, found = fashion()
    put(tmp_path / "it", config, found)
    report_command(tmp_path / "it", tmp_path / "page", Console(quiet=True))
    assert (tmp_path / "page" / "index.html").exists()


def test_the_time_of_a_single_run_has_its_quartiles(tmp_path):
    config, _ = fashion()
    config["tables"][0]["columns"] = ["loop_ms"]
    found = {"runs": [run("AD", 1, loop_ms=2.0, loop_quartiles=[1.5, 2.75]), run("BOND", 1, loop_ms=3.0)]}
    page = page_of(tmp_path, config, found)
    assert page.rows("it", "AD") == ["56.18", "2.00 1.50 to 2.75"]
    assert page.rows("it", "BOND") == ["73.57", "3.00"]


def test_protocols_are_labelled(made):
    _, page, _ = made
    assert page.rows("summary", "calhouse") == ["Table calhouse", "full protocol", "x86_64, 2 cores, 1 thread"]
    shortened = "shortened: 8 of 100 epochs, 1 of 3 seeds, epochs cut to 200 steps, 1 run not made"
    assert page.rows("summary", "fashion")[1] == shortened
    assert page.rows("summary", "steps")[1] == "shortened: 1 run unfinished"
    assert page.rows("summary", "device")[1] == "no training"
    assert "7 experiments, 2 with the full protocol" in page.words["summary"]
    words = page.words["calhouse"]
    for said in ("100 epochs, as in the paper", "3 seeds (1, 2, 3)", "(the paper: A10G)", "eager"):
        assert said in words
    for said in ("bondgrad 0.1.0, torch 2.13.0+cpu", "bondgrad reproduce it", "float32", "Seeds are ours"):
        assert said in words
    words = page.words["fashion"]
    for said in ("8 epochs; in the paper 100", "1 of 3 seeds (42)", "cut to 200 steps", "captured as a CUDA graph"):
        assert said in words
    assert "NVIDIA H200, x86_64, 16 cores (AD, BOND); x86_64, 16 cores (BONDS)" in words
    assert "as published, seed 42: 40 of 100 epochs" in page.words["steps"]


def test_what_is_broken_is_named_and_the_rest_is_there(made):
    _, page, said = made
    assert "broken: results.json: Expecting property name" in page.words["broken"]
    assert "lacking: results.json: runs[0].method is missing" in page.words["lacking"]
    assert "Cannot be read: lacking" in said
    assert page.rows("summary", "lacking")[1] == "cannot be read"
    assert {make.__name__ for make in EXPERIMENTS} < set(page.words)
    assert "demo" not in page.words  # not an experiment of the paper


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda config, found: config.pop("name"), "config.yaml: name is missing"),
        (lambda config, found: config.update(paper=3), "config.yaml: paper must have keys and values, got 3"),
        (lambda config, found: config["tables"][0].update(columns=["speed"]), "tables[0]: columns must be out of"),
        (lambda config, found: config["figures"][0].update(kind="pie"), "figures[0]: kind must be one of"),
        (lambda config, found: config["figures"][0].update(y="speed"), "figures[0]: y must be one of"),
        (lambda config, found: config["tables"][0]["rows"][0].update(loop_ms=[1, 2, 3]), "[mean, deviation]"),
        (lambda config, found: config["tables"][0]["rows"][0].update(loop_ms="fast"), "must be a number, got 'fast'"),
        (lambda config, found: found["runs"][1].update(epochs="8"), "runs[1].epochs must be a whole number"),
        (lambda config, found: found["runs"][1].update(test_loss=float("nan")), "NaN is not JSON"),
        (lambda config, found: found["runs"][1]["curve"]["epoch"].pop(), "must have one length"),
        (lambda config, found: found["runs"][1].update(at={"sigma": []}), "runs[1].at.sigma must be a number or text"),
        (lambda config, found: found.update(runs={}), "results.json: runs must be a list"),
    ],
)
def test_messages(change, says, tmp_path):
    config, found = calhouse()
    change(config, found)
    put(tmp_path / "it", config, found)
    with pytest.raises(ValueError, match=re.escape(says)):
        read(tmp_path / "it")


def test_a_sweep_over_words_is_refused(tmp_path):
    config, found = sweep()
    found["runs"][0]["at"]["sigma"] = "wide"
    page = page_of(tmp_path, config, found)
    assert "it: sigma must be a number, got 'wide'" in page.words["it"]


def test_nothing_to_report(tmp_path):
    for results in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match="run `bondgrad reproduce NAME` first"):
            report_command(results, tmp_path / "page", Console(quiet=True))
    assert not (tmp_path / "page").exists()


def test_names_are_not_markup(made):
    folder, page, _ = made
    assert "script" not in page.tags
    assert page.words["steps"].count(HOSTILE) >= 6  # title, what the paper says, caption, row, figures
    for path in folder.iterdir():
        if path.suffix != ".png":
            assert b"<script" not in path.read_bytes()


def test_links_and_ids(made):
    folder, page, _ = made
    assert len(page.ids) == len(set(page.ids))
    for link in page.links:
        assert link[1:] in page.ids if link.startswith("#") else (folder / link).is_file()


def test_a_hostile_folder(tmp_path):
    put(tmp_path / "results" / '<b id="x">', *device())
    put(tmp_path / "results" / "-b id--x--", *device())
    report_command(tmp_path / "results", tmp_path / "page", Console(quiet=True))
    page = Page((tmp_path / "page" / "index.html").read_text())
    assert "x" not in page.ids
    assert len(list((tmp_path / "page").glob("*.png"))) == 2
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)


def test_every_figure_has_its_files(made):
    folder, _, _ = made
    stems = {path.stem for path in folder.glob("*.svg")}
    assert {stem.split("-")[-1] for stem in stems} == {"curves", "sweep", "bounds", "magnitudes", "lines"}
    assert stems == {path.stem for path in folder.glob("*.png")}
    for stem in stems:
        svg = (folder / f"{stem}.svg").read_text()
        assert svg.count("<path") > 10
        assert (folder / f"{stem}.png").read_bytes().startswith(b"\x89PNG")


def test_figures_beside_results(made, tmp_path):
    put(tmp_path / "steps", *steps())
    drawn = draw(read(tmp_path / "steps"), tmp_path / "steps")
    assert [figure.title for figure in drawn] == ["Bounds of steps", "Steps by time", HOSTILE]
    for figure in drawn:
        name = f"{figure.stem}.png"
        assert (tmp_path / "steps" / name).read_bytes() == (made[0] / name).read_bytes()


def test_a_figure_without_numbers_says_so(made):
    folder, page, _ = made
    assert "Nothing to draw" in page.words["fashion"]
    assert not list(folder.glob("fashion-*"))


def test_the_same_results_make_the_same_bytes(made, tmp_path):
    write(tmp_path / "results")
    report_command(tmp_path / "results", tmp_path / "page", Console(quiet=True))
    first, second = ({path.name: path.read_bytes() for path in of.iterdir()} for of in (made[0], tmp_path / "page"))
    assert first == second


def test_runs_keep_their_colours(tmp_path):
    """Of the method where a figure has one run of it, and otherwise one that no other run has."""
    from bondgrad.report._colours import METHODS, looks

    config, found = calhouse()
    put(tmp_path / "it", config, found)
    separate = looks(read(tmp_path / "it"))
    assert [separate[f"NEN {method}"].colour for method in METHODS] == list(METHODS.values())
    config["figures"].append({"kind": "curves", "title": "both", "y": "test_loss", "runs": ["NEN AD", "NFN AD"]})
    put(tmp_path / "it", config, found)
    together = looks(read(tmp_path / "it"))
    assert together["NEN BOND"] == separate["NEN BOND"]
    assert len({together[name].colour for name in ("NEN AD", "NFN AD", "NEN BOND", "NEN BONDS", "NEN SPSA")}) == 5


def test_long_traces_make_a_small_page(tmp_path):
    config, found = steps()
    for each in found["runs"]:
        each["trace"] = {key: parts and parts * 5 for key, parts in each["trace"].items()}
        each["trace"]["step"] = list(range(len(each["trace"]["step_mean"])))
    assert len(json.dumps(found)) > 5e6
    page_of(tmp_path, config, found)
    assert (tmp_path / "page" / "index.html").stat().st_size < 0.15e6
