"""What the documents say is true: their code runs, their figures are those in results/."""

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from bondgrad.experiments import config

ROOT = Path(__file__).parents[2]
NAMES = (
    *("pytorch", "structure", "probe", "steps", "reservoirs", "evaluators", "journal"),
    *("settings", "training", "functions", "devices"),
)
DOCUMENTS = [
    re.findall(r"```python\n(.*?)```", (ROOT / path).read_text(), re.DOTALL)
    for path in ("README.md", *(f"docs/{name}.md" for name in NAMES))
]


def test_the_code_in_the_documents_runs():
    assert [len(blocks) for blocks in DOCUMENTS] == [2, 2, 4, 1, 3, 3, 3, 3, 4, 2, 3, 1]
    names = {}
    for blocks in DOCUMENTS:
        for block in blocks:  # one after the other, as a reader would
            exec(block, names)  # noqa: S102
    assert names["read_in"].weight.grad.abs().max() > 0
    assert names["box"].policy is not None
    assert names["check"].right
    assert names["report"].verdict.startswith("deterministic, smooth, float32")


def test_the_figures_are_those_of_the_results():
    subprocess.run([sys.executable, "docs/generate/tables.py", "--check"], cwd=ROOT, check=True)


def test_what_is_said_of_evaluators_is_in_the_results():
    for kind in ("processes", "ray"):
        numbers = json.loads((ROOT / f"results/evaluator_faults_{kind}.json").read_text())["numbers"]
        faulty = numbers["faulty"]
        assert numbers["steps"] == 500
        assert faulty["signs, %"] > numbers["without faults"]["signs, %"] - 0.1
        assert faulty["evaluations"] == faulty["in the journal"]
    speed = json.loads((ROOT / "results/evaluator_speed.json").read_text())["numbers"]
    assert all(3.6 <= row["speed-up"] < 4.1 for row in speed["workers"].values())
    assert speed["eager"]["20 ms a call, Local"]["ratio"] < 0.55


def test_no_script_has_the_name_of_a_package():
    """A script's folder comes first on Python's path: what torch or tensorboard imports would be found there."""
    scripts = [
        path.stem for folder in ("benchmarks", "docs/generate", "examples") for path in ROOT.glob(f"{folder}/*.py")
    ]
    assert len(scripts) == len(set(scripts)) > 30
    pinned = {re.split("[=; ]", line)[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    packages = {
        package
        for package, owners in importlib.metadata.packages_distributions().items()
        if pinned & {owner.lower() for owner in owners}
    }
    assert "torch" in packages
    assert not {*scripts} & (packages | sys.stdlib_module_names)


@pytest.mark.parametrize("name", sorted(path.parent.name for path in ROOT.glob("results/*/config.yaml")))
def test_results_show_what_the_experiment_s_file_says(name):
    """If not: python docs/generate/refresh_results.py."""
    saved = yaml.safe_load((ROOT / "results" / name / "config.yaml").read_text())
    file = config.load(config.PAPER / f"{name}.yaml").as_dict()
    assert {key: saved.get(key) for key in (*config.SHOWN, "planned")} == {
        key: file.get(key) for key in (*config.SHOWN, "planned")
    }
    assert set(saved["runs"]) == set(file["runs"])


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.py")), ids=lambda path: path.stem)
def test_examples(path):
    done = subprocess.run([sys.executable, "-W", "error", path], check=True, capture_output=True, text=True)
    first, *_, last = (float(n) for n in re.findall(r"(?:loss|error|misses by) ([\d.]+)", done.stdout))
    assert last < first / 3  # each of them learns


def headings(document):
    """As links name them."""
    titles = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere():
    for document in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")):
        for target in re.findall(r"\]\(([^)]+)\)", document.read_text()):
            path, _, heading = target.partition("#")
            there = document.parent / path if path else document
            assert target.startswith("https://") or there.exists(), f"{document.name}: {target}"
            assert not heading or heading in headings(there), f"{document.name}: {target}"
