"""What structure saves: modular boxes, patterns that are found, and a dependency that wakes late.

    python benchmarks/structures.py [cpu|cuda]

On a GPU the modular boxes only, also in captured steps. On a CPU all of it, and two pictures: results/structures.png,
the patterns as they were found with the inputs that move together, and results/structures_late.png.
"""

import copy
import functools
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import torch
from boxes import Parallel
from record import save
from torch import Tensor, nn

import bondgrad
from bondgrad.data import california_housing
from bondgrad.metrics import exact_vjp
from bondgrad.networks import ffnn
from bondgrad.reservoirs import Rockmelon
from bondgrad.structure import Blocks, colour, detect, lower_bound, plot

RESULTS = Path(__file__).parent.parent / "results"
D = 500
NOISE = 1e-3


def gradient(layer: Callable[[Tensor], Tensor], x: Tensor, gy: Tensor) -> Tensor:
    """At x, for gy."""
    at = x.clone().requires_grad_()
    return torch.autograd.grad(layer(at), at, gy)[0]


def relative(g: Tensor, reference: Tensor) -> float:
    """Norm of the difference over norm."""
    return float((g - reference).norm() / reference.norm())


def modular(
    name: str, box: nn.Module, blocks: Blocks, d: int, d_out: int, batch: int, device: str
) -> list[dict[str, Any]]:
    """One gradient: dense, with the blocks given, and with the blocks found out."""
    torch.manual_seed(0)
    box = box.to(device)
    x, gy = torch.randn(batch, d, device=device), torch.randn(batch, d_out, device=device)
    exact = exact_vjp(box.requires_grad_(False), x, gy)
    rows = []
    for structure in ("dense", blocks, "auto"):
        layer = bondgrad.BlackBox(box, d, d_out, policy="bond", structure=structure, seed=0).to(device)
        _, first_seconds = timed(layer, x, gy)
        first = layer.stats.evaluations
        seconds, spent = [], []
        for _ in range(1 if structure == "dense" else 5):
            before = layer.stats.evaluations
            g, took = timed(layer, x, gy)
            seconds.append(took)
            spent.append(layer.stats.evaluations - before)
        per_row = min(spent) / batch - 1  # now and then there is a look on top
        rows.append(
            {
                "box": name,
                "structure": str(structure),
                "batch": batch,
                "evaluations_a_row": per_row,
                "ms": 1e3 * min(seconds),
                "first_step_ms": 1e3 * first_seconds,
                "found_out_with": first - round((per_row + 1) * batch),
                "difference_from_dense": difference_from_dense(box, structure, d, d_out),
                "error": relative(g, exact),
                "sign_accuracy": float(bondgrad.sign_accuracy(g, exact)),
            }
        )
        if device == "cuda":
            graphed = bondgrad.GraphedStep(functools.partial(gradient, layer), layer)
            rows[-1]["captured_ms"] = 1e3 * min(timed(graphed, x, gy)[1] for _ in range(30))
        print(rows[-1], flush=True)
    by_ad = functools.partial(gradient, box)
    exact_ms = 1e3 * min(timed(by_ad, x, gy)[1] for _ in range(10))
    return [row | {"exact_ms": exact_ms} for row in rows]


def timed(work: Callable[..., Tensor], x: Tensor, gy: Tensor) -> tuple[Tensor, float]:
    """A gradient, and the seconds it took."""
    if not isinstance(work, (functools.partial, bondgrad.GraphedStep)):
        work = functools.partial(gradient, work)
    _wait(x)
    start = time.perf_counter()
    g = work(x, gy)
    _wait(x)
    return g, time.perf_counter() - start


def _wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def difference_from_dense(box: nn.Module, structure: Any, d: int, d_out: int) -> float:
    """The largest in three steps, in float64: in float32 the box itself rounds differently in calls of other sizes."""
    box = copy.deepcopy(box).double().cpu()
    x, gy = torch.randn(2, d, dtype=torch.float64), torch.randn(2, d_out, dtype=torch.float64)
    one, other = (bondgrad.BlackBox(box, d, d_out, policy="bond", structure=s, seed=0) for s in (structure, "dense"))
    return max(relative(gradient(one, x, gy), gradient(other, x, gy)) for _ in range(3))


def patterns() -> dict[str, Tensor]:
    """[D, D] bool each."""
    generator = torch.Generator().manual_seed(0)
    i = torch.arange(D)
    blocks = torch.kron(torch.eye(D // 5), torch.ones(5, 5)).bool()
    arrow = torch.eye(D).bool()
    arrow[:, 0] = True
    both = arrow.clone()
    both[0] = True
    return {
        "shuffled blocks": blocks[torch.randperm(D, generator=generator)][:, torch.randperm(D, generator=generator)],
        "banded": (i[:, None] - i).abs() <= 2,
        "arrow (one input reaches all)": arrow,
        "arrow (and one output hears all)": both,
        "5 % at random, noise 1e-3": torch.rand(D, D, generator=generator) < 0.05,
        "dense": torch.ones(D, D).bool(),
    }


def found_patterns(axes: Any) -> list[dict[str, Any]]:
    """What `detect` makes of y = tanh(A x), A having these patterns; and the gradient from it."""
    rows = []
    for (name, pattern), ax in zip(patterns().items(), axes, strict=True):
        torch.manual_seed(1)
        a = torch.where(pattern, torch.randn(D, D), 0) / pattern.sum(1, keepdim=True).sqrt()
        sigma = NOISE if "noise" in name else 0.0

        def exact_box(x: Tensor, a: Tensor = a) -> Tensor:
            return torch.tanh(x @ a.T)

        def box(x: Tensor, a: Tensor = a, sigma: float = sigma) -> Tensor:
            return torch.tanh(x @ a.T) + sigma * torch.randn(len(x), D)

        x, gy = torch.randn(64, D), torch.randn(64, D)
        start = time.perf_counter()
        found = detect(box, x)
        seconds = time.perf_counter() - start
        exact = exact_vjp(exact_box, x, gy)
        noise = {"noise": 2 * sigma} if sigma else {}
        errors, signs = {}, {}
        for kind, structure in (("dense", "dense"), ("found", found.depends)):
            layer = bondgrad.BlackBox(box, D, D, policy="bond", structure=structure, seed=0, **noise)
            gradient(layer, x, gy)
            g = gradient(layer, x, gy)
            errors[kind], signs[kind] = relative(g, exact), float(bondgrad.sign_accuracy(g, exact))
        missed = pattern & ~found.depends
        rows.append(
            {
                "pattern": name,
                "dependencies": int(pattern.sum()),
                "groups": found.groups,
                "groups_of_the_true_pattern": int(colour(pattern).max()) + 1,
                "lower_bound": lower_bound(pattern),
                "evaluations": found.evaluations,
                "calls": found.calls,
                "seconds": seconds,
                "missed": int(missed.sum()),
                "largest_weight_missed": float(a[missed].abs().max()) if bool(missed.any()) else 0.0,
                "false_alarms": int((found.depends & ~pattern).sum()),
                "estimated_unseen": found.unseen,
                "error": errors,
                "sign_accuracy": signs,
            }
        )
        print(rows[-1], flush=True)
        plot(found, ax)
        ax.set_title(f"{name}\n{ax.get_title()}", fontsize=9)
    return rows


class Waking(nn.Module):
    """Ten modules of five, which hear one another once inputs exceed a threshold."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold, self.modular = threshold, Parallel(10)
        self.coupling = nn.Parameter(torch.randn(50, 50) * (torch.rand(50, 50) < 0.02))

    def forward(self, x: Tensor) -> Tensor:
        """[N, 50] -> [N, 50]."""
        return self.modular(x) + torch.relu(x - self.threshold) @ self.coupling.T


def late(seed: int = 0, threshold: float = 2.0, steps: int = 1500) -> dict[str, Any]:
    """Train on California Housing through a box whose modules begin to interact in the course of training."""
    torch.manual_seed(seed)
    data = california_housing(seed)
    box = Waking(threshold).requires_grad_(False)
    read_in, read_out = ffnn([8, 100, 50], nn.ReLU), ffnn([50, 100, 1])
    layers = {
        "auto": bondgrad.BlackBox(box, 50, 50, policy="bond", structure="auto", seed=seed),
        "blocks": bondgrad.BlackBox(box, 50, 50, policy="bond", structure=Blocks(5, 5), seed=seed),
    }
    auto = layers["auto"]
    optimizer = torch.optim.Adam([*read_in.parameters(), *read_out.parameters()], lr=1e-3)
    seen: list[bondgrad.Step] = []
    auto.register_step_hook(lambda _, step: seen.append(step))
    curve = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(steps):
            batch = torch.randint(len(data.x_train), (64,))
            x = read_in(data.x_train[batch])
            optimizer.zero_grad()
            nn.functional.huber_loss(read_out(auto(x)), data.y_train[batch]).backward()
            at = seen.pop()
            exact = exact_vjp(box, at.x, at.gy)
            curve.append(
                {
                    "step": step,
                    "awake": int(((at.x > threshold).any(0).float() @ (box.coupling != 0).float().T).sum()),
                    "known": int((auto.structure.depends & ~_blocks()).sum()),
                    "groups": int(colour(auto.structure.depends).max()) + 1,
                    "auto": float(bondgrad.sign_accuracy(at.g, exact)),
                    "blocks": float(bondgrad.sign_accuracy(gradient(layers["blocks"], at.x, at.gy), exact)),
                    "evaluations": auto.stats.evaluations,
                }
            )
            optimizer.step()
    awake = next(row["step"] for row in curve if row["awake"] > 0)
    phases = [["before", 0, awake], ["while they wake", awake, awake + 100], ["after", awake + 100, steps]]
    print(len(told), "warnings;", phases, curve[-1])
    return {"threshold": threshold, "seed": seed, "warnings": len(told), "phases": phases, "curve": curve}


def draw_late(result: dict[str, Any], ax: Any) -> None:
    """Right signs by step, and the couplings between modules."""
    curve = result["curve"]
    steps = [row["step"] for row in curve]
    for name, label in (("blocks", "fixed blocks"), ("auto", 'structure="auto"')):
        ax.plot(steps, [100 * row[name] for row in curve], label=label, linewidth=1)
    ax.set(xlabel="step of training", ylabel="right signs in %", ylim=(85, 100.5))
    right = ax.twinx()
    right.plot(steps, [row["known"] for row in curve], "k--", linewidth=1, label="couplings known (right axis)")
    right.set(ylabel="couplings between modules", ylim=(0, 60))
    lines = [*ax.get_lines(), *right.get_lines()]
    ax.legend(lines, [line.get_label() for line in lines], loc="lower right", fontsize=8)


def _blocks() -> Tensor:
    return torch.kron(torch.eye(10), torch.ones(5, 5)).bool()


def main(device: str) -> None:
    """Measure, print, save."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    torch.manual_seed(0)
    small, large = (8, 64) if device == "cpu" else (128, 128)
    rows = modular("Parallel 500/500", Parallel(), Blocks(5, 5), 500, 500, large, device)
    rows += modular("Rockmelon-shaped 600/120", Rockmelon(60), Blocks(10, 2), 600, 120, small, device)
    if device == "cuda":
        save("structures_cuda", {"modular": rows})
        return
    figure, axes = plt.subplots(2, 3, figsize=(11, 7.6), layout="constrained")
    found = found_patterns(axes.flat)
    figure.savefig(RESULTS / "structures.png", dpi=110)
    woken = late()
    figure, ax = plt.subplots(figsize=(8, 3.4), layout="constrained")
    draw_late(woken, ax)
    figure.savefig(RESULTS / "structures_late.png", dpi=110)
    save("structures", {"modular": rows, "found": found, "late": woken})


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cpu")
