"""Brings what results/ shows up to date with the experiments' files, without training.

    python docs/generate/refresh_results.py [NAME ...]

`results/NAME/config.yaml` has the settings that the runs were made with, which stay, and what is to be shown of them:
title, notes, the paper's values, tables and figures. The latter are taken from the experiment's own file as it is now
(`bondgrad/experiments/paper/NAME.yaml`), and the figures are drawn anew.
"""

import sys
from pathlib import Path

import yaml

from bondgrad import report
from bondgrad.experiments import config

RESULTS = Path(__file__).parents[2] / "results"


def refresh(name: str) -> None:
    """Bring one experiment's folder up to date."""
    path = RESULTS / name / "config.yaml"
    experiment = config.load(config.PAPER / f"{name}.yaml")
    now = experiment.as_dict()
    made = yaml.safe_load(path.read_text())["runs"]
    now["runs"] |= {run: settings for run, settings in made.items() if run in now["runs"]}
    path.write_text(yaml.safe_dump(now, sort_keys=False, allow_unicode=True, width=120))
    for old in path.parent.glob(f"{name}-*.png"):
        old.unlink()
    report.draw(report.read(path.parent), path.parent)


if __name__ == "__main__":
    known = sorted(path.parent.name for path in RESULTS.glob("*/config.yaml"))
    for each in sys.argv[1:] or known:
        refresh(each)
        print(f"results/{each} shows what its file says")
