"""What every estimator must pass with every policy.

    subject = Subject(lambda n: MyEstimator(), lambda: MyPolicy(), torch.float64, order=2)
    for check in CHECKS:
        check(subject)

Each check raises AssertionError with what it measured. They look at the layer from outside: at what the box was asked,
and at the gradient that came back.
"""

import copy
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from bondgrad.box import BlackBox
from bondgrad.estimators import Estimator
from bondgrad.evaluators import Local
from bondgrad.policies import Batch, MeasuringPolicy, Policy, State, Steps
from bondgrad.testing.boxes import Cubes, ExactBox, Linear, Quadratic, Sparse, TanhNetwork, Waves

# Largest relative error of a gradient from small steps, by dtype and order of accuracy. In float32 it is rounding that
# decides, in float64 it is the step.
TOLERANCE = {
    (torch.float32, 1): 1e-1,
    (torch.float32, 2): 5e-2,
    (torch.float64, 1): 5e-3,
    (torch.float64, 2): 5e-5,
}
FIRST = 5  # times the tolerance at the first step, where a policy may know nothing and some steps come out tiny
BATCH = 16


class Subject(NamedTuple):
    """An estimator with a policy, in a dtype."""

    estimator: Callable[[int], Estimator]  # made for n directions, where that means something
    policy: Callable[[], Policy]  # steps of 1e-3 or less
    dtype: torch.dtype
    order: int  # the power of the step with which the error falls
    simultaneous: bool = False  # moves all inputs of a row at once: right along its directions, and on average


class Trial(NamedTuple):
    """One gradient, with all that is needed to judge it."""

    g: Tensor  # [B, d] the estimate
    expected: Tensor  # [B, d] what it should be in the limit of small steps
    exact: Tensor  # [B, d] the exact gradient
    asked: Tensor  # [N, d] the points at which the box was evaluated for it


def check_value(subject: Subject) -> None:
    """The gradient is the exact one, for boxes of different shapes, in the first steps and in later ones."""
    tolerance = TOLERANCE[subject.dtype, subject.order]
    for box in (Linear(4, 6), Quadratic(4, 3), TanhNetwork(5, 16, 2), Waves(3, 7), Linear(1, 1)):
        for i, trial in enumerate(trials(subject, box, steps=4, n=3)):
            error = relative_error(trial.g, trial.expected)
            allowed = tolerance * (FIRST if i == 0 else 1)
            assert error < allowed, f"{type(box).__name__}, step {i}: relative error {error:.1e} > {allowed:.1e}"


def check_order(subject: Subject) -> None:
    """The error falls with the step as it should. In float64, where rounding does not hide it."""
    if subject.dtype != torch.float64:
        return
    sizes = (0.04, 0.02, 0.01)
    for box in (TanhNetwork(5, 16, 2), Waves(3, 7)):
        errors = []
        for size in sizes:
            sized = subject._replace(policy=functools.partial(rescaled, subject.policy(), size))
            trial = trials(sized, box, steps=3, n=3)[-1]
            errors.append(relative_error(trial.g, trial.expected))
        order = slope(sizes, errors)
        assert abs(order - subject.order) < 0.15, f"{type(box).__name__}: order {order:.2f}, not {subject.order}"


def check_rate(subject: Subject) -> None:
    """The error of a random estimate falls with one over the root of the number of directions."""
    if not subject.simultaneous:
        return
    counts = (16, 64, 256, 1024)
    errors = []
    for n in counts:
        trial = trials(subject, TanhNetwork(5, 16, 2), steps=2, n=n, batch=4 * BATCH)[-1]
        errors.append(relative_error(trial.g, trial.exact))
    rate = slope(counts, errors)
    assert abs(rate + 0.5) < 0.1, f"error falls with the power {rate:.2f} of the number of directions, not -0.5"


def check_seed(subject: Subject) -> None:
    """The layer's seed decides the result, and nothing else does."""
    runs = []
    for layer_seed, global_seed in ((1, 1), (1, 2), (2, 1)):
        torch.manual_seed(global_seed)
        runs.append(trials(subject, Waves(3, 7), steps=3, n=2, seed=layer_seed))
    for first, same, other in zip(*runs, strict=True):
        assert torch.equal(first.g, same.g), "two runs with the same seed differ"
        assert torch.equal(first.asked, same.asked), "two runs with the same seed ask for different points"
        assert not torch.equal(first.asked, other.asked), "two runs with different seeds ask for the same points"


def check_chunks(subject: Subject) -> None:
    """The result does not depend on how many rows the box is given at a time."""
    whole, *parts = (
        torch.stack([t.g for t in trials(subject, Cubes(5), steps=3, n=3, max_rows=max_rows)])
        for max_rows in (None, 1, 2, 3, 7, 10, 64)
    )
    for part in parts:
        assert torch.equal(whole, part), f"largest difference {(whole - part).abs().max():.1e}"


def check_structure(subject: Subject) -> None:
    """A pattern changes what a gradient costs, and not what it is. Directions are judged by their own outputs only."""
    pattern = torch.rand(9, 12, generator=torch.Generator().manual_seed(0)) < 0.2
    box = Sparse(pattern)
    plain, grouped = (trials(subject, box, steps=3, n=2, structure=structure) for structure in (None, pattern))
    for before, after in zip(plain, grouped, strict=True):
        grouped_too = subject.simultaneous or len(after.asked) < len(before.asked) / 2
        assert grouped_too, "inputs that share no output do not move together"
        if subject.simultaneous or isinstance(
            subject.policy(), MeasuringPolicy
        ):  # whose steps are measured, with a pattern differently
            error, allowed = relative_error(after.g, after.expected), FIRST * TOLERANCE[subject.dtype, subject.order]
        else:
            error, allowed = relative_error(after.g, before.g), 100 * torch.finfo(subject.dtype).eps
        assert error < allowed, f"relative error {error:.1e} > {allowed:.1e}"


CHECKS = (check_value, check_order, check_rate, check_seed, check_chunks, check_structure)


def trials(
    subject: Subject,
    box: ExactBox,
    steps: int,
    n: int,
    batch: int = BATCH,
    seed: int = 0,
    max_rows: int | None = None,
    structure: Tensor | None = None,
) -> list[Trial]:
    """Take training steps through the box, each with other rows and another loss."""
    asked: list[Tensor] = []

    def recording(x: Tensor) -> Tensor:
        asked.append(x.clone())
        return box(x)

    layer = BlackBox(
        recording,
        box.in_features,
        estimator=subject.estimator(n),
        policy=subject.policy(),
        evaluator=Local(max_rows=max_rows),
        structure=structure,
        seed=seed,
    )
    data = torch.Generator().manual_seed(3)
    results: list[Trial] = []
    while len(results) < steps:
        asked_more = layer.trial_due  # than a gradient needs
        x = torch.randn(batch, box.in_features, dtype=torch.float64, generator=data).to(subject.dtype).requires_grad_()
        gy = torch.randn(batch, box.out_features, dtype=torch.float64, generator=data).to(subject.dtype)
        y = layer(x)
        asked.clear()
        (g,) = torch.autograd.grad(y, x, gy)
        exact = box.vjp(x.detach(), gy)
        points = torch.cat(asked)
        if not asked_more:
            expected = along(points, box, x.detach(), gy, structure) if subject.simultaneous else exact
            results.append(Trial(g, expected, exact, points))
    return results


def along(asked: Tensor, box: ExactBox, x: Tensor, gy: Tensor, depends: Tensor | None) -> Tensor:
    """What the exact Jacobian says about the directions asked for: the least-squares slope along each input.

    Args:
        asked: [B·n·2, d] the points the box was asked for, row by row, in pairs.
        box: The box.
        x: [B, d].
        gy: [B, d_out].
        depends: [d_out, d] which outputs depend on which inputs; None: all on all.
    """
    pairs = asked.view(len(x), -1, 2, x.shape[1]).double()
    span = pairs[:, :, 0] - pairs[:, :, 1]  # [B, n, d]
    change = torch.einsum("bo,boi,bni->bno", gy.double(), box.jacobian(x.double()), span)
    used = torch.ones(box.out_features, box.in_features) if depends is None else depends
    change = change @ used.double()  # [B, n, d]
    return ((change * span).sum(1) / span.square().sum(1)).to(x.dtype)


def rescaled(policy: Policy, rms: float) -> Policy:
    """A copy of the policy whose steps are brought to a given root mean square."""
    other = copy.copy(policy)

    def steps(state: State, batch: Batch, n: int, noise: float) -> Steps:
        drawn = policy.steps(state, batch, n, noise)
        return drawn._replace(size=drawn.size * (rms / drawn.size.square().mean().sqrt()))

    other.steps = steps  # type: ignore[method-assign]
    return other


def relative_error(g: Tensor, expected: Tensor) -> float:
    """The norm of the difference over the norm of what was expected."""
    return float((g - expected).norm() / expected.norm())


def slope(x: tuple[float, ...], y: list[float]) -> float:
    """The power p of a least-squares fit y = c·xᵖ."""
    log_x, log_y = torch.tensor(x, dtype=torch.float64).log(), torch.tensor(y, dtype=torch.float64).log()
    log_x, log_y = log_x - log_x.mean(), log_y - log_y.mean()
    return float((log_x * log_y).sum() / log_x.square().sum())
