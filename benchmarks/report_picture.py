"""A picture of the report, on a screen and on a phone: results/report.png. Needs chromium.

python benchmarks/report_picture.py
"""

import subprocess
import tempfile
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.image import imread
from rich.console import Console

from bondgrad.report import report_command

ROOT = Path(__file__).parent.parent
SCREENS = {"screen": (1280, 1500), "phone": (500, 1500)}  # a headless window is never narrower than 500


def main() -> None:
    """Make the page, look at it, and put the two views side by side."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "index.html"
        report_command(ROOT / "results", Path(folder), Console())
        for name, (width, height) in SCREENS.items():
            where = f"--screenshot={folder}/{name}.png"
            window = f"--window-size={width},{height}"
            options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", where, window]
            subprocess.run(["chromium", *options, page.as_uri()], check=True, capture_output=True)
        views = [imread(f"{folder}/{name}.png") for name in SCREENS]
    widths = [view.shape[1] for view in views]
    figure = Figure(figsize=(sum(widths) / 160, views[0].shape[0] / 160), facecolor="#888888", layout="constrained")
    for axes, view in zip(figure.subplots(1, 2, width_ratios=widths), views, strict=True):
        axes.imshow(view, interpolation="antialiased")
        axes.axis("off")
    figure.savefig(ROOT / "results" / "report.png", dpi=130)


if __name__ == "__main__":
    main()
