"""Train through a simulator written in numpy: find the launch that lands a ball on a target, in wind.

The simulator integrates a ball's flight, one row per throw. It has no gradient, limits on what may be asked of it, and
an input that is given rather than learnt, the wind: that is a context.

    python examples/numpy_simulator.py
"""

import numpy as np
import torch
from torch import nn

import bondgrad


def simulator(launch: np.ndarray, wind: np.ndarray) -> np.ndarray:
    """Angle and speed [N, 2], wind [N, 1] -> where and when the ball lands [N, 2]."""
    angle, speed = launch.astype(np.float64).T
    vx, vy = speed * np.cos(angle), speed * np.sin(angle)
    x, y, t = np.zeros_like(vx), np.zeros_like(vx), np.zeros_like(vx)
    for _ in range(400):
        flying = y >= 0
        step = np.where(flying, 0.01, 0.0)
        drag = 0.02 * np.hypot(vx - wind[:, 0], vy)
        vx, vy = vx - step * drag * (vx - wind[:, 0]), vy - step * (9.81 + drag * vy)
        x, y, t = x + step * vx, y + step * vy, t + step
    back = y / np.where(vy == 0, -1.0, vy)  # how long ago the ground was crossed: without it, landings come in steps
    return np.stack([x - back * vx, t - back], axis=1)


def main() -> None:
    """Train a network that chooses the launch from target and wind."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 2), nn.Tanh())
    box = bondgrad.BlackBox(simulator, in_features=2, limits=([0.2, 4.0], [1.3, 16.0]), seed=0)
    centre, reach = torch.tensor([0.75, 10.0]), torch.tensor([0.5, 5.5])
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for step in range(301):
        target, wind = 2 + 8 * torch.rand(64, 1), 4 * torch.rand(64, 1) - 2
        launch = centre + reach * network(torch.cat([target / 10, wind / 4], 1))
        landing = box(launch, wind)
        loss = (landing[:, :1] - target).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step:3d}: misses by {loss.item():.2f} m; {box.stats.evaluations} throws so far")


if __name__ == "__main__":
    main()
