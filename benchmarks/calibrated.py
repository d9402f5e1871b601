"""How close are the steps of a policy to the best? Closed-loop training on California Housing, under noise.

    python benchmarks/calibrated.py             # everything, all cores
    python benchmarks/calibrated.py 5-500-5     # only these boxes, methods, or noises; the rest stays as it was

Read-in, box, read-out as in the demo; noise uniform on [0, X] on every output; three epochs, three seeds. In the last
epoch the sign accuracy of each policy on its own trajectory is averaged. On the trajectory of `Calibrated`, 20 fixed
steps from 1e-6 to 10 (times the scale of the input, where that is not 1) are tried as well, at every second step (every
16th for 50 inputs): the gap is what the best of them, chosen afterwards, has more.
"""

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import torch
from calibrated_boxes import SCALES, TUNED, UNSEEN, WEAK, make
from record import save
from torch import Tensor, nn

from bondgrad import BlackBox, Step, sign_accuracy
from bondgrad.data import california_housing
from bondgrad.metrics import exact_vjp
from bondgrad.networks import ffnn
from bondgrad.policies import Bond, Calibrated, Fixed

SEEDS, EPOCHS, BATCH = (42, 63, 14), 3, 64
ROWS = 40_000  # entries of gradients, about, with which a fixed step is judged
NOISE = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
FEWER = (0.0, 1e-3, 1e-1)
GRID = torch.logspace(-6, 1, 20).tolist()
METHODS = ("calibrated", "bond", "bond, told", "bond, auto", "exact")


class FixedInUnits(Fixed):
    """A fixed step, in units of each input."""

    def __init__(self, step: float, unit: Tensor) -> None:
        super().__init__(step)
        self.unit = unit

    def steps(self, state: Any, batch: Any, n: int, noise: float) -> Any:
        """See `Policy.steps`."""
        steps = super().steps(state, batch, n, noise)
        return steps._replace(size=steps.size * self.unit)


def train(name: str, x_noise: float, seed: int, method: str) -> dict[str, Any]:
    """One run."""
    torch.set_num_threads(1)
    data = california_housing(seed)
    torch.manual_seed(seed)
    case = make(name)
    read_in, read_out = ffnn([8, 100, 100, case.d], nn.ReLU), ffnn([case.d_out, 100, 100, 1])
    unit = torch.ones(case.d) if case.scale is None else case.scale
    random = torch.Generator().manual_seed(seed)

    def box(x: Tensor) -> Tensor:
        y = case.answers(x)
        return y if x_noise == 0 else y + x_noise * torch.rand(y.shape, generator=random)

    policy = Calibrated() if method == "calibrated" else Bond()
    noise: Any = {"bond, told": x_noise or None, "bond, auto": "auto"}.get(method)
    rest = {"structure": case.structure, "seed": seed}
    layer = BlackBox(box, case.d, case.d_out, policy=policy, noise=noise, **rest)
    grid = [BlackBox(box, case.d, case.d_out, policy=FixedInUnits(h, unit), **rest) for h in GRID]
    signs: list[Tensor] = []
    fixed: list[list[Tensor]] = []
    own: list[Tensor] = []  # where the fixed steps were measured, too
    number, last, every = 0, 0, 1

    def look(_: BlackBox, step: Step) -> None:
        if number < last:
            return
        exact = exact_vjp(case.smooth, step.x, step.gy)
        signs.append(sign_accuracy(step.g, exact))
        if method == "calibrated" and number % every == 0:
            own.append(signs[-1])
            fixed.append([sign_accuracy(gradient(other, step), exact) for other in grid])

    layer.register_step_hook(look)
    optimizer = torch.optim.Adam([*read_in.parameters(), *read_out.parameters()], lr=1e-3)
    order = torch.Generator().manual_seed(seed)

    def into_box(rows: Tensor) -> Tensor:
        x = read_in(rows)
        return (case.squash * torch.tanh(x) if case.squash else x) * unit

    def with_exact_gradient(x: Tensor) -> Tensor:
        y = case.smooth(x)
        return y + (box(x.detach()) - y).detach()

    batches = -(-len(data.x_train) // BATCH)
    every = max(1, round(batches * BATCH * case.d / ROWS))
    last = (EPOCHS - 1) * batches
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(data.x_train), generator=order).split(BATCH):
            x = into_box(data.x_train[rows])
            y = with_exact_gradient(x) if method == "exact" else layer(x)
            loss = nn.functional.huber_loss(read_out(y), data.y_train[rows])
            optimizer.zero_grad()
            (case.loss_scale * loss).backward()
            optimizer.step()
            number += 1
    with torch.no_grad():
        predicted = read_out(case.smooth(into_box(data.x_test)))
        test_loss = float(nn.functional.huber_loss(predicted, data.y_test))
    result: dict[str, Any] = {"box": name, "noise": x_noise, "seed": seed, "method": method, "test_loss": test_loss}
    result["signs"] = 100 * float(torch.stack(signs).nanmean()) if signs else 100.0
    result["evaluations"] = layer.stats.evaluations
    if fixed:
        means = 100 * torch.tensor(fixed).nanmean(0)
        result["best_fixed"], result["best_step"] = float(means.max()), GRID[int(means.argmax())]
        result["gap"] = result["best_fixed"] - 100 * float(torch.stack(own).nanmean())
    return result


def gradient(layer: BlackBox, step: Step) -> Tensor:
    """By another layer, at the same rows."""
    with torch.enable_grad():
        x = step.x.detach().requires_grad_()
        return torch.autograd.grad(layer(x), x, step.gy)[0]


def main() -> None:
    """All runs, those that take longest first."""
    everything = [*TUNED, *UNSEEN, *SCALES, *WEAK]
    boxes = [name for name in sys.argv[1:] if name in everything] or everything
    methods = [name for name in sys.argv[1:] if name in METHODS] or METHODS
    noises = [float(word) for word in sys.argv[1:] if word not in (*everything, *METHODS)] or NOISE
    del sys.argv[1:]  # together with what was measured before, the result is that of the command without arguments
    runs = [
        (name, noise, seed, method)
        for name in sorted(boxes, key=lambda name: "50" not in name)
        for noise in (FEWER if name in SCALES else NOISE)
        if noise in noises
        for seed in SEEDS
        for method in methods
    ]
    numbers = {key(n): n for n in earlier()}  # rows stay as they were until they are measured again
    torch.multiprocessing.set_start_method("spawn")
    with multiprocessing.Pool(os.cpu_count()) as pool:
        for done, result in enumerate(pool.imap_unordered(_run, runs), 1):
            numbers[key(result)] = result
            if "gap" in result:
                print(
                    f"{done:4d}/{len(runs)}  {result['box']:20s} {result['noise']:6.0e}  {result['seed']:3d}  "
                    f"signs {result['signs']:7.3f}  gap {result['gap']:+.3f}  test loss {result['test_loss']:.3f}",
                    flush=True,
                )
                save("calibrated", in_order(list(numbers.values())))
    save("calibrated", in_order(list(numbers.values())))


def key(result: dict[str, Any]) -> tuple[Any, ...]:
    """Which run a result is of."""
    return result["box"], result["noise"], result["seed"], result["method"]


def in_order(numbers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By box, noise, seed and method."""
    boxes = [*TUNED, *UNSEEN, *SCALES, *WEAK]
    return sorted(numbers, key=lambda n: (boxes.index(n["box"]), n["noise"], SEEDS.index(n["seed"]), n["method"]))


def earlier() -> list[dict[str, Any]]:
    """What was measured before."""
    path = Path(__file__).parent.parent / "results" / "calibrated.json"
    return json.loads(path.read_text())["numbers"] if path.exists() else []


def _run(run: tuple[str, float, int, str]) -> dict[str, Any]:
    return train(*run)


if __name__ == "__main__":
    main()
