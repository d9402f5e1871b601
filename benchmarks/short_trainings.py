"""Short trainings through nine boxes, by five estimators and five policies: a checksum of the parameters of each.

    python benchmarks/short_trainings.py                # of this checkout, as JSON
    python benchmarks/short_trainings.py build/before   # compared with those of another one, bit for bit

Two checkouts whose numerical work is the same give the same checksums and numbers of evaluations.
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

ROOT = Path(__file__).parent.parent
CHECKOUT = "--checkout="  # how a process is told which one to import
STEPS, ROWS, WIDTH = 40, 16, 4


def noisy() -> Callable[[Tensor], Tensor]:
    """A box with noise of its own random numbers."""
    numbers = torch.Generator().manual_seed(1)
    return lambda x: torch.tanh(x) + 0.01 * torch.rand(x.shape, generator=numbers)


def rounded(x: np.ndarray) -> np.ndarray:
    """A box that answers in steps of 1/4096."""
    return np.round(np.sin(x) * 4096) / 4096


def carried(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """A box with a state."""
    y = torch.tanh(x + 0.5 * state)
    return y, y.mean(1, keepdim=True)


def failing(x: Tensor) -> Tensor:
    """A box that does not answer everywhere."""
    return torch.where(x > 1.5, torch.nan, x.sin())


def mixing(x: Tensor) -> Tensor:
    """A smooth box in which all outputs depend on all inputs."""
    return torch.tanh(x @ torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH))


def train(layer: nn.Module, in_time: bool) -> str:
    """The checksum of the parameters after training a small network around the layer."""
    model = nn.Sequential(nn.Linear(6, WIDTH), layer, nn.Linear(WIDTH, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for x in torch.randn(STEPS, ROWS, *((3, 6) if in_time else (6,))):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return hashlib.sha256(torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().tobytes()).hexdigest()


def trainings() -> dict[str, tuple[str, int]]:
    """The checksum and the number of evaluations of every training, with the package that is imported here."""
    from bondgrad import BlackBox, estimators, policies, structure

    boxes: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
        "smooth": (lambda: mixing, {}),
        "noisy": (noisy, {}),
        "noisy, noise measured": (noisy, {"noise": "auto"}),
        "rounded, with limits": (lambda: rounded, {"limits": (-2, 2)}),
        "failing in places": (lambda: failing, {}),
        "blocks": (lambda: torch.sin, {"structure": structure.Blocks(1, 1)}),
        "structure found": (lambda: torch.sin, {"structure": "auto"}),
        "sequences": (lambda: lambda x: x.sin().cumsum(1), {"structure": structure.Sequence()}),
        "state": (lambda: carried, {"state": torch.zeros(1, 1)}),
    }
    ways: dict[str, Callable[[], Any]] = {
        "central": estimators.Central,
        "central, normalised": lambda: estimators.Central(normalize_rows=True),
        "forward": estimators.Forward,
        "simultaneous": estimators.Simultaneous,
        "simultaneous, three directions": lambda: estimators.Simultaneous(n=3),
    }
    lengths: dict[str, Callable[[], Any]] = {
        "calibrated": policies.Calibrated,
        "bond": policies.Bond,
        "fixed": lambda: policies.Fixed(0.01),
        "gaussian": lambda: policies.Gaussian(0.01),
        "optimal": lambda: policies.Optimal(1e-6, 1.0),
    }
    found = {}
    for box, (make, options) in boxes.items():
        for way, estimator in ways.items():
            for length, policy in lengths.items():
                torch.manual_seed(0)
                layer = BlackBox(make(), WIDTH, WIDTH, estimator=estimator(), policy=policy(), seed=0, **options)
                found[f"{box}; {way}; {length}"] = train(layer, box == "sequences"), layer.stats.evaluations
    return found


def trainings_of(checkout: Path) -> dict[str, list[Any]]:
    """Those of another checkout, in a process of its own."""
    command = [sys.executable, "-W", "ignore", __file__, f"{CHECKOUT}{checkout}"]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)  # type: ignore[no-any-return]


def main() -> None:
    """Train here, or compare."""
    if len(sys.argv) == 1 or sys.argv[1].startswith(CHECKOUT):
        torch.set_num_threads(1)
        sys.path.insert(0, sys.argv[1].removeprefix(CHECKOUT) if len(sys.argv) > 1 else str(ROOT))
        print(json.dumps(trainings()))
        return
    before, after = trainings_of(Path(sys.argv[1]).resolve()), trainings_of(ROOT)
    different = [name for name in before if before[name] != after[name]]
    print(f"{len(before) - len(different)} of {len(before)} trainings are the same to the last bit")
    for name in different:
        print(f"different: {name} ({before[name][1]} evaluations, and now {after[name][1]})")


if __name__ == "__main__":
    main()
