"""Does `bondgrad.check` catch wrong gradients, and only those? 200 seeded cases of each kind.

    python benchmarks/check_power.py

Boxes are drawn at random: tanh networks, waves, quadratic, linear and cubic ones, of 1 to 20 inputs, in float32 and
float64, with inputs and outputs scaled by factors from 1e-3 to 1e3. Noise is normal, in units of the spread of the
outputs. The gradient comes from a backward pass written by hand, exact but for the mistake, or from a BlackBox,
which is told the noise and has trained for ten steps.

A BlackBox steps as far as its noise asks for, so its gradient has an error of its own, in the mean over its random
steps. Cases called wrong in which that is more than the tolerance, by the exact gradient, are counted apart: there it
is true. "named" counts those of the wrong ones of which `problems` says what the mistake was, and nothing else.
"""

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from record import save
from torch import Tensor

from bondgrad import BlackBox, Step, check
from bondgrad.testing.boxes import Cubes, ExactBox, Linear, Quadratic, TanhNetwork, Waves

CASES = 200
NOISES = (0.0, 1e-6, 1e-4, 1e-2)
TOLERANCE = 0.01
FACTORS = {"3 % off": 1.03, "10 % off": 1.1, "wrong sign": -1.0}
MISTAKES = ("none", "all 3 % off", "all 10 % off", "one 3 % off", "one 10 % off", "one wrong sign", "two swapped")


def damaged(g: Tensor, mistake: str, i: int, j: int) -> Tensor:
    """The gradient g [N, d] with a mistake in all inputs, in input i, or in i and j."""
    if mistake == "none":
        return g
    if mistake == "two swapped":
        order = list(range(g.shape[1]))
        order[i], order[j] = j, i
        return g[:, order]
    which, kind = mistake.split(maxsplit=1)
    factors = torch.ones_like(g[0])
    factors[slice(None) if which == "all" else i] = FACTORS[kind]
    return g * factors


@dataclass
class Case:
    """A box, rows to check it at, and the mistake's inputs; all from one seed."""

    exact: ExactBox
    x: Tensor  # [64, d]
    in_scale: float
    out_scale: float
    sigma: float  # of the noise on the outputs
    i: int
    j: int
    random: torch.Generator

    def values(self, x: Tensor) -> Tensor:
        """The box [N, d] -> [N, d_out], with its noise."""
        y = self.out_scale * self.exact(x / self.in_scale)
        return y + self.sigma * torch.randn(y.shape, generator=self.random, dtype=y.dtype) if self.sigma else y

    def vjp(self, x: Tensor, gy: Tensor) -> Tensor:
        """Its gradient, without noise."""
        return self.exact.vjp(x / self.in_scale, gy) * (self.out_scale / self.in_scale)


def draw(seed: int, noise: float, least: int = 1) -> Case:
    """A case with at least so many inputs."""
    random = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=random))

    d, d_out = number(least, 20), number(1, 8)
    exact = (
        lambda: TanhNetwork(d, 16, d_out, seed),
        lambda: Waves(d, d_out, seed),
        lambda: Quadratic(d, d_out, seed),
        lambda: Linear(d, d_out, seed),
        lambda: Cubes(d),
    )[number(0, 4)]()
    in_scale, out_scale = (10.0 ** (6 * float(torch.rand((), generator=random)) - 3) for _ in range(2))
    dtype = (torch.float32, torch.float64)[number(0, 1)]
    x = in_scale * torch.randn(64, d, generator=random, dtype=dtype)
    spread = float(exact(x / in_scale).std(0).square().mean().sqrt()) * out_scale
    i = number(0, d - 1)
    j = (i + number(1, d - 1)) % d if d > 1 else i
    return Case(exact, x, in_scale, out_scale, noise * spread, i, j, random)


def by_hand(case: Case, mistake: str) -> Callable[[Tensor], Tensor]:
    """The box with a backward pass of its own."""

    class ByHand(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return case.values(x)

        @staticmethod
        def backward(ctx: Any, gy: Tensor) -> Tensor:
            return damaged(case.vjp(ctx.saved_tensors[0], gy), mistake, case.i, case.j)

    return ByHand.apply


def black_box(case: Case, estimator: str, seed: int) -> BlackBox:
    """A layer that was told its noise, and has taken a few steps of training."""
    noise = math.sqrt(3) * case.sigma or None  # the half-width of what has this standard deviation
    layer = BlackBox(case.values, case.x.shape[1], estimator=estimator, policy="bond", noise=noise, seed=seed)
    for _ in range(10):
        layer(case.x.clone().requires_grad_()).sum().backward()
    return layer


def own_error(case: Case, layer: BlackBox, step: Step) -> float:
    """The largest relative error of any input's gradient, without noise, in the mean over steps.

    At the rows of x and with the gy of a step that `check` took.
    """
    sigma, case.sigma = case.sigma, 0.0
    layer.eval()
    rows, gy, times = step.x[:16].detach(), step.gy[:16], 256
    x = rows.repeat(times, 1).requires_grad_()
    (g,) = torch.autograd.grad(layer(x), x, gy.repeat(times, 1))
    exact = case.vjp(rows, gy)
    case.sigma = sigma
    return float(((g.view(times, *rows.shape).mean(0) - exact).norm(dim=0) / exact.norm(dim=0)).max())


def named(case: Case, mistake: str, problems: tuple[str, ...]) -> bool:
    """Whether what is said of the mistake is true, and all of it."""
    one, two = f"input {case.i}: ", sorted((case.i, case.j))
    if mistake.startswith("all"):  # of one input, the same
        return len(problems) == 1 and "too large" in problems[0] and (problems[0].startswith(("all", "no input", one)))
    if mistake == "two swapped":
        return problems == (f"inputs {two[0]} and {two[1]} look swapped",)
    word = "wrong sign" if mistake == "one wrong sign" else "too large"
    return len(problems) == 1 and (problems[0].startswith((one, "all"))) and word in problems[0]


def main() -> None:
    """All kinds, at all levels of noise."""
    numbers: list[dict[str, Any]] = []
    start = time.perf_counter()

    def report(source: str, mistake: str, noise: float, verdicts: Counter[str]) -> None:
        counts = {word: verdicts[word] for word in ("right", "wrong", "undecided", "named", "beyond tolerance")}
        numbers.append({"gradient": source, "mistake": mistake, "noise": noise, "cases": CASES} | counts)
        print(f"{time.perf_counter() - start:5.0f} s  {source:9} {mistake:15} noise {noise:<6g} {counts}", flush=True)

    for mistake in MISTAKES:
        for noise in NOISES:
            verdicts: Counter[str] = Counter()
            for seed in range(CASES):
                case = draw(seed, noise, least=2 if mistake == "two swapped" else 1)
                found = check(by_hand(case, mistake), case.x, tolerance=TOLERANCE, seed=seed)
                verdicts[found.verdict] += 1
                verdicts["named"] += found.verdict == "wrong" and named(case, mistake, found.problems)
            report("by hand", mistake, noise, verdicts)
    for estimator in ("central", "forward"):
        for noise in NOISES:
            verdicts = Counter()
            for seed in range(CASES):
                case = draw(seed, noise)
                layer = black_box(case, estimator, seed)
                steps: list[Step] = []
                hook = layer.register_step_hook(lambda _, step, steps=steps: steps.append(step))
                found = check(layer, case.x, tolerance=TOLERANCE, seed=seed)
                hook.remove()
                beyond = found.verdict == "wrong" and own_error(case, layer, steps[0]) > TOLERANCE
                verdicts["beyond tolerance" if beyond else found.verdict] += 1
            report(estimator, "none", noise, verdicts)
    save("check_power", numbers)


if __name__ == "__main__":
    main()
