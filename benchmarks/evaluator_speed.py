"""How much faster are several workers, what does each evaluator cost, and what does eager=True save?

    python benchmarks/evaluator_speed.py

Boxes wait, so that the number of cores does not matter. Ratios are of medians, measured in turn in one process.
"""

import statistics
import time
from typing import Any

import torch
from evaluator_kinds import KINDS, Sleeping, instant
from record import save
from torch import Tensor, nn

from bondgrad import BlackBox
from bondgrad.calling._function import RowFunction
from bondgrad.evaluators import Driver, Evaluator, Local, Threads
from bondgrad.policies import Fixed


def seconds(evaluator: Evaluator, fn: Any, rows: int, repeats: int = 3) -> float:
    """The median time of a request with so many rows, after one that starts the workers."""
    driver, function, points = Driver(evaluator), RowFunction(fn, None), torch.zeros(rows, 5)
    driver.ask(function, points[:8], pairs=True)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        driver.ask(function, points, pairs=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def speed_up(kind: str) -> dict[str, float]:
    """Of four workers over one, for a box of 50 ms a row; and the overhead on a box that takes no time."""
    found = {}
    for n in (1, 4):
        with KINDS[kind](n, max_rows=1) as evaluator:
            found[f"{n} workers, s"] = seconds(evaluator, Sleeping(0.05), 80, repeats=2 if n == 1 else 3)
    with KINDS[kind](2, max_rows=1) as evaluator:
        found["us a row, pair by pair"] = 1e6 * seconds(evaluator, instant, 2000) / 2000
    with KINDS[kind](2) as evaluator:
        found["us a row, in two tasks"] = 1e6 * seconds(evaluator, instant, 2000, repeats=9) / 2000
    found["speed-up"] = found["1 workers, s"] / found["4 workers, s"]
    return found


def ten_threads() -> dict[str, float]:
    """A box of 2 ms a row, 640 rows: the time over rows · 2 ms / 10, and over what the box itself took."""
    found = {}
    for name, max_rows in (("in ten tasks", None), ("pair by pair", 1)):
        with Threads(10, max_rows=max_rows) as evaluator:
            took = seconds(evaluator, Sleeping(0.002), 640, repeats=9)
        slept = seconds(Local(max_rows=max_rows), Sleeping(0.002), 64, repeats=9)  # as long as one thread has to do
        found |= {f"{name}, over ideal": took / (640 * 0.002 / 10), f"{name}, over one thread's share": took / slept}
    return found


class SlowReadOut(nn.Module):
    """A network after the box that takes half of the given seconds forward, and half backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds / 2

    def forward(self, y: Tensor) -> Tensor:
        """Wait, now and in the backward pass."""
        time.sleep(self.seconds)
        out = y.sum(1, keepdim=True)
        out.register_hook(lambda g: (time.sleep(self.seconds), g)[1])
        return out


def step_seconds(fn: Any, evaluator: Evaluator, eager: bool, read_out: float, batch: int) -> float:
    """The median time of a training step."""
    layer = BlackBox(fn, 5, evaluator=evaluator, eager=eager, policy=Fixed(1e-3), seed=0)
    model = nn.Sequential(nn.Linear(3, 5), layer, SlowReadOut(read_out))
    x, times = torch.randn(batch, 3), []
    for _ in range(8):
        start = time.perf_counter()
        model(x).square().mean().backward()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def eager() -> dict[str, dict[str, float]]:
    """Steps with eager=True over those without, and the least that is possible."""
    cases = {
        "20 ms a call, Local": (Sleeping(call=0.02), Local, 0.0, 16, 1 / 2),
        "200 ms a call, four threads, read-out 200 ms": (Sleeping(call=0.2), lambda: Threads(4), 0.2, 16, 2 / 3),
        "20 ms a row, four threads, gradient 200 ms, read-out 200 ms": (
            Sleeping(row=0.02), lambda: Threads(4, max_rows=1), 0.2, 4, 220 / 420
        ),
    }  # fmt: skip
    found = {}
    for name, (fn, make, read_out, batch, least) in cases.items():
        times = {}
        for ahead in (False, True):
            with make() as evaluator:
                times[ahead] = step_seconds(fn, evaluator, ahead, read_out, batch)
        found[name] = {"without, s": times[False], "eager, s": times[True], "ratio": times[True] / times[False]}
        found[name]["least possible"] = least
    return found


def main() -> None:
    """Measure, print, save."""
    torch.set_num_threads(1)
    numbers: dict[str, Any] = {"ten threads, 2 ms a row": ten_threads(), "eager": eager()}
    print(numbers, flush=True)
    numbers["workers"] = {}
    for kind in KINDS:
        numbers["workers"][kind] = speed_up(kind)
        print(kind, numbers["workers"][kind], flush=True)
    save("evaluator_speed", numbers)


if __name__ == "__main__":
    main()
