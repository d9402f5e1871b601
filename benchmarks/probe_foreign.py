"""What `bondgrad.probe` recommends for eight boxes that other people wrote, and whether it trains as predicted.

    python benchmarks/probe_foreign.py                  # all eight
    python benchmarks/probe_foreign.py forest contacts  # only these; the rest stays as it was

Each box is probed, the report printed at 80 columns, and the code in it executed as it stands there. Signs of that
layer are compared with the reference as in benchmarks/gallery.py, on other rows than the probe had. Then a read-in
before it learns, in forty steps, to give the outputs that another read-in gives. Writes results/probe_foreign.json.
"""

import json
import sys
import warnings
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from foreign_boxes import BOXES, ForeignBox
from gallery import run
from record import save
from rich.console import Console
from torch import Tensor, nn

import bondgrad
from bondgrad.experiments.probe import show
from bondgrad.probing import Report

NAMES = (
    "circuit, exact",
    "circuit, 1000 shots",
    "contacts",
    "tree",
    "forest",
    "Gaussian process",
    "stiff solver",
    "circuit simulator",
)
TYPICAL, ROWS, STEPS, HIDDEN = 200, 32, 40, 4  # rows for the probe; rows, steps and inputs of the training
SECONDS = 300.0  # so that evaluations decide what is measured, also on a busy machine
PATH = Path(__file__).parent.parent / "results" / "probe_foreign.json"


def printed(report: Report) -> str:
    """The report as a terminal of 80 columns shows it."""
    out = StringIO()
    show(report, Console(width=80, file=out), batch=report.batch)
    return out.getvalue()


def pasted(text: str, report: Report, box: ForeignBox) -> bondgrad.BlackBox:
    """The layer that the code in a printed report makes."""
    lines = text.splitlines()
    first = min(lines.index(line) for line in ("import bondgrad", "import os") if line in lines)
    last = lines.index(")")
    names: dict[str, Any] = {report.name: box.answers}
    exec("\n".join(lines[first : last + 1]), names)  # noqa: S102
    layer: bondgrad.BlackBox = names["box"]
    return layer


def train(box: ForeignBox, layer: bondgrad.BlackBox) -> tuple[float, float]:
    """The loss before and after, relative to the variance of the targets, of the box without noise where it has any."""
    torch.manual_seed(0)
    z = torch.randn(ROWS, HIDDEN)
    teacher, student = nn.Linear(HIDDEN, box.d), nn.Linear(HIDDEN, box.d)
    answers = box.smooth or box.answers

    def inputs(read_in: nn.Linear) -> Tensor:
        x: Tensor = box.centre + 2 * box.deviation * read_in(z)
        return x

    target = torch.from_numpy(answers(inputs(teacher).detach().double().numpy())).float()
    variance = target.var(0).clamp_min(1e-12)

    def loss(y: Tensor) -> Tensor:
        return ((y - target).square() / variance).mean()

    def loss_now() -> float:
        return float(loss(torch.from_numpy(answers(inputs(student).detach().double().numpy())).float()))

    before = loss_now()
    optimizer = torch.optim.Adam(student.parameters(), lr=0.03)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(layer(inputs(student))).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return before, loss_now()


def measure(name: str) -> dict[str, Any]:
    """One box."""
    box = BOXES[name]()
    x = box.centre + box.deviation * torch.randn(TYPICAL, box.d, generator=torch.Generator().manual_seed(0))
    report = replace(bondgrad.probe(box.answers, x, seconds=SECONDS), batch=box.rows)
    text = printed(report)
    layer = pasted(text, report, box)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        signs, cosine = run(box, 42, {"recommended": layer}, steps=120)["recommended"]
        before, after = train(box, pasted(text, report, box) if layer.evaluator is None else layer)
    if layer.evaluator is not None:
        layer.evaluator.close()
    found = report.gradients
    return {
        "box": name,
        "verdict": report.verdict,
        "recommended": {k: v for k, v in report.arguments.items() if not k.endswith("_features")},
        "predicted": None if found is None else 100 * found.predicted,
        "predicted by default": None if found is None else 100 * found.default,
        "signs": signs,
        "cosine": cosine,
        "loss": [before, after],
        "evaluations": report.evaluations,
        "seconds": report.seconds,
        "report": text.splitlines(),
    }


def main() -> None:
    """Measure, print, save."""
    torch.set_num_threads(1)
    names = sys.argv[1:] or list(NAMES)
    del sys.argv[1:]
    done = {n["box"]: n for n in json.loads(PATH.read_text())["numbers"]} if PATH.exists() else {}
    for name in names:
        done[name] = found = measure(name)
        print({key: value for key, value in found.items() if key != "report"}, flush=True)
        save("probe_foreign", [done[name] for name in NAMES if name in done])


if __name__ == "__main__":
    main()
