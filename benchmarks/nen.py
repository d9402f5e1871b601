"""Network, echo state network, network, on California Housing, with the rows of a batch read as time.

    python benchmarks/nen.py [--epochs 1]

As in the paper: read-in 8-100-100-5, 5-200-5 echo state network whose state is carried from batch to batch, read-out
5-100-100-1, batch 64, Adam. Every way to the gradient trains a network of its own; signs are compared with those of the
exact gradient in every step.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from boxes import Echo
from record import save
from torch import Tensor, nn

import bondgrad
from bondgrad.data import california_housing
from bondgrad.networks import ffnn
from bondgrad.structure import Sequence

BATCH = 64
RADII = (0.5, 0.9, 1.2)
HORIZONS: tuple[int | str | None, ...] = (1, 4, 8, 16, "auto", None)
SEEDS = (42, 63, 14)


def run(
    seed: int, radius: float, horizon: int | str | None, normalize: bool, exact: bool, epochs: int
) -> dict[str, Any]:
    """Train with one way to the gradient; `exact`: by automatic differentiation."""
    data = california_housing(seed)
    torch.manual_seed(seed)
    echo = Echo(radius).requires_grad_(False)
    read_in, read_out = ffnn([8, 100, 100, 5], nn.ReLU), ffnn([5, 100, 100, 1])
    start = torch.zeros(1, echo.w.shape[0])
    estimator = bondgrad.Central(normalize_rows=normalize)
    box = bondgrad.BlackBox(
        echo, 5, 5, estimator=estimator, policy="bond", structure=Sequence(horizon), state=start, seed=seed
    )
    loss = nn.HuberLoss()
    optimizer = torch.optim.Adam([*read_in.parameters(), *read_out.parameters()], lr=1e-3)
    seen: list[bondgrad.Step] = []
    box.register_step_hook(lambda _, step: seen.append(step))
    order = torch.Generator().manual_seed(seed)
    signs, seconds, horizons = [], [], []
    state, asked = start, 0
    for _ in range(epochs):
        for rows in torch.randperm(len(data.x_train), generator=order).split(BATCH):
            before, counted = state, echo.time_steps
            clock = time.perf_counter()
            optimizer.zero_grad()
            z = read_in(data.x_train[rows])
            if exact:
                y, state = echo(z.unsqueeze(0), state)
                loss(read_out(y[0]), data.y_train[rows]).backward()
                state = state.detach()
            else:
                loss(read_out(box(z)), data.y_train[rows]).backward()
            optimizer.step()
            seconds.append(time.perf_counter() - clock)
            asked += echo.time_steps - counted
            if not exact:
                step = seen.pop()
                g, state = exact_gradient(echo, step.x, step.gy, before)
                signs.append(float(bondgrad.sign_accuracy(step.g, g)))
                horizons.append(box.structure.horizon or BATCH)
    box.eval()
    return {
        "radius": radius,
        "horizon": "exact, by AD" if exact else "all" if horizon is None else horizon,
        "normalize_rows": normalize,
        "seed": seed,
        "sign_accuracy": sum(signs) / len(signs) if signs else 1.0,
        "lowest_in_a_step": min(signs, default=1.0),
        "test_loss": test_loss(lambda x: echo(x, start)[0], read_in, read_out, loss, data),
        "evaluations_a_step": box.stats.evaluations / len(seconds),
        "time_steps_a_step": asked / len(seconds),
        "ms": 1e3 * sorted(seconds)[len(seconds) // 2],
        "horizons": sorted(set(horizons)),
        "mean_horizon": sum(horizons) / len(horizons) if horizons else 0,
    }


def exact_gradient(echo: Echo, x: Tensor, gy: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """At x [1, T, d], from this state on; and the state afterwards. Not counted."""
    counted = echo.time_steps
    at = x.clone().requires_grad_()
    y, after = echo(at, state)
    (g,) = torch.autograd.grad(y, at, gy)
    echo.time_steps = counted
    return g, after.detach()


@torch.no_grad()
def test_loss(box: Callable[[Tensor], Tensor], read_in: nn.Module, read_out: nn.Module, loss: Any, data: Any) -> float:
    """On the test set as one sequence, beginning with no memory."""
    return float(loss(read_out(box(read_in(data.x_test).unsqueeze(0))[0]), data.y_test))


def main(epochs: int) -> None:
    """Measure, print, save."""
    runs = []
    for radius in RADII:
        for seed in SEEDS:
            # Side by side, so that times can be compared.
            runs.append(run(seed, radius, None, False, True, epochs))
            for normalize in (False, True):
                for horizon in HORIZONS:
                    runs.append(run(seed, radius, horizon, normalize, False, epochs))
                    last = runs[-1]
                    print({k: round(v, 4) if isinstance(v, float) else v for k, v in last.items()}, flush=True)
    save("nen", {"epochs": epochs, "batch": BATCH, "runs": runs})


if __name__ == "__main__":
    main(int(sys.argv[2]) if "--epochs" in sys.argv else 1)
