"""On a GPU: the demo's training step as it is and captured, over exact differentiation; and what TF32 does to signs.

    python benchmarks/gpu_step.py

Times: every round takes 20 steps of each method in turn, and the median of 30 rounds counts. Signs: California Housing
through a frozen d-500-d tanh network, batch 64, one epoch, with TF32 allowed (`torch.set_float32_matmul_precision`) for
the networks around the box, which itself is kept out of it (the default) or not (`full_precision=False`). The gradient
compared with is computed in float64.
"""

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from record import save
from torch import Tensor, nn

import bondgrad
from bondgrad.data import california_housing
from bondgrad.metrics import exact_vjp
from bondgrad.networks import ffnn

BATCH, STEPS, ROUNDS, SEED = 64, 20, 30, 42


def training_step(through: Callable[[nn.Module], nn.Module], graphed: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """The demo's networks, the box replaced by `through(box)`."""
    torch.manual_seed(0)
    read_in, exact, read_out = ffnn([8, 100, 100, 5], nn.ReLU), ffnn([5, 500, 5]), ffnn([5, 100, 100, 1])
    model = nn.Sequential(read_in, through(exact.requires_grad_(False)), read_out).cuda()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3, capturable=True)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.huber_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return bondgrad.GraphedStep(step, model, optimizer) if graphed else step


def times() -> dict[str, float]:
    """Median milliseconds of a step."""
    x, y = torch.randn(BATCH, 8, device="cuda"), torch.randn(BATCH, 1, device="cuda")
    boxes: dict[str, Callable[[nn.Module], nn.Module]] = {
        "AD": lambda box: box,
        "BOND": lambda box: bondgrad.BlackBox(box, 5, 5, policy="bond", seed=0),
    }
    methods = {
        f"{name}, {how}": training_step(box, how == "captured")
        for name, box in boxes.items()
        for how in ("eager", "captured")
    }
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for i in range(ROUNDS + 3):  # three to warm up
        for name, step in methods.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(STEPS):
                step(x, y)
            torch.cuda.synchronize()
            if i >= 3:
                seconds[name].append((time.perf_counter() - start) / STEPS)
    return {name: 1e3 * statistics.median(values) for name, values in seconds.items()}


def signs(width: int, tf32: bool, full_precision: bool) -> float:
    """Mean sign accuracy over one epoch."""
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    data = california_housing(SEED)
    torch.manual_seed(SEED)
    read_in, box, read_out = ffnn([8, 100, 100, width], nn.ReLU), ffnn([width, 500, width]), ffnn([width, 100, 100, 1])
    layer = bondgrad.BlackBox(box, width, width, policy="bond", full_precision=full_precision, seed=SEED)
    model = nn.Sequential(read_in, layer, read_out).cuda()
    exact = copy.deepcopy(box).double()
    seen: list[Tensor] = []

    def look(_: Any, step: bondgrad.Step) -> None:
        seen.append(bondgrad.sign_accuracy(step.g, exact_vjp(exact, step.x.double(), step.gy.double())))

    layer.register_step_hook(look)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    x, y = data.x_train.cuda(), data.y_train.cuda()
    for rows in torch.randperm(len(x), generator=torch.Generator().manual_seed(SEED)).split(BATCH):
        optimizer.zero_grad()
        nn.functional.huber_loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
    torch.set_float32_matmul_precision("highest")
    return float(torch.stack(seen).mean())


def main() -> None:
    """Measure, print, save."""
    ms = times()
    for name, value in ms.items():
        print(f"{name:16s} {value:6.3f} ms   {value / ms['AD, ' + name.split(', ')[1]]:.2f} x AD")
    accuracy = []
    for width in (5, 50, 500):
        row = {
            "d": width,
            "no TF32": signs(width, tf32=False, full_precision=True),
            "TF32 around": signs(width, tf32=True, full_precision=True),
            "TF32 inside": signs(width, tf32=True, full_precision=False),
        }
        print("  ".join(f"{key} {value if key == 'd' else f'{100 * value:.3f} %'}" for key, value in row.items()))
        accuracy.append(row)
    save("gpu_step", {"ms": ms, "signs": accuracy})


if __name__ == "__main__":
    main()
