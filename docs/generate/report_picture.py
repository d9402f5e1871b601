"""Makes a picture of the report on a screen and on a phone, results/report.png, which README.md shows. Needs chromium.

python docs/generate/report_picture.py
"""

import subprocess
import tempfile
from html import escape
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.image import imread
from rich.console import Console

from bondgrad.report import report_command

ROOT = Path(__file__).parents[2]
VIEWS = (("summary", 1280), ("calhouse", 1280), ("summary", 375))  # what of the page is seen, and how wide
HEIGHT = 1700

# The page in a frame, moved up: a window without a screen does not scroll, nor is it ever as narrow as a phone.
AROUND = """<!doctype html><style>body {{ margin: 0 }} iframe {{ border: 0; width: {width}px; height: 30000px }}</style>
<iframe srcdoc="{page}"></iframe>
<script>
addEventListener("load", () => {{
  const frame = document.querySelector("iframe");
  frame.style.marginTop = -frame.contentDocument.getElementById("{part}").offsetTop + "px";
}});
</script>"""


def main() -> None:
    """Make the page, look at it, and put the views side by side."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report_command(ROOT / "results", folder, Console())
        views = [_seen(folder, part, width) for part, width in VIEWS]
    widths = [view.shape[1] for view in views]
    figure = Figure(figsize=(sum(widths) / 160, HEIGHT / 160), facecolor="#888888", layout="constrained")
    for axes, view in zip(figure.subplots(1, len(views), width_ratios=widths), views, strict=True):
        axes.imshow(view, interpolation="antialiased")
        axes.axis("off")
    figure.savefig(ROOT / "results" / "report.png", dpi=110)


def _seen(folder: Path, part: str, width: int) -> np.ndarray:
    """Return how a part of the page looks in a browser, [HEIGHT, width, 4]."""
    page, around, picture = (folder / name for name in ("index.html", "around.html", "picture.png"))
    around.write_text(AROUND.format(width=width, part=part, page=escape(page.read_text())))
    window = f"--window-size={max(width, 500)},{HEIGHT}"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--screenshot={picture}", window]
    subprocess.run(["chromium", *options, around.as_uri()], check=True, capture_output=True)
    return imread(picture)[:, :width]


if __name__ == "__main__":
    main()
