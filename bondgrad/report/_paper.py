"""Reads paper.yaml and paper_text.yaml: the results of the paper, and the claims by which each is judged."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

from bondgrad.report._checks import entry, items, known, mapping, number, text
from bondgrad.report._claims import Claim
from bondgrad.report._experiment import Experiment
from bondgrad.report._quantities import expression, quantity
from bondgrad.report._verdicts import PaperResult, Verdict, judge, refuse_unknown_runs, run_names

# What an entry and a claim may have; paper.yaml says what each means.
RESULT_KEYS = ("label", "about", "experiment", "claims", "found", "instead", "substitute")
CLAIM_KEYS = ("says", "value", "paper", "tolerance", "range", "below", "above", "by", "reading", "because")


@dataclass(frozen=True)
class PaperResults:
    """All tables and figures of the paper, and what only its text claims."""

    results: list[PaperResult]
    text: list[PaperResult]


def paper_results(document: str | None = None) -> PaperResults:
    """The paper's results.

    Args:
        document: YAML. The two files of this package if it is None.

    Raises:
        ValueError: It is not what it should be. The message says where.
    """
    if document is None:
        files = (resources.files("bondgrad.report") / name for name in ("paper.yaml", "paper_text.yaml"))
        document = "\n".join(file.read_text(encoding="utf-8") for file in files)
    raw = known(mapping(yaml.safe_load(document)), ("results", "text"), "the file")
    return PaperResults(
        *([_result(item, f"{key}[{i}]") for i, item in enumerate(items(raw, key))] for key in ("results", "text"))
    )


def verdicts(results: list[PaperResult], experiments: Mapping[str, Experiment]) -> list[Verdict]:
    """The verdict on each.

    Raises:
        ValueError: A claim names a run that its experiment does not have. The message has the name.
    """
    runs = {folder: [*run_names(experiment), *_defined(folder)] for folder, experiment in experiments.items()}
    for result in results:
        refuse_unknown_runs(result, runs)
    return [judge(result, experiments) for result in results]


def _defined(folder: str) -> list[str]:
    """Runs of the experiment's own file: results may be older than it."""
    from bondgrad.experiments.config import PAPER, load  # late: experiments import the report

    path = PAPER / f"{folder}.yaml"
    return [run.run for run in load(path).runs] if path.is_file() else []


def _result(raw: object, where: str, inherited: dict[str, Any] | None = None) -> PaperResult:
    found = (inherited or {}) | known(mapping(raw, where), RESULT_KEYS, where)
    where = text(found, "label", where)
    experiment = text(found, "experiment", where)
    claims = [_claim(item, f"{where}, claims[{i}]", experiment) for i, item in enumerate(items(found, "claims", where))]
    if not claims:  # else nothing could ever speak against it
        raise ValueError(f"{where}: there must be at least one claim")
    substitute = found.get("substitute")
    names = {key: found[key] for key in ("label", "about")}
    return PaperResult(
        where,
        text(found, "about", where),
        experiment,
        claims,
        [str(sentence).strip() for sentence in items(found, "found", where)],
        text(found, "instead", where, needed=False),
        None if substitute is None else _result(substitute, f"{where}, substitute", names),
    )


def _claim(raw: object, where: str, folder: str) -> Claim:
    found = known(mapping(raw, where), CLAIM_KEYS, where)
    kinds = [key for key in ("tolerance", "range", "below", "above") if key in found]
    if len(kinds) != 1:
        raise ValueError(f"{where} must have one of tolerance (with paper), range, below and above, got {kinds}")
    try:
        claim = Claim(
            says=text(found, "says", where),
            value=expression(text(found, "value", where), folder),
            reading=text(found, "reading", where, needed=False),
            because=text(found, "because", where, needed=False),
            **_condition(found, kinds[0], where, folder),
        )
    except ValueError as error:
        message = str(error)
        raise ValueError(message if message.startswith(where) else f"{where}: {message}") from error
    if claim.value.operator in ("<", ">") or (claim.than and claim.value.operator):
        raise ValueError(f"{where}: value must be a quantity, or with a range a difference or ratio of two")
    return claim


def _condition(found: dict[str, Any], kind: str, where: str, folder: str) -> dict[str, Any]:
    """What the value has to be."""
    if kind == "tolerance":
        paper = number(entry(found, "paper", where), f"{where}.paper")
        tolerance = number(found["tolerance"], f"{where}.tolerance")
        return {"paper": paper, "low": paper - tolerance, "high": paper + tolerance}
    if kind == "range":
        ends = items(found, "range", where)
        if len(ends) != 2 or ends == [None, None]:
            raise ValueError(f"{where}.range must be [low, high], one of which may be null, got {ends}")
        low, high = (None if end is None else number(end, f"{where}.range") for end in ends)
        return {"low": low, "high": high}
    by = number(found.get("by", 0.0), f"{where}.by")
    return {"than": quantity(text(found, kind, where), folder), "below": kind == "below", "by": by}
