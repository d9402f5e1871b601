"""Signs and cosines of the default layer at boxes that other people wrote, beside the best fixed step.

    python benchmarks/gallery.py                    # everything
    python benchmarks/gallery.py forest contacts    # only these boxes; the rest stays as it was

Rows are drawn anew at every step, with random gradients of the loss, and the layer is used as in training. After some
steps its gradients are compared with the references that foreign_boxes.py names. The fixed step is the best of a ladder
for the same box at other seeds, once for each reference.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from foreign_boxes import BOXES, ForeignBox
from record import save
from references import difference, smoothed
from torch import Tensor

from bondgrad import BlackBox, sign_accuracy
from bondgrad.policies import Fixed

SEEDS, OTHER_SEEDS = (42, 63, 14), (1, 2)
LADDER = [2.0**k for k in (-10, -8, -6, -4, -3, -2, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 5)]  # in deviations


class Course(NamedTuple):
    """How long a layer is used, and when it is measured."""

    steps: int = 160  # of training
    measured: int = 80  # of these, at the end, those that count
    every: int = 4  # so manieth of them is measured
    smoothed_every: int = 16  # likewise, for boxes with jumps, against smoothed slopes


Scores = dict[str, dict[str, list[float]]]  # reference -> layer -> signs in %, mean cosine over rows


def rows_of(box: ForeignBox, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs [B, d] and a gradient of the loss [B, d_out]."""
    x = box.centre + box.deviation * torch.randn(box.rows, box.d, generator=random)
    return x, torch.randn(box.rows, box.d_out, generator=random)


def gradient(layer: BlackBox, x: Tensor, gy: Tensor) -> Tensor:
    """By a layer."""
    x = x.clone().requires_grad_()
    return torch.autograd.grad(layer(x), x, gy)[0]


def scores(g: Tensor, exact: Tensor) -> tuple[float, float]:
    """The share of right signs, where the reference has one, and the mean cosine over rows that have a slope."""
    signs = float(sign_accuracy(g, exact.to(g.dtype)))
    cosines = torch.cosine_similarity(g.double(), exact, dim=1)
    return 100 * signs, float(cosines[exact.abs().amax(1) > 0].mean())


def run(box: ForeignBox, seed: int, layers: dict[str, BlackBox], course: Course) -> Scores:
    """Signs and cosine of each layer, at the same rows. Fixed steps are used only where they are measured."""
    random = torch.Generator().manual_seed(seed)
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for step in range(course.steps):
        x, gy = rows_of(box, random)
        references = {}
        if step >= course.steps - course.measured and step % course.every == 0:
            references["slope"] = difference(box, x, gy)
        if references and box.jumps and step % course.smoothed_every == 0:
            references["smoothed"] = smoothed(box, x, gy, seed=step)
        for name, layer in layers.items():
            if references or not isinstance(layer.policy, Fixed):
                g = gradient(layer, x, gy)
            for reference, exact in references.items():
                found.setdefault(reference, {}).setdefault(name, []).append(scores(g, exact))
    return {
        reference: {name: np.mean(values, 0).tolist() for name, values in by_layer.items()}
        for reference, by_layer in found.items()
    }


def fixed_layer(box: ForeignBox, ratio: float) -> BlackBox:
    """With a fixed step, in deviations."""
    return BlackBox(box.answers, box.d, box.d_out, policy=Fixed(ratio * box.deviation), seed=0)


def best_fixed(box: ForeignBox, seeds: tuple[int, ...], course: Course) -> tuple[dict[str, float], dict[str, Any]]:
    """For each reference the best fixed step, by signs and then by cosine, and the scores of the whole ladder."""
    ladder = [run(box, seed, {str(r): fixed_layer(box, r) for r in LADDER}, course) for seed in seeds]
    best, means = {}, {}
    for reference in ladder[0]:
        of = {r: np.mean([one[reference][str(r)] for one in ladder], 0) for r in LADDER}
        means[reference] = {str(r): of[r].tolist() for r in LADDER}
        best[reference] = max((round(of[r][0], 1), of[r][1], r) for r in LADDER)[2]
    return best, means


def one_seed(box: ForeignBox, seed: int, best: dict[str, float], course: Course) -> dict[str, Any]:
    """The default layer beside the best fixed steps, what it cost and what it warned of."""
    layer = BlackBox(box.answers, box.d, box.d_out, seed=seed)
    layers = {"default": layer, **{f"fixed for {name}": fixed_layer(box, ratio) for name, ratio in best.items()}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run(box, seed, layers, course)
    return {
        "seed": seed,
        **{name: {"default": of["default"], "fixed": of[f"fixed for {name}"]} for name, of in found.items()},
        "warnings": sorted({str(w.message) for w in caught}),
        "evaluations": layer.stats.evaluations / course.steps / box.rows,
        "step": (layer.policy_state.read(torch.device("cpu"))["step"] / box.deviation).tolist(),
    }


def measure(name: str) -> dict[str, Any]:
    """One box."""
    box = BOXES[name]()
    course = Course()
    best, ladder = best_fixed(box, OTHER_SEEDS, course._replace(steps=course.measured, every=16))
    runs = [one_seed(box, seed, best, course) for seed in SEEDS]
    kind = {"d": box.d, "rows": box.rows, "jumps": box.jumps}
    return {"box": name, **kind, "best_step": best, "ladder": ladder, "runs": runs}


def show(found: dict[str, Any]) -> None:
    """Print one box."""
    for reference, step in found["best_step"].items():
        default, fixed = (np.mean([run[reference][kind] for run in found["runs"]], 0) for kind in ("default", "fixed"))
        print(
            f"{found['box']:36s} {reference:9s} signs {default[0]:6.2f}  fixed({step:.3g}) {fixed[0]:6.2f}   "
            f"cosine {default[1]:.3f} {fixed[1]:.3f}  evaluations a row {found['runs'][0]['evaluations']:.2f}",
            np.round(np.median(found["runs"][0]["step"]), 4),
            {w[:60] for run in found["runs"] for w in run["warnings"]},
            flush=True,
        )


def main() -> None:
    """Measure, print, save."""
    torch.set_num_threads(1)
    names = sys.argv[1:] or list(BOXES)
    del sys.argv[1:]
    path = Path(__file__).parent.parent / "results" / "gallery.json"
    done = {n["box"]: n for n in json.loads(path.read_text())["numbers"]} if path.exists() else {}
    for name in names:
        done[name] = measure(name)
        show(done[name])
        save("gallery", [done[box] for box in BOXES if box in done])


if __name__ == "__main__":
    main()
