"""One BOND gradient at 500 inputs, batch 128, through a 500-500-500 tanh network: time and extra memory.

    python benchmarks/gradient_500.py [cpu|cuda]

Beside it the plain loop over inputs, two calls of the box each.
"""

import resource
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from record import save
from step_time import PlainLoop
from torch import Tensor

import bondgrad
from bondgrad.networks import ffnn

BATCH, WIDTH = 128, 500
T = TypeVar("T")


def seconds(work: Callable[[], object], repeats: int, device: str) -> float:
    """The best of several runs."""
    best = float("inf")
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def with_extra_memory(work: Callable[[], T], device: str) -> tuple[T, float]:
    """What the work gives, and by how many MiB the most memory in use exceeded what was in use before."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = work()
        return result, (torch.cuda.max_memory_allocated() - before) / 2**20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = work()
    return result, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10


def main(device: str) -> None:
    """Measure, print, save."""
    torch.manual_seed(0)
    box = ffnn([WIDTH, WIDTH, WIDTH]).to(device).requires_grad_(False)
    layer = bondgrad.BlackBox(box, WIDTH, WIDTH, policy="bond", seed=0).to(device)
    x = torch.randn(BATCH, WIDTH, device=device, requires_grad=True)
    gy = torch.randn(BATCH, WIDTH, device=device)

    def gradient(through: Callable[[Tensor], Tensor]) -> Tensor:
        (g,) = torch.autograd.grad(through(x), x, gy)
        return g

    repeats = 10 if device == "cuda" else 3
    exact = gradient(box)
    first, extra = with_extra_memory(lambda: gradient(layer), device)
    numbers = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "extra_MiB": extra,
        "sign_accuracy_of_the_first_step": float(bondgrad.sign_accuracy(first, exact)),
        "ms": 1e3 * seconds(lambda: gradient(layer), repeats, device),
        "sign_accuracy": float(bondgrad.sign_accuracy(gradient(layer), exact)),
        "plain_loop_ms": 1e3 * seconds(lambda: gradient(lambda x: PlainLoop.apply(x, box)), repeats, device),
        "exact_ms": 1e3 * seconds(lambda: gradient(box), repeats, device),
    }
    if device == "cuda":

        def gradient_at(x: Tensor, gy: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            return torch.autograd.grad(layer(x), x, gy)[0]

        graphed, at = bondgrad.GraphedStep(gradient_at, layer), x.detach()
        _, numbers["captured_extra_MiB"] = with_extra_memory(lambda: [graphed(at, gy) for _ in range(5)], device)
        numbers["captured_ms"] = 1e3 * seconds(lambda: graphed(at, gy), repeats, device)
        assert graphed.replays > 0
        numbers["captured_sign_accuracy"] = float(bondgrad.sign_accuracy(graphed(at, gy), exact))
    for name, value in numbers.items():
        print(f"{name:32s} {value if isinstance(value, str) else f'{value:.4f}'}")
    save(f"gradient_500_{device}", numbers)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cpu")
