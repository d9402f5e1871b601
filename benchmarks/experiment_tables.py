"""The paper's experiments, as far as they were run: a document of what is in results/NAME/."""

from markdown import ROOT, table

from bondgrad.report import Experiment, label, read
from bondgrad.report._compare import NOTHING, beside
from bondgrad.report._figures import slug
from bondgrad.report._metrics import METRICS
from bondgrad.report._protocol import commands, protocol

FIRST = ("calhouse", "calhouse_scaling", "cifar100", "cifar100_loop", "fmnist_cifar10", "fmnist_loop")

HEAD = """# What came out

Every result of the paper that was run here: ours, and in square brackets the paper's, with the protocol that was really
run. Shortened runs are marked as such. The loop time of a single run is a median, with its quartiles in round brackets.
Made by `python benchmarks/tables.py` from `results/`; `bondgrad report` makes a page of the same.
[experiments.md](experiments.md) says how to run them.

| experiment | in the paper | protocol |
| --- | --- | --- |
"""


def reproduced() -> str:
    """The whole document."""
    folders = [path.parent for path in (ROOT / "results").glob("*/config.yaml")]
    folders = [folder for folder in folders if (folder / "results.json").exists()]
    order = {name: i for i, name in enumerate(FIRST)}
    folders.sort(key=lambda folder: (order.get(folder.name, len(order)), folder.name))
    experiments = [read(folder) for folder in folders]
    rows = [f"| [{e.name}](#{e.name}) | {e.paper.label or NOTHING} | {label(e).words} |\n" for e in experiments]
    return HEAD + "".join(rows) + "\n" + "\n".join(map(_section, experiments))


def _section(experiment: Experiment) -> str:
    parts = [f"## {experiment.name}\n", f"{experiment.title}.\n"]
    if experiment.says:
        parts.append(f"*In the paper:* {experiment.says}\n")
    for of in experiment.tables:
        rows = []
        for row in of.rows:
            cells = [beside(experiment, row, column, in_full=True) for column in of.columns]
            against = f" / {row.baseline}" if row.baseline and "loop_ratio" in of.columns else ""
            rows.append([row.run + against, *cells])
        title = f"{of.title}:\n\n" if of.title else ""
        parts.append(title + table(["", *(METRICS[column].label for column in of.columns)], rows) + "\n")
    facts = [f"- {name}: {words}\n" for name, words in protocol(experiment)]
    facts += [f"- `{command}`\n" for command in commands(experiment)]
    if experiment.notes:
        facts.append(f"- {experiment.notes}\n")
    parts.append("".join(facts))
    for number, plot in enumerate(experiment.plots, 1):
        picture = f"results/{experiment.folder}/{slug(experiment.folder)}-{number}-{plot.kind}.png"
        if (ROOT / picture).exists():
            parts.append(f"![{plot.title}](../{picture})\n")
    return "\n".join(parts)
