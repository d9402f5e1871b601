"""How should a batch of gradients become one per input? Sign accuracy of the three ways, by number of inputs.

    python benchmarks/reductions.py [cpu|cuda]

California Housing through a frozen d-500-d tanh network, read-in 8-100-100-d, read-out d-100-100-1, batch 64, one
epoch, three seeds. With the steps kept within reason, as by default, and with the paper's formulas to the letter; and
how often those had their lower bound above the upper.
"""

import math
import statistics
import sys

import torch
from record import save
from torch import nn

from bondgrad import BlackBox, Step, sign_accuracy
from bondgrad.data import california_housing
from bondgrad.metrics import exact_vjp
from bondgrad.networks import ffnn
from bondgrad.policies import Bond

SEEDS = (42, 63, 14)


def train(width: int, policy: Bond, seed: int, device: str) -> tuple[float, float]:
    """Mean sign accuracy, and the fraction of bounds in the wrong order."""
    data = california_housing(seed)
    torch.manual_seed(seed)
    read_in, box, read_out = ffnn([8, 100, 100, width], nn.ReLU), ffnn([width, 500, width]), ffnn([width, 100, 100, 1])
    model = nn.Sequential(read_in, BlackBox(box, width, policy=policy, seed=seed), read_out).to(device)
    signs: list[torch.Tensor] = []
    crossed: list[torch.Tensor] = []

    def look(layer: BlackBox, step: Step) -> None:
        signs.append(sign_accuracy(step.g, exact_vjp(box, step.x, step.gy)))
        stats = layer.stats
        crossed.append((stats.lower > stats.upper).float().mean())

    model[1].register_step_hook(look)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    x, y = data.x_train.to(device), data.y_train.to(device)
    for rows in torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).split(64):
        optimizer.zero_grad()
        nn.functional.huber_loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return statistics.fmean(map(float, signs)), statistics.fmean(map(float, crossed))


def main(device: str) -> None:
    """All combinations."""
    numbers = []
    for width in (5, 50, 500) if device == "cuda" else (5, 50):
        for reduce in ("sum", "mean", "mean-abs"):
            for name, max_step in (("default", None), ("to the letter", math.inf)):
                runs = [train(width, Bond(reduce=reduce, max_step=max_step), seed, device) for seed in SEEDS]
                signs, crossed = ([run[i] for run in runs] for i in (0, 1))
                numbers.append({"d": width, "reduce": reduce, "step": name, "signs": signs, "crossed": crossed})
                print(
                    f"d = {width:3d}  {reduce:9s} {name:14s} {100 * statistics.fmean(signs):8.3f} "
                    f"± {100 * statistics.stdev(signs):.3f} %   lower > upper {100 * statistics.fmean(crossed):5.1f} %",
                    flush=True,
                )
    save(f"reductions_{device}", numbers)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cpu")
