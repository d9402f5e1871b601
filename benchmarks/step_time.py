"""Time of one training step through the demo's box: BOND over exact differentiation, interleaved in one run.

    python benchmarks/step_time.py

Every round takes one step with each method, so that whatever else the machine does falls on all of them alike. The
plain loop is what the paper's Algorithm 1 says when written down: two calls of the box per input, a fixed step, no
policy. The bare batch is the least that any implementation must do.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from record import save
from torch import Tensor, nn

import bondgrad
from bondgrad.networks import ffnn

BATCH, STEPS, PROCESSES = 64, 500, 7


class ThroughBox(torch.autograd.Function):
    """The forward pass of both sketches below."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, box: nn.Module) -> Tensor:
        """Args: x [B, d]."""
        ctx.save_for_backward(x)
        ctx.box = box
        return box(x)


class PlainLoop(ThroughBox):
    """One input after the other, as a person would first write it."""

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, None]:
        """Args: gy [B, d_out]."""
        (x,) = ctx.saved_tensors
        g = torch.empty_like(x)
        h = 1e-2
        for i in range(x.shape[1]):
            plus, minus = x.clone(), x.clone()
            plus[:, i] += h
            minus[:, i] -= h
            g[:, i] = (gy * (ctx.box(plus) - ctx.box(minus))).sum(1) / (2 * h)
        return g, None


class Bare(ThroughBox):
    """All perturbed rows in one call, and nothing else: no policy, no checks. What batching alone can reach."""

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, None]:
        """Args: gy [B, d_out]."""
        (x,) = ctx.saved_tensors
        b, d = x.shape
        h = 1e-2
        points = x.view(b, 1, 1, d).expand(b, d, 2, d).contiguous()
        moved = points.diagonal(0, 1, 3)
        moved[:, 0] += h
        moved[:, 1] -= h
        y = ctx.box(points.view(-1, d)).view(b, d, 2, -1)
        return ((y[:, :, 0] - y[:, :, 1]) * gy.unsqueeze(1)).sum(2) / (2 * h), None


def training_step(through: Callable[[nn.Module], Callable[[Tensor], Tensor]]) -> Callable[[], None]:
    """A closure that takes one optimizer step of the demo's networks, the box replaced by `through(box)`."""
    torch.manual_seed(0)
    read_in, exact, read_out = ffnn([8, 100, 100, 5], nn.ReLU), ffnn([5, 500, 5]), ffnn([5, 100, 100, 1])
    exact.requires_grad_(False)
    box = through(exact)
    optimizer = torch.optim.Adam([*read_in.parameters(), *read_out.parameters()], lr=1e-3)
    loss = nn.HuberLoss()
    x, y = torch.randn(BATCH, 8), torch.randn(BATCH, 1)

    def step() -> None:
        optimizer.zero_grad()
        loss(read_out(box(read_in(x))), y).backward()
        optimizer.step()

    return step


def measure(steps: int) -> dict[str, float]:
    """Milliseconds of each method, one step of each in turn."""
    methods = {
        "AD": training_step(lambda box: box),
        "BOND": training_step(lambda box: bondgrad.BlackBox(box, 5, policy="bond", seed=0)),
        "calibrated": training_step(lambda box: bondgrad.BlackBox(box, 5, policy="calibrated", seed=0)),
        "BOND, fixed step": training_step(lambda box: bondgrad.BlackBox(box, 5, policy=bondgrad.policies.Fixed(0.01))),
        "batched, bare": training_step(lambda box: lambda x: Bare.apply(x, box)),
        "plain loop": training_step(lambda box: lambda x: PlainLoop.apply(x, box)),
    }
    times: dict[str, list[float]] = {name: [] for name in methods}
    for i in range(steps + 50):
        for name, step in methods.items():
            start = time.perf_counter()
            step()
            if i >= 50:  # warm-up
                times[name].append(time.perf_counter() - start)
    # Trials make some steps of "calibrated" longer than most, so it is the mean that counts, without the longest few.
    return {name: statistics.fmean(sorted(values)[: -steps // 50]) * 1e3 for name, values in times.items()}


def main() -> None:
    """Measure in several processes: where memory happens to lie makes a difference between one and the next."""
    runs = []
    for _ in range(PROCESSES):
        done = subprocess.run([sys.executable, __file__, "--once"], check=True, capture_output=True, text=True)
        runs.append(json.loads(done.stdout))
    for name in runs[0]:
        ratios = sorted(run[name] / run["AD"] for run in runs)
        ms, ratio = statistics.median(run[name] for run in runs), statistics.median(ratios)
        print(f"{name:20s} {ms:6.2f} ms   {ratio:.2f} x AD ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    save(f"step_time_{os.cpu_count()}_cores", {"steps": STEPS, "ms": runs})


if __name__ == "__main__":
    if "--once" in sys.argv:
        print(json.dumps(measure(STEPS)))
    else:
        main()
