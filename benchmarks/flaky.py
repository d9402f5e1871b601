"""California Housing trained through a box that fails now and then, beside the same training through one that does not.

    python benchmarks/flaky.py            # everything
    python benchmarks/flaky.py Processes  # one evaluator; the rest stays as it was

The network is that of the demo: 8-100-100-5, the frozen box 5-500-5, 5-100-100-1, Huber loss, batch 64, 500 steps of
Adam. Of all rows that are evaluated 5 % become NaN, or 5 % raise an error, or both; in a call of many rows the error of
one is that of the call. In a bad region, where the first input is above 1, rows fail always, with NaN or with an error;
training goes there when nothing keeps it away, and once with limits that do.
"""

import json
import math
import os
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from record import save
from torch import Tensor, nn

from bondgrad import BlackBox, BoxError, sign_accuracy
from bondgrad.data import california_housing
from bondgrad.evaluators import Evaluator, Local, Processes, Threads
from bondgrad.metrics import exact_vjp
from bondgrad.networks import ffnn
from bondgrad.step._records import Step

STEPS, BATCH, LAST = 500, 64, 100
BOUND, FAR = 1.0, 1e6  # of the region where rows always fail; no limit at all


class Faults(NamedTuple):
    """How often rows fail, and where they always do."""

    nan: float = 0.0  # the share of rows
    error: float = 0.0
    region: str | None = None  # "nan" or "error": what becomes of every row in the bad region
    limits: bool = False  # whether the layer knows of it


KINDS = {
    "none": Faults(),
    "5 % NaN": Faults(nan=0.05),
    "5 % errors": Faults(error=0.05),
    "5 % NaN, 5 % errors": Faults(nan=0.05, error=0.05),
    "a region of NaN": Faults(region="nan"),
    "a region of errors": Faults(region="error"),
    "a region of NaN, limits": Faults(region="nan", limits=True),
    "a region of errors, limits": Faults(region="error", limits=True),
}


def frozen_box() -> nn.Module:
    """The network that only may be called."""
    torch.manual_seed(7)
    return ffnn([5, 500, 5]).requires_grad_(False)


class FlakyBox:
    """A factory of boxes, each of which fails at random.

    Args:
        faults: How it fails.
    """

    def __init__(self, faults: Faults) -> None:
        self.faults = faults

    def __call__(self) -> Callable[[Tensor], Tensor]:
        """A box for this process."""
        torch.set_num_threads(1)
        box, chance, faults = frozen_box(), random.Random(0), self.faults

        def flaky(x: Tensor) -> Tensor:
            bad = x[:, 0] > BOUND if faults.region else torch.zeros(len(x), dtype=torch.bool)
            errors = [n for n in range(len(x)) if faults.error and chance.random() < faults.error]
            if errors or (faults.region == "error" and bool(bad.any())):
                raise RuntimeError("the solver did not converge")
            nan = torch.tensor([faults.nan > 0 and chance.random() < faults.nan for _ in range(len(x))])
            return box(x).masked_fill((nan | bad)[:, None], math.nan)

        return flaky


EVALUATORS: dict[str, Callable[[FlakyBox], tuple[Any, Evaluator]]] = {
    "Local": lambda factory: (factory(), Local()),
    "Local, one row at a time": lambda factory: (factory(), Local(max_rows=1)),
    "Threads": lambda factory: (factory(), Threads(4)),
    "Processes": lambda factory: (None, Processes(2, factory)),
}


def train(evaluator: str, faults: Faults, steps: int = STEPS) -> dict[str, Any]:
    """One training, and what it took."""
    data, box = california_housing(42), frozen_box()
    torch.manual_seed(42)
    read_in, read_out = ffnn([8, 100, 100, 5], nn.ReLU), ffnn([5, 100, 100, 1])
    fn, place = EVALUATORS[evaluator](FlakyBox(faults))
    signs: list[float] = []
    losses: list[float] = []
    failed, ended = 0, None
    start = time.perf_counter()
    with place, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        limits = (-FAR, torch.tensor([BOUND, FAR, FAR, FAR, FAR])) if faults.limits else None
        layer = BlackBox(fn, 5, 5, limits=limits, evaluator=place, seed=0)

        def watch(_: BlackBox, step: Step) -> None:
            signs.append(float(sign_accuracy(step.g, exact_vjp(box, step.x, step.gy))))

        layer.register_step_hook(watch)
        model = nn.Sequential(read_in, layer, read_out)
        optimizer, order = torch.optim.Adam(model.parameters(), 1e-3), torch.Generator().manual_seed(42)
        try:
            for _ in range(steps):
                rows = torch.randint(len(data.x_train), (BATCH,), generator=order)
                optimizer.zero_grad()
                loss = nn.functional.huber_loss(model(data.x_train[rows]), data.y_train[rows])
                failed += int((~layer.last_ok).sum()) if layer.last_ok is not None else 0
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        except BoxError as error:  # no row of a batch was answered
            ended = str(error)
        seconds, stats = time.perf_counter() - start, layer.stats
    with torch.no_grad():
        x = read_in(data.x_test)
        x = x if limits is None else torch.minimum(x, limits[1])
        test = nn.functional.huber_loss(read_out(box(x)), data.y_test).item()
    weights = all(bool(torch.isfinite(p).all()) for p in model.parameters())
    rows_of_all = len(losses) * BATCH
    return {
        "steps": len(losses),
        "ended by": ended,
        "finite": weights and all(math.isfinite(loss) for loss in losses),
        "loss, last 100 steps": statistics.fmean(losses[-LAST:]),
        "test loss without faults": test,
        "signs, %": 100 * statistics.fmean(signs),
        "evaluations": stats.evaluations / rows_of_all,
        "asked again": stats.retried / rows_of_all,
        "forward rows without an output": failed / rows_of_all,
        "all rows without an output": stats.failures / rows_of_all,
        "seconds": seconds,
        "warnings": sorted({str(w.message) for w in caught}),
    }


def main() -> None:
    """Train, print, save."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes
    names = sys.argv[1:] or list(EVALUATORS)
    del sys.argv[1:]
    path = Path(__file__).parent.parent / "results" / "flaky.json"
    numbers: dict[str, Any] = json.loads(path.read_text())["numbers"] if path.exists() else {}
    for evaluator in names:
        for kind, faults in KINDS.items():
            numbers.setdefault(evaluator, {})[kind] = found = train(evaluator, faults)
            print(evaluator, "|", kind, {key: value for key, value in found.items() if key != "warnings"}, flush=True)
            for text in found["warnings"]:
                print("    ", text[:300])
            save("flaky", numbers)


if __name__ == "__main__":
    main()
