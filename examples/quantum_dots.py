"""A quantum-dot device between two networks: ten gates, noisy readings that take their time, and a task to learn.

python examples/quantum_dots.py
"""

import torch
from torch import nn

import bondgrad
from bondgrad.reservoirs import Instrument, QuantumDotArray


def main() -> None:
    """Tell points inside a ring from those outside."""
    torch.manual_seed(0)
    dots = QuantumDotArray()
    troubles = {"noise": 0.01, "hysteresis": 0.01, "drift": 1e-4, "ramp": 100.0, "settle": 1e-3}
    bench = Instrument(dots, limits=dots.limits, **troubles, seed=0)
    box = bondgrad.BlackBox(bench, in_features=10, limits=dots.limits, seed=0)
    read_in = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 10))
    read_out = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 1))
    model = nn.Sequential(read_in, box, read_out)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(301):
        x = torch.randn(32, 2)
        inside = (x.norm(dim=1, keepdim=True) < 1.2).float()
        loss = nn.functional.binary_cross_entropy_with_logits(model(x), inside)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            hours = bench.seconds / 3600
            print(f"step {step:3d}: loss {loss.item():.3f}; {bench.readings} readings, {hours:.2f} hours on the bench")


if __name__ == "__main__":
    main()
