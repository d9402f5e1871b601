"""How many workers can one driver keep busy?

    python benchmarks/evaluator_scale.py

Measured, by rows per task and inputs, on boxes that take no time: the processor time that one driver needs for a task,
and the time from one task of a worker to its next one. Simulated from both: a driver that hands out one task after the
other to N workers whose rows take 1 ms, 50 ms or 1 s on average, each row between a third and three times of that, so
that latencies vary about tenfold; batch 128, the gradient of central differences. What comes out is the share of their
time that workers are busy, and the number of workers up to which that is 90 %. The scheduler of Dask runs in the
process of the driver here, and its processor time counts as the driver's.
"""

import heapq
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from evaluator_kinds import KINDS, instant
from record import save

from bondgrad.calling._function import RowFunction
from bondgrad.evaluators import Driver

BATCH = 128
INPUTS = (10, 500)
LATENCIES = (0.001, 0.05, 1.0)  # seconds a row
ROWS = (2, 20, 200)  # in a task
WORKERS = [2**k for k in range(15)]


class Cost(NamedTuple):
    """What a task costs besides the box."""

    driver: float  # seconds of processor time in the process that trains
    gap: float  # seconds from the end of a task to the start of the next one of the same worker


def task_costs(kind: str) -> dict[str, Cost]:
    """What a task costs on a box that takes no time, with two workers, by inputs and rows of a task."""
    found = {}
    for d in INPUTS:
        for rows in ROWS:
            tasks = 300 if rows < 200 else 60
            with KINDS[kind](2, max_rows=rows) as evaluator:
                driver, function = Driver(evaluator), RowFunction(instant, None)
                points = torch.zeros(tasks * rows, d)
                driver.ask(function, points[: 4 * rows], pairs=True)
                times, used = [], []
                for _ in range(3):
                    start, busy = time.perf_counter(), time.process_time()
                    driver.ask(function, points, pairs=True)
                    times.append(time.perf_counter() - start)
                    used.append(time.process_time() - busy)
            found[f"d={d}, {rows} rows"] = Cost(min(used) / tasks, 2 * min(times) / tasks)
    return found


def busy_share(workers: int, tasks: int, rows: int, latency: float, cost: Cost) -> float:
    """The busy share of workers in one request that one driver hands out."""
    random = np.random.default_rng(0)
    factors = np.exp(random.uniform(-math.log(10) / 2, math.log(10) / 2, (tasks, min(rows, 50)))).mean(1)
    durations = factors / factors.mean() * latency * rows
    free = [0.0] * workers  # when each worker is free
    heapq.heapify(free)
    clock = end = 0.0
    for duration in durations:
        clock = max(clock + cost.driver, heapq.heappop(free))
        heapq.heappush(free, clock + duration + cost.gap)
        end = max(end, clock + duration)
    return float(durations.sum() / (end * workers))


def most_workers(rows: int, d: int, latency: float, cost: Cost) -> int:
    """The largest number of workers, of powers of two, that are busy for 90 % of the time; 0: not even one."""
    tasks = max(1, 2 * d * BATCH // rows)
    able = [n for n in WORKERS if n <= tasks and busy_share(n, tasks, rows, latency, cost) >= 0.9]
    return max(able, default=0)


def plot(numbers: dict[str, Any], path: Path) -> None:
    """Busy shares by workers, for the three latencies, one curve for each evaluator."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(INPUTS), len(LATENCIES), figsize=(11, 6), sharex=True, sharey=True)
    for row, d in zip(axes, INPUTS, strict=True):
        for axis, latency in zip(row, LATENCIES, strict=True):
            for kind in KINDS:
                cost = Cost(*numbers[kind]["costs of a task, s"][f"d={d}, 2 rows"])
                tasks = d * BATCH
                known = [n for n in WORKERS if n <= tasks]
                shares = [100 * busy_share(n, tasks, 2, latency, cost) for n in known]
                axis.plot(known, shares, label=kind)
            axis.axhline(90, color="grey", lw=0.5)
            axis.set_xscale("log", base=2)
            axis.set_title(f"{d} inputs, {latency * 1000:g} ms a row")
    for axis in axes[-1]:
        axis.set_xlabel("workers")
    for axis in axes[:, 0]:
        axis.set_ylabel("busy, %")
    axes[0, 0].legend()
    figure.suptitle("Workers that one driver keeps busy, one pair of rows in a task (simulated)")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    """Measure, simulate, plot, save."""
    torch.set_num_threads(1)
    numbers: dict[str, Any] = {}
    for kind in KINDS:
        measured = task_costs(kind)
        most = {
            f"d={d}, {rows} rows, {latency * 1000:g} ms": most_workers(
                rows, d, latency, measured[f"d={d}, {rows} rows"]
            )
            for d in INPUTS
            for rows in ROWS
            for latency in LATENCIES
        }
        numbers[kind] = {"costs of a task, s": measured, "workers at 90 %": most}
        print(kind, numbers[kind], flush=True)
    plot(numbers, Path(__file__).parent.parent / "results" / "evaluator_scale.png")
    save("evaluator_scale", numbers)


if __name__ == "__main__":
    main()
