"""One gate of the quantum-dot device over its range: what a bench reads, what there is to read, and its smooth copy."""

from typing import Any

import torch

from bondgrad.reservoirs import Instrument, QuantumDotArray, Rockmelon

PANELS = ("current", "phase / rad")


def gate_sweep(gate: int, points: int, seed: int, **troubles: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    """Lines for a figure.

    Args:
        gate: Counted from 0.
        points: Voltages, from one end of the range to the other.
        seed: Of the voltages at the other gates, and of the noise.
        troubles: Of the bench, see `Instrument`.
    """
    device = QuantumDotArray()
    low, high = device.limits
    others = torch.rand(1, device.in_features, generator=torch.Generator().manual_seed(seed)) * (high - low) + low
    x = others.repeat(points, 1)
    x[:, gate] = torch.linspace(low, high, points)
    boxes = {
        "on the bench": Instrument(device, limits=device.limits, seed=seed, **troubles),
        "device": device,
        "Rockmelon": Rockmelon(1),
    }
    lines = []
    for label, box in boxes.items():
        with torch.no_grad():
            y = box(x)
        for panel, values in zip(PANELS, y.T.tolist(), strict=True):
            lines.append({"label": label, "panel": panel, "x": x[:, gate].tolist(), "y": values})
    return lines
