"""The verdict on every result of the paper, computed from claims and results."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from bondgrad.report._claims import FAILS, HOLDS, OPEN, Claim, Finding, check
from bondgrad.report._experiment import Experiment
from bondgrad.report._protocol import label
from bondgrad.report._quantities import BEST, LINES, Quantity, UnknownError, filled, line_name, placeholders

# What a verdict is called on the page, and the kind of its pill.
VERDICTS = {
    "reproduced": "full",
    "reproduced under a named reading": "reading",
    "not reproduced": "broken",
    "shortened": "shortened",
    "not run": "none",
}
SHORT = "Short of the paper's protocol"


@dataclass(frozen=True)
class PaperResult:
    """A table or a figure of the paper, or a claim of its text, and what is checked of it."""

    label: str
    about: str  # what it shows
    experiment: str  # the folder in results/ that answers it
    claims: list[Claim]
    found: list[str]  # sentences with placeholders; those whose numbers are not known are left out
    instead: str = ""  # what was used in place of what the paper used
    substitute: "PaperResult | None" = None  # is judged as long as the experiment was not run

    @property
    def quantities(self) -> list[Quantity]:
        """All that its claims and sentences name."""
        sentences = [*self.found, *(claim.because for claim in self.claims)]
        quoted = [q for sentence in sentences for e in placeholders(sentence, self.experiment) for q in e.quantities]
        return [*(q for claim in self.claims for q in claim.quantities), *quoted]


@dataclass(frozen=True)
class Verdict:
    """What is said of one result."""

    result: PaperResult  # the one that was judged: of a substitute, the substitute
    kind: str  # one of VERDICTS
    sentence: str
    findings: list[Finding]

    @property
    def checked(self) -> str:
        """How many claims hold, in words."""
        states = [finding.state for finding in self.findings]
        if states.count(OPEN) == len(states):
            return f"{len(states)} claims, all open" if len(states) > 1 else "1 claim, open"
        counts = f"{states.count(HOLDS)} of {len(states)} claims hold"
        return f"{counts}, {states.count(OPEN)} open" if OPEN in states else counts


def judge(result: PaperResult, experiments: Mapping[str, Experiment]) -> Verdict:
    """The verdict. A claim that does not hold rules out all others, and what is not known rules out "reproduced"."""
    findings = [check(claim, experiments) for claim in result.claims]
    if not _was_run(result, experiments):
        if result.substitute:
            return judge(result.substitute, experiments)
        return Verdict(result, "not run", f"`bondgrad reproduce {result.experiment}` runs it.", findings)
    if failing := [finding for finding in findings if finding.state == FAILS]:
        short = [words for words in _missing(result, findings, experiments) if words.startswith(SHORT)]
        sentences = [_why(result, failing, experiments), *short]
        return Verdict(result, "not reproduced", " ".join(sentences), findings)
    readings = list(dict.fromkeys(claim.reading for claim in result.claims if claim.reading))
    sentences = [f"Reading of the paper: {'; '.join(readings)}."] if readings else []
    sentences += _found(result, experiments)
    less = _missing(result, findings, experiments)
    if less or result.instead:
        return Verdict(result, "shortened", " ".join([*sentences, *less]), findings)
    kind = "reproduced under a named reading" if readings else "reproduced"
    return Verdict(result, kind, " ".join(sentences), findings)


def refuse_unknown_runs(result: PaperResult, runs: Mapping[str, Iterable[str]]) -> None:
    """Check that every run the result names exists in its experiment.

    Args:
        result: Of the paper.
        runs: The names of all runs and lines of an experiment, by its folder. Others are not looked at.

    Raises:
        ValueError: A name is not there. The message has the name and those that there are.
    """
    for of in result.quantities:
        name = of.run.removeprefix(BEST)
        if of.folder in runs and of.run == name and name not in (names := list(runs[of.folder])):
            shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
            raise ValueError(f"{result.label}: {of.folder} has no run called {name!r}; it has {shown}")
    if result.substitute:
        refuse_unknown_runs(result.substitute, runs)


def run_names(experiment: Experiment) -> list[str]:
    """All runs and lines that the experiment has or plans to have."""
    made = [run.run for run in experiment.runs]
    return list(dict.fromkeys([*experiment.planned_epochs, *made, *map(line_name, experiment.lines)]))


def _was_run(result: PaperResult, experiments: Mapping[str, Experiment]) -> bool:
    experiment = experiments.get(result.experiment)
    return experiment is not None and bool(experiment.runs or experiment.lines)


def _why(result: PaperResult, failing: list[Finding], experiments: Mapping[str, Experiment]) -> str:
    """The reasons that are given, and the claim itself where none is."""
    reasons = []
    for finding in failing:
        because = finding.claim.because
        try:
            reasons.append(filled(because, result.experiment, experiments) if because else _unexplained(finding))
        except UnknownError:
            reasons.append(_unexplained(finding))
    instead = [result.instead] if result.instead else []
    return " ".join(dict.fromkeys([*instead, *reasons]))


def _unexplained(finding: Finding) -> str:
    return f"{finding.claim.says} This was not found ({finding.words}), and why is not known."


def _found(result: PaperResult, experiments: Mapping[str, Experiment]) -> list[str]:
    sentences = []
    for sentence in result.found:
        try:
            sentences.append(filled(sentence, result.experiment, experiments))
        except UnknownError:
            continue
    return [result.instead, *sentences] if result.instead else sentences


def _missing(result: PaperResult, findings: list[Finding], experiments: Mapping[str, Experiment]) -> list[str]:
    """What the runs that the claims name lack of the protocol, or else which claims are open, in sentences."""
    parts = []
    for folder in dict.fromkeys(q.folder for claim in result.claims for q in claim.quantities):
        if folder in experiments:
            of = label(_only_named(result, experiments[folder]))
            parts += [of.words.removeprefix("shortened: ")] if of.kind == "shortened" else []
    if parts:
        return [f"{SHORT}: {'; '.join(parts)}."]
    if still_open := [finding.words for finding in findings if finding.state == OPEN]:
        return [f"{len(still_open)} of {len(findings)} claims are open: {'; '.join(dict.fromkeys(still_open))}."]
    return []


def _only_named(result: PaperResult, experiment: Experiment) -> Experiment:
    """The experiment without the runs that no claim names. A pattern names all."""
    named = {q.run for claim in result.claims for q in claim.quantities if q.folder == experiment.folder}
    lines = any(q.metric in LINES for claim in result.claims for q in claim.quantities)
    if lines or any(name.startswith(BEST) for name in named):
        return experiment
    planned = {name: epochs for name, epochs in experiment.planned_epochs.items() if name in named}
    return replace(experiment, planned_epochs=planned, runs=[run for run in experiment.runs if run.run in named])
