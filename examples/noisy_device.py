"""A bench device: one reading at a time, a limited range, noise, and a reading that fails now and then.

python examples/noisy_device.py
"""

import math
import warnings

import torch
from torch import nn

import bondgrad


class Device:
    """Two voltages in, two currents out."""

    def __init__(self) -> None:
        self.noise = torch.Generator().manual_seed(0)
        self.readings = 0

    def __call__(self, volts: torch.Tensor) -> torch.Tensor:
        """Read one setting, [1, 2] -> [1, 2]."""
        assert len(volts) == 1, "one reading at a time"
        assert volts.abs().max() <= 1, "this would burn the device"
        self.readings += 1
        if self.readings % 499 == 0:
            return torch.full((1, 2), math.nan)  # the amplifier was saturated
        current = torch.stack([torch.sin(2 * volts[:, 0]) * volts[:, 1], torch.cos(volts.sum(1))], 1)
        return current + 1e-3 * (2 * torch.rand(1, 2, generator=self.noise) - 1)


def main() -> None:
    """Train the network before the device and the one behind it, and say what that took."""
    torch.manual_seed(0)
    device = Device()
    box = bondgrad.BlackBox(
        device,
        in_features=2,
        limits=(-1, 1),
        evaluator=bondgrad.evaluators.Local(max_rows=1),
        seed=0,
    )
    read_in = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2), nn.Tanh())
    read_out = nn.Linear(2, 1)
    optimizer = torch.optim.Adam([*read_in.parameters(), *read_out.parameters()], lr=1e-2)
    data = torch.randn(256, 3)
    labels = (data[:, :1] * data[:, 1:2] > 0).float()
    for step in range(201):
        rows = torch.randint(256, (16,))
        current = box(read_in(data[rows]))
        read = torch.isfinite(current).all(1)  # what could not be read in the forward pass is not learnt from
        loss = nn.functional.binary_cross_entropy_with_logits(read_out(current[read]), labels[rows][read])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            stats = box.stats
            print(
                f"step {step:3d}: loss {loss.item():.3f}; {stats.evaluations} readings, {stats.failures} of them lost"
            )


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the layer says once that readings were lost; we know
        main()
