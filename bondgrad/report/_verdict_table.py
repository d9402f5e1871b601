"""The first tables of the page: every result of the paper with its verdict."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from bondgrad.report._claims import FAILS, HOLDS, Finding
from bondgrad.report._figures import slug
from bondgrad.report._html import Html, element, join
from bondgrad.report._verdicts import VERDICTS, Verdict


@dataclass(frozen=True)
class Judged:
    """The verdicts on the paper's tables and figures, and on what only its text claims."""

    results: list[Verdict]
    text: list[Verdict]
    problem: str = ""  # why there are none


def verdict_tables(judged: Judged, folders: Collection[str]) -> Html:
    """Both tables, with links to the sections of these folders."""
    if judged.problem:
        return element("p", judged.problem, class_="problem")
    named = {"Tables and figures of the paper": judged.results, "Claims of its text alone": judged.text}
    return join(_table(title, verdicts, folders) for title, verdicts in named.items() if verdicts)


def counted(verdicts: list[Verdict]) -> str:
    """How many there are of each verdict, in words."""
    counts = Counter(verdict.kind for verdict in verdicts)
    return ", ".join(f"{counts[kind]} {kind}" for kind in VERDICTS if counts[kind])


def _table(title: str, verdicts: list[Verdict], folders: Collection[str]) -> Html:
    headings = ("Result", "Verdict", "What came out")
    # Roles in full: on a phone rows are shown as cards, and a browser would forget that this is a table.
    return element(
        "table",
        element("caption", element("b", title), f": {counted(verdicts)}"),
        element("thead", element("tr", *(element("th", heading, scope="col") for heading in headings))),
        element("tbody", *(_row(verdict, folders) for verdict in verdicts), role="rowgroup"),
        class_="summary verdicts",
        role="table",
    )


def _row(verdict: Verdict, folders: Collection[str]) -> Html:
    result = verdict.result
    name = Html(join([result.label]).replace("_", "_<wbr>"))
    linked = element("a", name, href=f"#{slug(result.experiment)}") if result.experiment in folders else name
    pill = element("span", verdict.kind, class_=f"pill {VERDICTS[verdict.kind]}")
    return element(
        "tr",
        element("th", linked, element("small", result.about), scope="row", role="rowheader"),
        element("td", pill, role="cell"),
        element("td", element("p", _with_code(verdict.sentence)), _claims(verdict), role="cell"),
        role="row",
    )


def _claims(verdict: Verdict) -> Html:
    return element(
        "details",
        element("summary", verdict.checked),
        element("ul", *(_claim(finding) for finding in verdict.findings)),
    )


def _claim(finding: Finding) -> Html:
    kind = {HOLDS: "full", FAILS: "broken"}.get(finding.state, "none")
    state = element("span", finding.state, class_=f"pill {kind}")
    reading = [f" Reading: {finding.claim.reading}."] if finding.claim.reading else []
    return element("li", state, " ", finding.claim.says, *reading, " ", element("small", finding.words))


def _with_code(sentence: str) -> Html:
    """What stands between backquotes is a command. No line begins with a % sign."""
    parts = sentence.replace(" %", "\N{NO-BREAK SPACE}%").split("`")
    return join(element("code", part) if i % 2 else part for i, part in enumerate(parts))
