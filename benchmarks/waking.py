"""structure="auto" where dependencies wake in the course of training: how long signs suffer, and what watching costs.

    python benchmarks/waking.py [FOLDER]

FOLDER is a checkout of an earlier version, which is measured in the same way, for comparison.

Three boxes, with and without noise, five seeds each; the policy is the default, and the loss's gradient at the outputs
is drawn anew at every step. A layer that is told the complete pattern gets the same batches: without noise it is as
good as a dense one, with noise better. Signs are behind while a mean of ten steps is more than half a point below its.
The same boxes asleep, without noise, with noise, and with noise that differs from row to row by a factor of a hundred,
run for 5,000 steps to count false alarms.
"""

import json
import multiprocessing
import os
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from boxes import Parallel
from record import save
from torch import Tensor

import bondgrad
from bondgrad.evaluators import Answer, Local, Request
from bondgrad.metrics import exact_vjp

SEEDS, STEPS, QUIET_STEPS = 5, 500, 5_000
PROCESSES = 4
MEAN, BEHIND = 10, 0.005  # steps of a mean; how much less is behind
Box = Callable[[Tensor], Tensor]


class Waking:
    """A box of d inputs and outputs at a certain step of training. `level` goes from 0, asleep, to 1, awake."""

    d, batch = 40, 16

    def __init__(self) -> None:
        self.level = 0.0

    def rows(self, generator: torch.Generator) -> Tensor:
        """A batch [B, d]."""
        return torch.randn(self.batch, self.d, generator=generator)

    def start(self, step: int) -> None:
        """Set the level for a step."""
        self.level = min(1.0, step / 100)

    def pattern(self) -> Tensor:
        """Which outputs depend on which inputs once it is awake: [d, d] bool."""
        pattern = torch.eye(self.d).bool()
        pattern[:, 0] = True
        return pattern


class Threshold(Waking):
    """An input drifts past a threshold, from where on all outputs depend on it."""

    def rows(self, generator: torch.Generator) -> Tensor:
        """See `Waking.rows`."""
        x = super().rows(generator)
        x[:, 0] += 5 * self.level
        return x

    def __call__(self, x: Tensor) -> Tensor:
        """[N, 40] -> [N, 40]."""
        return torch.tanh(x) + torch.relu(x[:, :1] - (3 if self.level > 0 else 30))


class Coupling(Waking):
    """Twelve modules of five inputs; from step 50 on, one output depends on an input of another module, too."""

    d, batch = 60, 32

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.modules = Parallel(12).requires_grad_(False)

    def start(self, step: int) -> None:
        """See `Waking.start`."""
        self.level = float(step >= 50)

    def pattern(self) -> Tensor:
        """See `Waking.pattern`."""
        pattern = torch.kron(torch.eye(12), torch.ones(5, 5)).bool()
        pattern[37, 12] = True
        return pattern

    def __call__(self, x: Tensor) -> Tensor:
        """[N, 60] -> [N, 60]."""
        y: Tensor = self.modules(x)
        where = torch.zeros(60).index_fill(0, torch.tensor(37), 1.0)
        return y + 5 * self.level * torch.sin(x[:, 12:13]) * where


class Gate(Waking):
    """A product of two inputs, which opens slowly, and then reaches half of the outputs."""

    d, batch = 20, 16

    def pattern(self) -> Tensor:
        """See `Waking.pattern`."""
        pattern = torch.eye(20).bool()
        pattern[1::2, [7, 11]] = True
        return pattern

    def __call__(self, x: Tensor) -> Tensor:
        """[N, 20] -> [N, 20]."""
        return torch.sin(x) + self.level**2 * x[:, 7:8] * x[:, 11:12] * (torch.arange(20) % 2)


class Noise:
    """Noise on the outputs of a box; with `varying`, in proportion to a power of ten between 0.1 and 10, by row."""

    def __init__(self, box: Box, sigma: float, seed: int, varying: bool = False) -> None:
        self.box, self.sigma, self.varying = box, sigma, varying
        self.random = torch.Generator().manual_seed(seed)

    def __call__(self, x: Tensor) -> Tensor:
        """[N, d] -> [N, d_out]."""
        y = self.box(x)
        size = 10 ** x[:, :1].clamp(-1, 1) if self.varying else 1.0
        return y + self.sigma * size * torch.randn(y.shape, generator=self.random)


class Counting(Local):
    """Counts evaluations by what they are for."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def evaluate(self, request: Request) -> Answer:
        """See `Evaluator.evaluate`."""
        self.counts[request.purpose] += len(request.points)
        return super().evaluate(request)


BOXES: dict[str, tuple[type[Waking], float]] = {
    "relu(x₀ - 3) on all of 40 outputs": (Threshold, 0.0),
    "the same, noise 1e-3": (Threshold, 1e-3),
    "one coupling of 12 modules": (Coupling, 0.0),
    "the same, noise 1e-3 ": (Coupling, 1e-3),
    "a gate x₇ x₁₁ that opens slowly": (Gate, 0.0),
    "the same, noise 1e-3  ": (Gate, 1e-3),
}


def gradient(layer: bondgrad.BlackBox, x: Tensor, gy: Tensor) -> Tensor:
    """At x, for gy."""
    at = x.clone().requires_grad_()
    return torch.autograd.grad(layer(at), at, gy)[0]


def watched(evaluator: Counting, searched: int) -> float:
    """The part of all evaluations, but for those of the first search, that looked at the structure."""
    looked = evaluator.counts["structure"] - searched
    return looked / (sum(evaluator.counts.values()) - searched)


def waking(kind: type[Waking], sigma: float, seed: int) -> dict[str, Any]:
    """One run: the signs of both layers, step by step."""
    torch.set_num_threads(1)
    box = kind()
    fn = Noise(box, sigma, seed) if sigma else box
    evaluator = Counting()
    auto = bondgrad.BlackBox(fn, box.d, structure="auto", evaluator=evaluator, seed=seed)
    told = bondgrad.BlackBox(fn, box.d, structure=box.pattern(), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    signs: dict[str, list[float]] = {"auto": [], "told": []}
    searched = 0
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for step in range(STEPS):
            box.start(step)
            x = box.rows(generator)
            gy = torch.randn(x.shape, generator=generator)
            exact = exact_vjp(box, x, gy)
            for name, layer in (("auto", auto), ("told", told)):
                signs[name].append(float(bondgrad.sign_accuracy(gradient(layer, x, gy), exact)))
            if step == 0:
                searched = evaluator.counts["structure"]
    behind = torch.tensor(signs["told"]) - torch.tensor(signs["auto"])
    means = behind.unfold(0, MEAN, 1).mean(1)  # of each step and those after it
    late = (means > BEHIND).nonzero().squeeze(1).tolist()
    steps = max(0, late[-1] - (late[0] + MEAN - 1) + 1) if late else 0
    return {
        "seed": seed,
        "steps": steps,
        "from": late[0] + MEAN - 1 if late else None,
        "worst": 100 * float(means.max()),
        "warnings": sum("did not have" in str(w.message) for w in heard),
        "watching": watched(evaluator, searched),
        "auto": 100 * torch.tensor(signs["auto"])[-100:].mean().item(),
        "told": 100 * torch.tensor(signs["told"])[-100:].mean().item(),
    }


def quiet(kind: type[Waking], sigma: float, varying: bool = False) -> dict[str, Any]:
    """A long run in which nothing wakes."""
    torch.set_num_threads(1)
    box = kind()
    evaluator = Counting()
    fn = Noise(box, sigma, 0, varying) if sigma else box
    layer = bondgrad.BlackBox(fn, box.d, structure="auto", evaluator=evaluator, seed=0)
    generator = torch.Generator().manual_seed(0)
    searched = 0
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for step in range(QUIET_STEPS):
            x = box.rows(generator)
            gradient(layer, x, torch.randn(x.shape, generator=generator))
            if step == 0:
                searched = evaluator.counts["structure"]
    alarms = sum("did not have" in str(w.message) for w in heard)
    return {
        "box": kind.__name__,
        "noise": sigma,
        "varying": varying,
        "alarms": alarms,
        "watching": watched(evaluator, searched),
    }


def measured(work: Callable[..., dict[str, Any]], arguments: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """The results of the work for all these arguments, with the version that is imported, in processes side by side."""
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        return pool.starmap(work, arguments, chunksize=1)


def wakings() -> list[dict[str, Any]]:
    """All runs in which dependencies wake."""
    runs = measured(waking, [(*box, seed) for box in BOXES.values() for seed in range(SEEDS)])
    found = [{"box": name.strip(), "runs": runs[i * SEEDS : (i + 1) * SEEDS]} for i, name in enumerate(BOXES)]
    for box in found:
        print(box["box"], [run["steps"] for run in box["runs"]], file=sys.stderr, flush=True)
    return found


def quiets() -> list[dict[str, Any]]:
    """All runs in which nothing wakes."""
    noises = ((0.0, False), (1e-3, False), (1e-3, True))
    return measured(quiet, [(kind, *noise) for kind in (Coupling, Threshold, Gate) for noise in noises])


def main(before: str | None) -> None:
    """Measure, save."""
    earlier = None
    if before is not None:  # beside this one
        command = [sys.executable, str(Path(__file__)), "--print"]
        earlier = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": before}, stdout=subprocess.PIPE)
    numbers: dict[str, Any] = {"quiet": quiets(), "quiet_steps": QUIET_STEPS, "now": wakings()}
    if earlier is not None:
        numbers["before"] = json.loads(earlier.communicate()[0])
        sys.argv[1:] = ["FOLDER"]  # wherever it was
    save("waking", numbers)


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        print(json.dumps(wakings()))
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else None)
