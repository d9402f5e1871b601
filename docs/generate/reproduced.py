"""Makes docs/reproduced.md: verdicts on the paper's results, and tables of what is in results/NAME/."""

from collections.abc import Iterable
from pathlib import Path

from reproduced_readings import readings
from results_markdown import ROOT, table

from bondgrad.report import Experiment, label, paper_results, read, verdicts
from bondgrad.report._compare import NOTHING, beside, heading
from bondgrad.report._figures import slug
from bondgrad.report._legend import LEGEND, TIMES
from bondgrad.report._protocol import commands, protocol
from bondgrad.report._verdict_table import counted
from bondgrad.report._verdicts import Verdict

FIRST = (
    *("calhouse", "calhouse_loop", "calhouse_readings", "calhouse_scaling"),
    *("cifar100", "cifar100_loop", "fmnist_cifar10", "fmnist_loop"),
)

HEAD = """# What came out

All tables and figures of the paper, also those that were never run, and what its text claims besides. Every verdict is
computed: the paper's claims are checked one by one against `results/`, and what was not run, or was cut short, is never
called reproduced. [Claims](#claims), at the end, has all of them with what was found. Made by
`python docs/generate/tables.py`; `bondgrad report` makes a page of the same. [experiments.md](experiments.md) says how
to run them.

**Tables and figures of the paper**: {results_counted}

{results}

**Claims of its text alone**: {text_counted}

{text}

## What was run

{experiments}

How to read the tables below: ours, and in square brackets the paper's. The loop time of a single run is a median, with
its quartiles in round brackets.

{legend}

{times}

{readings}
{sections}
## Claims

{claims}
"""


def reproduced() -> str:
    """Return the whole document."""
    experiments = [read(folder) for folder in _folders()]
    by_folder = {experiment.folder: experiment for experiment in experiments}
    paper = paper_results()
    results, text = verdicts(paper.results, by_folder), verdicts(paper.text, by_folder)
    listed = [[f"[{e.name}](#{e.name})", e.paper.label or NOTHING, label(e).words] for e in experiments]
    return HEAD.format(
        results_counted=counted(results),
        results=_verdict_table(results, by_folder),
        text_counted=counted(text),
        text=_verdict_table(text, by_folder),
        experiments=_words(["experiment", "in the paper", "protocol"], listed),
        legend=LEGEND,
        times=TIMES,
        readings=readings(),
        sections="\n".join(map(_section, experiments)),
        claims="\n".join(map(_claims, [*results, *text])).strip(),
    )


def _folders() -> list[Path]:
    """Return all folders with results, the main experiments first."""
    folders = [path.parent for path in (ROOT / "results").glob("*/config.yaml")]
    folders = [folder for folder in folders if (folder / "results.json").exists()]
    order = {name: i for i, name in enumerate(FIRST)}
    return sorted(folders, key=lambda folder: (order.get(folder.name, len(order)), folder.name))


def _words(headings: list[str], rows: Iterable[list[str]]) -> str:
    """Return a table in Markdown, all to the left. A | in a cell does not end it."""
    lines = [headings, ["---"] * len(headings), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _verdict_table(found: list[Verdict], experiments: dict[str, Experiment]) -> str:
    rows = []
    for verdict in found:
        result = verdict.result
        name = f"[{result.label}](#{result.experiment})" if result.experiment in experiments else result.label
        rows.append([f"{name}: {result.about}", f"**{verdict.kind}**", f"{verdict.sentence} *{verdict.checked}*"])
    return _words(["result", "verdict", "what came out"], rows)


def _claims(verdict: Verdict) -> str:
    """Return every claim of a result with what was found."""
    rows = []
    for finding in verdict.findings:
        reading = f" Reading: {finding.claim.reading}." if finding.claim.reading else ""
        rows.append([finding.claim.says + reading, finding.words, finding.state])
    return f"### {verdict.result.label}\n\n{_words(['the paper claims', 'found', ''], rows)}\n"


def _section(experiment: Experiment) -> str:
    parts = [f"## {experiment.name}\n", f"{experiment.title}.\n"]
    if experiment.says:
        parts.append(f"*In the paper:* {experiment.says}\n")
    for of in experiment.tables:
        rows = []
        for row in of.rows:
            cells = [beside(experiment, row, column, in_full=True) for column in of.columns]
            relative = {"loop_ratio", "paired_difference"} & set(of.columns)
            against = f" / {row.baseline}" if row.baseline and relative else ""
            rows.append([row.run + against, *cells])
        title = f"{of.title}:\n\n" if of.title else ""
        parts.append(title + table(["", *(heading(experiment, of, column) for column in of.columns)], rows) + "\n")
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
