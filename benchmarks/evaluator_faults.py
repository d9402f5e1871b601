"""Training through a box that fails in every way, beside the same training through one that does not.

    python benchmarks/evaluator_faults.py Processes
    python benchmarks/evaluator_faults.py Ray

Of all evaluations 5 % raise an error, 2 % hang past the timeout and 1 % give NaN, and every 50 steps one of the four
workers is killed with signal 9. d = 5, batch 4, 500 steps.
"""

import argparse
import contextlib
import math
import os
import random
import signal
import sqlite3
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from evaluator_kinds import KINDS
from record import save
from torch import Tensor, nn

from bondgrad import BlackBox, sign_accuracy
from bondgrad.evaluators import Journal, Local
from bondgrad.metrics import exact_vjp
from bondgrad.step._records import Step


def box(x: Tensor) -> Tensor:
    """What is evaluated: a smooth function of five inputs."""
    return torch.sin(2 * x) + 0.5 * x.roll(1, 1) * x


class Faulty:
    """A factory of boxes that fail at random, each of which leaves the number of its process in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self) -> Any:
        """A box for this process."""
        (self.folder / str(os.getpid())).touch()
        chance = random.Random(os.getpid())

        def faulty(x: Tensor) -> Tensor:
            kind = chance.random()
            if kind < 0.05:
                raise RuntimeError("the laser is off")
            if kind < 0.07:
                time.sleep(3600)
            return x * math.nan if kind < 0.08 else box(x)

        return faulty


def train(layer: BlackBox, steps: int, every_step: Any = lambda _: None) -> dict[str, float]:
    """The mean sign accuracy over all steps, and the last loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 5), layer, nn.Linear(5, 1))
    optimizer, found, losses = torch.optim.Adam(model.parameters(), 1e-3), [], []

    def watch(_: BlackBox, step: Step) -> None:
        found.append(float(sign_accuracy(step.g, exact_vjp(box, step.x, step.gy))))

    layer.register_step_hook(watch)
    target = nn.Linear(8, 1)
    for step in range(steps):
        x = torch.randn(4, 8)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), target(x).detach().sin())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        every_step(step)
    return {"signs, %": 100 * sum(found) / len(found), "loss, last 50 steps": sum(losses[-50:]) / 50}


def faulty_run(kind: str, steps: int, folder: Path) -> dict[str, Any]:
    """Train through faulty workers, with a journal, and compare what it has with the statistics of the layer."""
    chance, killed = random.Random(0), []

    def kill(step: int) -> None:
        if step % 50 != 49:
            return
        for pid in chance.sample(sorted(folder.glob("*")), len(list(folder.glob("*")))):
            with contextlib.suppress(ProcessLookupError):  # it hung, and was ended before
                os.kill(int(pid.name), signal.SIGKILL)
                killed.append(pid.name)
                return

    path = folder.parent / "journal.sqlite"
    start = time.perf_counter()
    with KINDS[kind](4, factory=Faulty(folder), max_rows=1, timeout=0.2) as evaluator, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        journal = Journal(evaluator, path)
        layer = BlackBox(None, 5, evaluator=journal, seed=0)
        found: dict[str, Any] = train(layer, steps, kill)
        stats = layer.stats
        journal.close()
    with contextlib.closing(sqlite3.connect(path)) as file:
        (rows,) = file.execute("select count(*) from evaluations").fetchone()
        (failed,) = file.execute("select count(*) from evaluations where failure is not null").fetchone()
    return found | {
        "minutes": (time.perf_counter() - start) / 60,
        "evaluations": stats.evaluations,
        "in the journal": rows,
        "failed in the journal": failed,
        "errors": dict(stats.errors),
        "asked again": stats.retried,
        "rows without an output": stats.failures,
        "workers killed": len(killed),
    }


def main() -> None:
    """Both runs, and the difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["Processes", "Ray"])
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "workers"
        folder.mkdir()
        clean = train(BlackBox(box, 5, evaluator=Local(max_rows=1), seed=0), options.steps)
        numbers = {
            "steps": options.steps,
            "without faults": clean,
            "faulty": faulty_run(options.kind, options.steps, folder),
        }
    print(numbers)
    save(f"evaluator_faults_{options.kind.lower()}", numbers)


if __name__ == "__main__":
    main()
