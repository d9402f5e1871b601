"""Signs and cosines of the default layer at boxes that other people wrote, beside the best fixed step.

    python benchmarks/gallery.py                  # everything
    python benchmarks/gallery.py forest tree      # only these boxes; the rest stays as it was

Rows are drawn anew at every step, with random gradients of the loss, and the layer is used as in training. After some
steps its gradients are compared with the reference: central differences of the box without noise, over a short step;
for boxes with jumps and for those that are piecewise constant, over one standard deviation of the inputs. The fixed
step is the best of a ladder for the same box at other seeds.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from foreign_boxes import BOXES, ForeignBox
from record import save
from torch import Tensor

from bondgrad import BlackBox, sign_accuracy
from bondgrad.policies import Fixed

SEEDS, OTHER_SEEDS = (42, 63, 14), (1, 2, 3)
STEPS, MEASURED, EVERY = 160, 80, 4  # steps of training; those at the end that count; every so manieth is measured
LADDER = [2.0**k for k in (-10, -8, -6, -5, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 5)]  # in deviations


def rows_of(box: ForeignBox, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs [B, d] and a gradient of the loss [B, d_out]."""
    x = box.centre + box.deviation * torch.randn(box.rows, box.d, generator=random)
    return x, torch.randn(box.rows, box.d_out, generator=random)


def reference(box: ForeignBox, x: Tensor, gy: Tensor) -> Tensor:
    """The slopes [B, d] that a gradient should have."""
    wide, h = x.double().numpy(), box.reference_step * box.deviation
    moves = h * np.eye(box.d)[:, None]  # [d, 1, d]
    points = np.concatenate((wide + moves, wide - moves)).reshape(-1, box.d)
    y = np.asarray((box.smooth or box.answers)(points)).reshape(2, box.d, len(x), box.d_out)
    return torch.from_numpy(np.einsum("dbo,bo->bd", (y[0] - y[1]) / (2 * h), gy.double().numpy()))


def gradient(layer: BlackBox, x: Tensor, gy: Tensor) -> Tensor:
    """By a layer."""
    x = x.clone().requires_grad_()
    return torch.autograd.grad(layer(x), x, gy)[0]


def scores(g: Tensor, exact: Tensor) -> tuple[float, float]:
    """The share of right signs, where the reference has one, and the mean cosine over rows."""
    signs = float(sign_accuracy(g, exact.to(g.dtype)))
    return 100 * signs, float(torch.cosine_similarity(g.double(), exact, dim=1).mean())


def run(box: ForeignBox, seed: int, layers: dict[str, BlackBox], steps: int = STEPS) -> dict[str, list[float]]:
    """Signs and cosine of each layer, at the same rows. Fixed steps are used only where they are measured."""
    random = torch.Generator().manual_seed(seed)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in layers}
    for step in range(steps):
        x, gy = rows_of(box, random)
        measured = step >= steps - MEASURED and step % EVERY == 0
        exact = reference(box, x, gy) if measured else None
        for name, layer in layers.items():
            if exact is not None:
                found[name].append(scores(gradient(layer, x, gy), exact))
            elif not isinstance(layer.policy, Fixed):
                gradient(layer, x, gy)
    return {name: np.mean(values, 0).tolist() for name, values in found.items()}


def fixed_layer(box: ForeignBox, ratio: float) -> BlackBox:
    """With a fixed step."""
    return BlackBox(box.answers, box.d, box.d_out, policy=Fixed(ratio * box.deviation), seed=0)


def measure(name: str) -> dict[str, Any]:
    """One box."""
    box = BOXES[name]()
    ladder = [run(box, seed, {str(r): fixed_layer(box, r) for r in LADDER}, steps=MEASURED) for seed in OTHER_SEEDS]
    means = {r: np.mean([one[str(r)] for one in ladder], 0) for r in LADDER}
    by_signs = max(LADDER, key=lambda r: means[r][0])
    numbers = []
    for seed in SEEDS:
        layer = BlackBox(box.answers, box.d, box.d_out, seed=seed)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = run(box, seed, {"default": layer, "fixed": fixed_layer(box, by_signs)})
        stats = layer.stats
        numbers.append(
            {
                "seed": seed,
                **result,
                "warnings": [str(w.message) for w in caught],
                "evaluations": stats.evaluations / STEPS / box.rows,
                "step": (layer.policy_state.read(torch.device("cpu"))["step"] / box.deviation).tolist(),
            }
        )
    return {"box": name, "best_step": by_signs, "ladder": {str(r): means[r].tolist() for r in LADDER}, "runs": numbers}


def main() -> None:
    """Measure, print, save."""
    torch.set_num_threads(1)
    names = sys.argv[1:] or list(BOXES)
    del sys.argv[1:]
    path = Path(__file__).parent.parent / "results" / "gallery.json"
    done = {n["box"]: n for n in json.loads(path.read_text())["numbers"]} if path.exists() else {}
    for name in names:
        done[name] = found = measure(name)
        line = [np.mean([run[kind] for run in found["runs"]], 0) for kind in ("default", "fixed")]
        print(
            f"{name:36s} signs {line[0][0]:6.2f}  fixed({found['best_step']:.3g}) {line[1][0]:6.2f}   "
            f"cosine {line[0][1]:.3f} {line[1][1]:.3f}  evaluations a row {found['runs'][0]['evaluations']:.2f}",
            found["runs"][0]["step"] and np.round(np.median(found["runs"][0]["step"]), 4),
            {w[:60] for r in found["runs"] for w in r["warnings"]},
            flush=True,
        )
        save("gallery", [done[name] for name in BOXES if name in done])


if __name__ == "__main__":
    main()
