"""The command: from a folder of results to a page."""

from pathlib import Path

from rich.console import Console
from rich.markup import escape

from bondgrad.report._experiment import Experiment
from bondgrad.report._figures import draw
from bondgrad.report._page import Part, page
from bondgrad.report._paper import paper_results, verdicts
from bondgrad.report._read import read
from bondgrad.report._verdict_table import Judged
from bondgrad.report._verdicts import PaperResult


def report_command(results: Path, output: Path, console: Console) -> None:
    """Write `index.html` and the figures.

    Args:
        results: A folder for each experiment, with `config.yaml` and `results.json`. Others are passed over.
        output: Is made if it is not there.
        console: Told where the page is, and which folders could not be read.

    Raises:
        ValueError: There are no results.
    """
    results = results.resolve()
    files = [*results.glob("*/config.yaml"), *results.glob("config.yaml")]  # of all, or of one
    folders = sorted(path.parent for path in files if (path.parent / "results.json").is_file())
    if not folders:
        raise ValueError(f"there are no results in {results}: run `bondgrad reproduce NAME` first")
    output.mkdir(parents=True, exist_ok=True)
    parts = []
    for folder in folders:
        try:
            experiment = read(folder)
            figures = draw(experiment, output)
        except ValueError as error:
            parts.append(Part(folder.name, None, [], f"{folder.name}: {error}"))
            console.print(f"[yellow]Cannot be read:[/] {escape(parts[-1].problem)}")
            continue
        for drawn in figures:
            if drawn.svg is not None:
                (output / f"{drawn.stem}.svg").write_text(drawn.svg, encoding="utf-8")
        parts.append(Part(folder.name, experiment, figures))
    experiments = {part.folder: part.experiment for part in parts if part.experiment}
    judged = _judged(experiments, only_these=(results / "config.yaml").is_file())
    if judged.problem:
        console.print(f"[yellow]No verdicts:[/] {escape(judged.problem)}")
    (output / "index.html").write_text(page(parts, judged), encoding="utf-8")
    console.print(f"{len(parts)} experiment{'s' * (len(parts) != 1)} in [bold]{escape(str(output / 'index.html'))}[/].")


def _judged(experiments: dict[str, Experiment], only_these: bool) -> Judged:
    """The verdicts on all results of the paper, or only on those that these experiments answer."""

    def shown(results: list[PaperResult]) -> list[PaperResult]:
        return [result for result in results if not only_these or result.experiment in experiments]

    paper = paper_results()
    try:
        return Judged(verdicts(shown(paper.results), experiments), verdicts(shown(paper.text), experiments))
    except ValueError as error:
        return Judged([], [], str(error))
