"""Gradients through every reservoir, with the structure that it declares; and how fast the quantum-dot array reads.

    python benchmarks/reservoirs.py            # on the CPU
    python benchmarks/reservoirs.py cuda

The paper's sizes. Fresh rows in every step, batch 64 (the echo state network: one sequence of 64 time steps); right
signs are averages over all steps but the first ten. Times are the best of several, for one gradient.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from record import save
from torch import Tensor

from bondgrad import BlackBox, sign_accuracy
from bondgrad.metrics import exact_vjp
from bondgrad.reservoirs import (
    EchoState,
    Fixed,
    HamiltonianEvolution,
    OrthogonalKernel,
    Parallel,
    Polynomial,
    QuantumDotArray,
    Rockmelon,
    SpringChain,
    Tile,
)

BATCH, STEPS, FIRST = 64, 40, 10
RESERVOIRS: dict[str, Callable[[], Any]] = {
    "EchoState(5, 200, 5)": lambda: EchoState(5, 200, 5, seed=0),
    "Fixed(5, 500, 5)": lambda: Fixed(5, 500, 5, seed=0),
    "Fixed(500, 500, 500)": lambda: Fixed(500, 500, 500, seed=0),
    "Parallel(100, 5, 100, 5)": lambda: Parallel(100, 5, 100, 5, seed=0),
    "Rockmelon(60)": lambda: Rockmelon(60),
    "Tile(QuantumDotArray(), 6)": lambda: Tile(QuantumDotArray(), 6),
    "Polynomial(50, 50)": lambda: Polynomial(50, 50, seed=0),
    "OrthogonalKernel(50, 50)": lambda: OrthogonalKernel(50, 50, seed=0),
    "Tile(HamiltonianEvolution(5), 10)": lambda: Tile(HamiltonianEvolution(5, seed=0), 10),
    "Tile(SpringChain(5), 10)": lambda: Tile(SpringChain(5), 10),
}


def gradient(layer: Callable[[Tensor], Tensor], x: Tensor, gy: Tensor) -> Tensor:
    """By the layer."""
    at = x.clone().requires_grad_()
    return torch.autograd.grad(layer(at), at, gy)[0]


def through(name: str, policy: str, device: str) -> dict[str, Any]:
    """Right signs, evaluations and time of a gradient."""
    box = RESERVOIRS[name]().to(device)
    in_time = name.startswith("EchoState")
    layer = BlackBox(box, box.in_features, policy=policy, seed=0).to(device)
    random = torch.Generator().manual_seed(0)
    shape = (1, BATCH) if in_time else (BATCH,)

    def draw(d: int) -> Tensor:
        return torch.randn(*shape, d, generator=random).to(device)

    signs, seconds, exact_seconds = [], [], []
    for _ in range(STEPS):
        x, gy = draw(box.in_features), draw(box.out_features)
        clock = _now(device)
        exact = gradient(box, x, gy) if in_time else exact_vjp(box, x, gy)
        exact_seconds.append(_now(device) - clock)
        clock = _now(device)
        g = gradient(layer, x, gy)
        seconds.append(_now(device) - clock)
        signs.append(float(sign_accuracy(g, exact)))
    return {
        "reservoir": name,
        "policy": policy,
        "in_features": box.in_features,
        "structure": str(layer.structure),
        "signs": sum(signs[FIRST:]) / len(signs[FIRST:]),
        "evaluations_a_row": layer.stats.evaluations / STEPS / (1 if in_time else BATCH),
        "ms": 1e3 * min(seconds),
        "exact_ms": 1e3 * min(exact_seconds),
    }


def readings(device: str) -> dict[str, Any]:
    """How many a second the quantum-dot array gives."""
    n = 1_000_000 if device == "cuda" else 20_000
    dots = QuantumDotArray().to(device)
    low, high = dots.limits
    x = torch.rand(n, 10, generator=torch.Generator().manual_seed(0)).to(device) * (high - low) + low
    seconds = []
    for _ in range(3):
        clock = _now(device)
        dots(x)
        seconds.append(_now(device) - clock)
    return {"readings": n, "seconds": min(seconds)}


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main(device: str) -> None:
    """Measure, print, save."""
    result: dict[str, Any] = {"readings": readings(device), "gradients": []}
    print(result["readings"], flush=True)
    for name in RESERVOIRS:
        for policy in ("calibrated", "bond"):
            result["gradients"].append(through(name, policy, device))
            print(
                {k: round(v, 4) if isinstance(v, float) else v for k, v in result["gradients"][-1].items()}, flush=True
            )
    save(f"reservoirs_{device}", result)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cpu")
