"""Does the scale of outputs or loss matter? Sign accuracy over eight decades of one and twelve of the other.

    python benchmarks/scales.py

The demo's networks on California Housing, 300 steps of batch 64 each, with the box's output multiplied by one factor
and the loss by another. With default settings, and beside them the paper's formulas to the letter.
"""

import math
import statistics

import torch
from record import save
from torch import Tensor, nn

from bondgrad import BlackBox, Step, sign_accuracy
from bondgrad.data import california_housing
from bondgrad.metrics import exact_vjp
from bondgrad.networks import ffnn
from bondgrad.policies import Bond

STEPS, SEED = 300, 42
OUTPUT_SCALES = (1e-4, 1e-2, 1.0, 1e2, 1e4)
LOSS_SCALES = (1e-6, 1e-3, 1.0, 1e3, 1e6)
POLICIES = {"default": Bond(), "to the letter": Bond(max_step=math.inf)}


def train(policy: Bond, output_scale: float, loss_scale: float) -> dict[str, float | bool]:
    """Train for a while, and say how that went."""
    data = california_housing(SEED)
    torch.manual_seed(SEED)
    read_in, net, read_out = ffnn([8, 100, 100, 5], nn.ReLU), ffnn([5, 500, 5]), ffnn([5, 100, 100, 1])
    net.requires_grad_(False)

    def box(x: Tensor) -> Tensor:
        return net(x) * output_scale

    layer = BlackBox(box, 5, policy=policy, seed=SEED)
    signs: list[float] = []
    largest = 0.0

    def look(layer: BlackBox, step: Step) -> None:
        nonlocal largest
        largest = max(largest, float(layer.stats.step.max()))
        accuracy = float(sign_accuracy(step.g, exact_vjp(box, step.x, step.gy)))
        if not math.isnan(accuracy):
            signs.append(accuracy)

    layer.register_step_hook(look)
    parameters = [*read_in.parameters(), *read_out.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    order = torch.Generator().manual_seed(SEED)
    finite = True
    for _ in range(STEPS):
        rows = torch.randint(len(data.x_train), (64,), generator=order)
        predicted = read_out(layer(read_in(data.x_train[rows])))
        optimizer.zero_grad()
        (loss_scale * nn.functional.huber_loss(predicted, data.y_train[rows])).backward()
        finite &= all(bool(torch.isfinite(p.grad).all()) for p in parameters)
        optimizer.step()
    return {"sign_accuracy": statistics.fmean(signs), "finite": finite, "largest_step": largest}


def main() -> None:
    """All combinations."""
    numbers = []
    for name, policy in POLICIES.items():
        print(f"{name}: sign accuracy in %, largest mean step; rows: output scale, columns: loss scale")
        print("        " + "".join(f"{scale:>20.0e}" for scale in LOSS_SCALES))
        for output_scale in OUTPUT_SCALES:
            cells = []
            for loss_scale in LOSS_SCALES:
                result = train(policy, output_scale, loss_scale)
                numbers.append({"policy": name, "output_scale": output_scale, "loss_scale": loss_scale, **result})
                mark = "" if result["finite"] else " NaN!"
                cells.append(f"{100 * result['sign_accuracy']:9.3f} ({result['largest_step']:.0e}){mark}")
            print(f"{output_scale:8.0e}" + "".join(f"{cell:>20s}" for cell in cells), flush=True)
    save("scales", numbers)


if __name__ == "__main__":
    main()
