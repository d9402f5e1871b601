"""Is anything left behind by 200,000 evaluations through each evaluator of this machine?

python benchmarks/evaluator_memory.py
"""

import gc
from typing import Any

import psutil
import torch
from evaluator_kinds import KINDS
from record import save

from bondgrad.calling._function import RowFunction
from bondgrad.evaluators import Driver, Local


def box(x: torch.Tensor) -> torch.Tensor:
    """What is evaluated."""
    return torch.sin(x)


def usage() -> dict[str, float]:
    """Memory of this process and of those that it has started, in MiB; files, threads and processes."""
    gc.collect()
    me = psutil.Process()
    # Python's own resource tracker stays until the program ends.
    children = [child for child in me.children(recursive=True) if "resource_tracker" not in " ".join(child.cmdline())]
    memory = sum(process.memory_info().rss for process in (me, *children)) / 2**20
    return {"MiB": memory, "files": me.num_fds(), "threads": me.num_threads(), "processes": len(children)}


def measure(make: Any, evaluations: int) -> dict[str, Any]:
    """What is in use after each tenth of the evaluations, in tasks of 20 rows, and after closing."""
    points, before = torch.randn(2000, 10), usage()
    function, found = RowFunction(box, None), []
    with make() as evaluator:
        driver = Driver(evaluator)
        for request in range(evaluations // 2000):
            driver.ask(function, points, pairs=True)
            if (request + 1) % (evaluations // 20000) == 0:
                found.append(usage())
        made = driver.record.evaluations
    return {"evaluations": made, "before": before, "after each tenth": found, "after closing": usage()}


def main() -> None:
    """Measure, print, save."""
    torch.set_num_threads(1)
    measure(lambda: Local(max_rows=20), 20000)  # what the first use of torch takes for good
    kinds: dict[str, Any] = {"Local": lambda: Local(max_rows=20)}
    kinds |= {name: lambda make=make: make(2, max_rows=20) for name, make in KINDS.items()}
    numbers = {}
    for name, make in kinds.items():
        numbers[name] = measure(make, 200_000)
        tenths = numbers[name]["after each tenth"]
        growth = tenths[-1]["MiB"] - tenths[1]["MiB"]
        print(name, f"{growth:+.1f} MiB from the second tenth to the last;", numbers[name]["after closing"], flush=True)
    save("evaluator_memory", numbers)


if __name__ == "__main__":
    main()
