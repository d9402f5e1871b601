"""The page: one file that needs no other, and no script."""

from dataclasses import dataclass
from importlib import resources

from bondgrad.report._experiment import Experiment
from bondgrad.report._figures import Drawn, inline, slug
from bondgrad.report._html import Html, element, join
from bondgrad.report._legend import LEGEND, TIMES
from bondgrad.report._protocol import Label, commands, hardware, label, protocol
from bondgrad.report._tables import comparison
from bondgrad.report._verdict_table import Judged, verdict_tables

LEAD = (
    "Every verdict is computed: the paper's claims are checked one by one against the results. "
    "What was not run, or was cut short, is never called reproduced."
)


@dataclass(frozen=True)
class Part:
    """One folder of results: an experiment and its figures, or what is wrong with it."""

    folder: str
    experiment: Experiment | None
    figures: list[Drawn]
    problem: str = ""

    @property
    def name(self) -> str:
        """What it is called."""
        return self.experiment.name if self.experiment else self.folder

    @property
    def label(self) -> Label:
        """Its protocol, in short."""
        return label(self.experiment) if self.experiment else Label("broken", "cannot be read")


def page(parts: list[Part], judged: Judged) -> str:
    """The whole page."""
    style = (resources.files("bondgrad.report") / "page.css").read_text(encoding="utf-8")
    head = join(
        [
            Html('<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'),
            Html('<meta name="color-scheme" content="light dark">\n'),
            Html('<link rel="icon" href="data:,">\n'),  # else browsers ask for a file that is not there
            element("title", "bondgrad: what was reproduced of the paper"),
            element("style", Html(style)),
        ]
    )
    links = [element("li", link(part)) for part in parts]
    navigation = element(
        "nav",
        element("ul", element("li", element("a", "Summary", href="#summary")), *links),
        aria_label="Experiments",
    )
    main = element("main", summary(parts, judged), *(section(part) for part in parts))
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{navigation}\n{main}\n</body>\n</html>\n'
    )


def summary(parts: list[Part], judged: Judged) -> Html:
    """The verdicts, how to read the numbers, and all experiments at a glance."""
    return element(
        "header",
        element("p", "bondgrad", class_="kicker"),
        element("h1", "What was reproduced of the paper"),
        element("p", LEAD, class_="lead"),
        verdict_tables(judged, [part.folder for part in parts if part.experiment]),
        _experiments(parts),
        element("p", f"{LEGEND} {TIMES}", class_="notes"),
        id="summary",
    )


def _experiments(parts: list[Part]) -> Html:
    full = sum(part.label.kind == "full" for part in parts)
    rows = [
        element(
            "tr",
            element("th", link(part), scope="row", role="rowheader"),
            element("td", (part.experiment and part.experiment.paper.label) or "-", role="cell"),
            element("td", pill(part.label), role="cell"),
            element("td", hardware(part.experiment) if part.experiment else "-", role="cell"),
            role="row",
        )
        for part in parts
    ]
    headings = ("Experiment", "In the paper", "Protocol", "Hardware")
    experiments = f"{len(parts)} experiment{'s' * (len(parts) != 1)}"
    # Roles in full: on a phone rows are shown as cards, and a browser would forget that this is a table.
    return element(
        "table",
        element("caption", element("b", "What was run"), f": {experiments}, {full or 'none'} with the full protocol"),
        element("thead", element("tr", *(element("th", h, scope="col") for h in headings))),
        element("tbody", *rows, role="rowgroup"),
        class_="summary experiments",
        role="table",
    )


def section(part: Part) -> Html:
    """One experiment."""
    anchor = slug(part.folder)
    if part.experiment is None:
        return element(
            "section",
            element("h2", part.name),
            pill(part.label),
            element("p", part.problem, class_="problem"),
            id=anchor,
        )
    experiment = part.experiment
    content = [
        element("p", " · ".join(filter(None, (experiment.name, experiment.paper.label))), class_="kicker"),
        element("h2", experiment.title, id=f"{anchor}.title"),
        pill(part.label),
    ]
    if experiment.says:
        content.append(element("p", element("b", "In the paper: "), experiment.says, class_="says"))
    content += [comparison(experiment, table) for table in experiment.tables]
    if part.figures:
        content.append(element("div", *map(figure, part.figures), class_="figures"))
    content.append(_protocol(experiment))
    return element("section", *content, id=anchor, aria_labelledby=f"{anchor}.title")


def _protocol(experiment: Experiment) -> Html:
    pairs = [element("div", element("dt", name), element("dd", words)) for name, words in protocol(experiment)]
    if typed := commands(experiment):
        lines = join(element("code", command) for command in typed)
        pairs.append(element("div", element("dt", "Command"), element("dd", lines)))
    if not pairs:
        pairs = [element("div", element("dt", "Runs"), element("dd", "none: nothing was trained for this"))]
    notes = [element("p", experiment.notes, class_="notes")] if experiment.notes else []
    return element("div", element("h3", "Protocol actually run"), element("dl", *pairs), *notes, class_="protocol")


def figure(drawn: Drawn) -> Html:
    """A figure and its caption, with links to its files."""
    if drawn.svg is None:
        return element("figure", element("figcaption", element("b", drawn.title), " ", drawn.caption))
    files = [element("a", kind.upper(), href=f"{drawn.stem}.{kind}") for kind in ("svg", "png")]
    caption = element("figcaption", element("b", drawn.title), " ", drawn.caption, " ", element("small", *files))
    return element("figure", inline(drawn), caption)


def link(part: Part) -> Html:
    """To its section. A long name may be broken between its words."""
    return element("a", Html(join([part.name]).replace("_", "_<wbr>")), href=f"#{slug(part.folder)}")


def pill(of: Label) -> Html:
    """The protocol's label, which is not to be overlooked."""
    return element("span", of.words, class_=f"pill {of.kind}")
