"""A network with a noisy quantum-dot device in the loop: the paper's QR experiment, on California Housing.

    python benchmarks/quantum_reservoir.py [--epochs 3]

Read-in 8-100-100-40, one device used for four groups of ten gates, read-out 8-100-100-1; batch 64, Adam, Huber loss.
The network learns from noisy readings and is tested with them. Beside it: the same device without its troubles, its
smooth copy Rockmelon, and no reservoir at all (read-in 8-100-100-8). Runs are spread over the cores, or share a GPU.
"""

import multiprocessing
import os
import sys
from typing import Any

import torch
from record import save
from torch import Tensor, nn

from bondgrad import BlackBox, Step, sign_accuracy
from bondgrad.data import california_housing
from bondgrad.metrics import exact_vjp
from bondgrad.networks import ffnn
from bondgrad.reservoirs import Instrument, QuantumDotArray, Rockmelon, Tile

GROUPS, BATCH, SEEDS = 4, 64, (42, 63, 14)
TROUBLES: dict[str, Any] = {"noise": 0.02, "drift": 1e-3, "hysteresis": 0.02, "ramp": 100.0, "settle": 1e-3}
METHODS = ("no reservoir", "Rockmelon", "device", "device, AD", "bench", "bench, bond", "bench, bond, told")


def train(method: str, seed: int, epochs: int) -> dict[str, Any]:
    """One run."""
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = california_housing(seed)
    x_train, y_train, x_test, y_test = (t.to(device) for t in (data.x_train, data.y_train, data.x_test, data.y_test))
    torch.manual_seed(seed)
    kind, _, how = method.partition(", ")
    width = 8 if kind == "no reservoir" else 10 * GROUPS
    read_in, read_out = ffnn([8, 100, 100, width], nn.ReLU).to(device), ffnn([8, 100, 100, 1]).to(device)
    dots = QuantumDotArray()
    bench = Instrument(dots, limits=dots.limits, seed=seed, **(TROUBLES if kind == "bench" else {}))
    exact = Tile(dots, GROUPS).to(device)
    box: nn.Module = nn.Identity()
    signs: list[Tensor] = []
    if kind == "Rockmelon":
        exact = Rockmelon(GROUPS).to(device)
        box = BlackBox(exact, width, limits=dots.limits, seed=seed)
    elif how == "AD":
        box = nn.Sequential(nn.Hardtanh(*dots.limits), exact)
    elif kind in ("device", "bench"):
        policy = "bond" if how.startswith("bond") else "calibrated"
        noise = TROUBLES["noise"] * 3**0.5 if how.endswith("told") else None  # the half-width of even noise
        box = BlackBox(Tile(bench, GROUPS), width, limits=dots.limits, policy=policy, noise=noise, seed=seed)
    box = box.to(device)
    if isinstance(box, BlackBox):

        def look(_: BlackBox, step: Step) -> None:
            signs.append(sign_accuracy(step.g, exact_vjp(exact, step.x, step.gy)))

        box.register_step_hook(look)
    model = nn.Sequential(read_in, box, read_out)
    optimizer = torch.optim.Adam([*read_in.parameters(), *read_out.parameters()], lr=1e-3)
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for rows in torch.randperm(len(x_train), generator=order).split(BATCH):
            loss = nn.functional.huber_loss(model(x_train[rows]), y_train[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    spent, hours = bench.readings, bench.seconds / 3600
    with torch.no_grad():
        test_loss = float(nn.functional.huber_loss(model.eval()(x_test), y_test))
    return {
        "method": method,
        "seed": seed,
        "test_loss": test_loss,
        "signs": float(torch.stack(signs).nanmean()) if signs else None,
        "readings": spent if kind in ("device", "bench") and how != "AD" else None,
        "hours_on_the_bench": hours if kind == "bench" else None,
    }


def main(epochs: int) -> None:
    """All runs, side by side."""
    runs = [(method, seed, epochs) for method in reversed(METHODS) for seed in SEEDS]
    torch.multiprocessing.set_start_method("spawn")
    numbers = []
    with multiprocessing.Pool(min(8, os.cpu_count() or 1)) as pool:
        for result in pool.imap_unordered(_run, runs):
            numbers.append(result)
            print(result, flush=True)
    numbers.sort(key=lambda n: (METHODS.index(n["method"]), SEEDS.index(n["seed"])))
    save(
        "quantum_reservoir", {"epochs": epochs, "groups": GROUPS, "batch": BATCH, "troubles": TROUBLES, "runs": numbers}
    )


def _run(run: tuple[str, int, int]) -> dict[str, Any]:
    return train(*run)


if __name__ == "__main__":
    main(int(sys.argv[2]) if "--epochs" in sys.argv else 3)
