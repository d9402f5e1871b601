"""A reservoir with memory: a signal goes in step by step, and the network behind it says what came three steps ago.

python examples/reservoir_in_time.py
"""

import numpy as np
import torch
from torch import nn

import bondgrad
from bondgrad.structure import Sequence

NODES, DELAY = 60, 3


class Reservoir:
    """Sixty nodes, driven by two inputs; in numpy, without a gradient."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        weights = rng.normal(size=(NODES, NODES))
        self.weights = 0.7 * weights / np.abs(np.linalg.eigvals(weights)).max()
        self.inputs = rng.normal(size=(2, NODES)) / 2

    def __call__(self, x: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sequences [N, T, 2] and the state [N, 60] they begin with -> readings [N, T, 60] and the state after."""
        readings = []
        for t in range(x.shape[1]):
            state = np.tanh(state @ self.weights + x[:, t] @ self.inputs)
            readings.append(state)
        return np.stack(readings, 1), state


def main() -> None:
    """Train the network before the reservoir and the one behind it."""
    torch.manual_seed(0)
    box = bondgrad.BlackBox(
        Reservoir(), in_features=2, structure=Sequence(horizon="auto"), state=torch.zeros(1, NODES), seed=0
    )
    model = nn.Sequential(nn.Linear(1, 2), box, nn.Linear(NODES, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    signal = torch.rand(8, 60 * 25, 1) * 2 - 1  # eight signals, in pieces of 25 time steps
    late = signal.roll(DELAY, 1)
    for i in range(60):
        now = slice(25 * i, 25 * (i + 1))
        loss = nn.functional.mse_loss(model(signal[:, now]), late[:, now])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 10 == 0 or i == 59:
            print(f"step {i:2d}   error {loss.item():.3f}   memory of {box.structure.horizon} time steps")
    print(f"{box.stats.evaluations} sequences in {box.stats.calls} calls")


if __name__ == "__main__":
    main()
