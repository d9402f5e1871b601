"""Puts what is in results/ into the documentation, so that no figure is typed by hand.

python docs/generate/tables.py            # writes docs/measured.md, docs/reproduced.md, and tables elsewhere
python docs/generate/tables.py --check    # only says whether they are up to date
"""

import re
import sys
from pathlib import Path

from evaluators_tables import evaluators_tables
from journal_table import journal_table
from measured import measured
from measured_demo import demo
from measured_gallery import gallery
from probe_table import probe_table
from pytorch_table import pytorch_table
from reproduced import reproduced
from results_markdown import ROOT
from waking_table import waking_tables


def rendered() -> dict[Path, str]:
    """Return the files as they should be."""
    readme, docs = ROOT / "README.md", ROOT / "docs"
    return {
        readme: with_table(readme, demo()),
        docs / "reproduced.md": reproduced(),
        docs / "pytorch.md": with_table(docs / "pytorch.md", pytorch_table()),
        docs / "measured.md": measured(),
        docs / "steps.md": with_named_tables(docs / "steps.md", {"gallery": gallery()}),
        docs / "probe.md": with_table(docs / "probe.md", probe_table()),
        docs / "journal.md": with_table(docs / "journal.md", journal_table()),
        docs / "evaluators.md": with_named_tables(docs / "evaluators.md", evaluators_tables()),
        docs / "structure.md": with_named_tables(docs / "structure.md", waking_tables()),
    }


def with_table(path: Path, text: str) -> str:
    """Return the document, with this text between its marks."""
    between = re.compile(r"(<!-- table.*? -->\n).*?(<!-- end -->)", re.DOTALL)
    return between.sub(lambda match: match[1] + "\n" + text + "\n\n" + match[2], path.read_text())


def with_named_tables(path: Path, texts: dict[str, str]) -> str:
    """Return the document, with each of these texts between the marks of its name."""
    document = path.read_text()
    for name, text in texts.items():
        between = re.compile(rf"(<!-- table {name}:.*? -->\n).*?(<!-- end -->)", re.DOTALL)
        document = between.sub(lambda match, text=text: match[1] + "\n" + text + "\n\n" + match[2], document)
    return document


def main(check: bool) -> None:
    """Write the files, or compare them."""
    for path, text in rendered().items():
        if not check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            sys.exit(f"{path.relative_to(ROOT)} is not what results/ says: run python docs/generate/tables.py")


if __name__ == "__main__":
    main("--check" in sys.argv)
