"""What `bondgrad.probe` says about six boxes, each of another kind.

    python benchmarks/probe_gallery.py

Writes results/probe_gallery.json, and the report on the noisy device as a picture, results/probe.svg. The network with
TF32 needs a GPU and is left out elsewhere.
"""

import time
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import save
from rich.console import Console
from torch import Tensor, nn

import bondgrad
from bondgrad.experiments.probe import show
from bondgrad.networks import ffnn

RESULTS = Path(__file__).parent.parent / "results"
WEIGHTS = np.random.default_rng(0).normal(size=(8, 4)) / 2
SHOWN = "a noisy device"


def simulator(x: np.ndarray) -> np.ndarray:
    """[N, 8] -> [N, 4], in numpy."""
    answer: np.ndarray = np.tanh(x @ WEIGHTS.astype(x.dtype))
    return answer


def slow_script(x: Tensor) -> Tensor:
    """[N, 8] -> [N, 8], 10 ms a row."""
    time.sleep(0.01 * len(x))
    return torch.sin(x)


class Device:
    """Ten cells of two volts and one current each, read with uniform noise."""

    def __init__(self) -> None:
        self.noise = torch.Generator().manual_seed(0)

    def __call__(self, volts: Tensor) -> Tensor:
        """[N, 20] -> [N, 10]."""
        cells = volts.view(len(volts), 10, 2)
        current = torch.sin(2 * cells[:, :, 0]) * cells[:, :, 1]
        return current + 3e-3 * (2 * torch.rand(current.shape, generator=self.noise) - 1)


def boxes() -> Iterator[tuple[str, Callable[..., Any], Tensor, tuple[float, float] | None]]:
    """Name, box, typical rows, limits."""
    torch.manual_seed(0)
    yield "a numpy function", simulator, torch.randn(500, 8), None
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")
        yield "a network with TF32 on", ffnn([50, 500, 50]).cuda(), torch.randn(500, 50, device="cuda"), None
        torch.set_float32_matmul_precision("highest")
    dropout = nn.Sequential(nn.Linear(8, 100), nn.Tanh(), nn.Dropout(0.1), nn.Linear(100, 4))
    yield "a network with dropout", dropout, torch.randn(500, 8), None
    normalised = nn.Sequential(nn.Linear(8, 100), nn.BatchNorm1d(100), nn.Tanh(), nn.Linear(100, 4))
    yield "batch normalisation in training mode", normalised, torch.randn(500, 8), None
    yield "a script that takes its time", slow_script, torch.randn(500, 8), None
    yield SHOWN, Device(), torch.rand(500, 20) * 2 - 1, (-1.0, 1.0)


def main() -> None:
    """Probe, print, save."""
    found = []
    for name, fn, x, limits in boxes():
        report = bondgrad.probe(fn, x, limits=limits, seconds=30)
        print(f"{name}: {report.verdict}", flush=True)
        found.append({"box": name, **report.as_dict()})
        if name == SHOWN:
            console = Console(record=True, width=110, file=StringIO())
            show(report, console)
            svg = console.export_svg(title="bondgrad probe")
            (RESULTS / "probe.svg").write_text(svg.rstrip() + "\n")
    save("probe_gallery", found)


if __name__ == "__main__":
    main()
