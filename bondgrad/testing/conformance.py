"""What every estimator must pass with every policy.

`check_estimator` and `check_policy` run everything that there is for one; one check of one combination is run by

    check_value(Subject(lambda n: MyEstimator(), lambda: MyPolicy(), torch.float64, order=2))

Each check raises AssertionError with what it measured. They look at the layer from outside: at what the box was asked,
and at the gradient that came back.
"""

import copy
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bondgrad.box import BlackBox
from bondgrad.estimators import Central, Estimator
from bondgrad.evaluators import Local
from bondgrad.policies import Batch, Fixed, MeasuringPolicy, Observation, Policy, State, Steps
from bondgrad.structure import Pattern
from bondgrad.testing.boxes import Cubes, ExactBox, Linear, Quadratic, Sparse, TanhNetwork, Waves

# Largest relative error of a gradient from small steps, by dtype and order of accuracy (1, or more). In float32 it is
# rounding that decides, in float64 it is the step.
TOLERANCE = {torch.float32: (1e-1, 5e-2), torch.float64: (5e-3, 5e-5)}
FIRST = 5  # times the tolerance at the first step, where a policy may know nothing and some steps come out tiny
BATCH = 16
STEPS = 3
DIRECTIONS = 3  # of estimators that take random ones
PATTERN = torch.rand(9, 12, generator=torch.Generator("cpu").manual_seed(0), device="cpu") < 0.2  # of a sparse box


class Subject(NamedTuple):
    """An estimator with a policy, in a dtype."""

    estimator: Callable[[int], Estimator]  # made for n directions, where that means something
    policy: Callable[[], Policy]  # steps of 1e-3 or less
    dtype: torch.dtype
    order: int  # the power of the step with which the error falls
    simultaneous: bool = False  # moves all inputs of a row at once: right along its directions, and on average

    def tolerance(self, order: int | None = None) -> float:
        """The largest relative error of a gradient, of the subject's order or another."""
        return TOLERANCE[self.dtype][min(order or self.order, 2) - 1]


class Trial(NamedTuple):
    """One gradient, with all that is needed to judge it."""

    g: Tensor  # [B, d] the estimate
    expected: Tensor  # [B, d] what it should be in the limit of small steps
    exact: Tensor  # [B, d] the exact gradient
    asked: Tensor  # [N, d] the points at which the box was evaluated for it


def check_value(subject: Subject) -> None:
    """The gradient is the exact one, for boxes of different shapes, in the first steps and in later ones."""
    for box in (Linear(), Quadratic(), TanhNetwork(), Waves(), Linear(1, 1)):
        for number, trial in enumerate(trials(subject, box), 1):
            allowed = subject.tolerance() * (FIRST if number == 1 else 1)
            compare(trial.g, trial.expected, allowed, f"for {type(box).__name__} in step {number}")


def check_order(subject: Subject) -> None:
    """The error falls with the step as it should. In float64, where rounding does not hide it."""
    if subject.dtype != torch.float64:
        return
    sizes = (0.04, 0.02, 0.01)
    sized = [subject._replace(policy=functools.partial(rescaled, subject.policy(), size)) for size in sizes]
    for box in (TanhNetwork(), Waves()):
        last = [trials(one, box)[-1] for one in sized]
        order = slope(sizes, [relative_error(trial.g, trial.expected) for trial in last])
        assert abs(order - subject.order) < 0.15, f"{type(box).__name__}: order {order:.2f}, not {subject.order}"


def check_rate(subject: Subject) -> None:
    """The error of a random estimate falls with one over the root of the number of directions."""
    if not subject.simultaneous:
        return
    counts = (16, 1024)
    runs = [trials(subject, TanhNetwork(), n=n) for n in counts]
    rate = slope(counts, [sum(relative_error(trial.g, trial.exact) for trial in run) for run in runs])
    assert abs(rate + 0.5) < 0.1, f"error falls with the power {rate:.2f} of the number of directions, not -0.5"


def check_seed(subject: Subject) -> None:
    """The layer's seed decides the result, and nothing else does."""
    runs = []
    for layer_seed, global_seed in ((1, 1), (1, 2), (2, 1)):
        torch.manual_seed(global_seed)
        runs.append(trials(subject, Waves(), seed=layer_seed))
    for first, same, other in zip(*runs, strict=True):
        assert torch.equal(first.g, same.g), "two runs with the same seed differ"
        assert torch.equal(first.asked, same.asked), "two runs with the same seed ask for different points"
        assert not torch.equal(first.asked, other.asked), "two runs with different seeds ask for the same points"


def check_chunks(subject: Subject) -> None:
    """The result does not depend on how many rows the box is given at a time."""
    whole, *parts = (
        torch.stack([trial.g for trial in trials(subject, Cubes(), evaluator=Local(max_rows))])
        for max_rows in (None, 1, 7)
    )
    for part in parts:
        assert torch.equal(whole, part), f"largest difference {(whole - part).abs().max():.1e}"


def check_structure(subject: Subject) -> None:
    """A pattern changes what a gradient costs, and not what it is. Directions are judged by their own outputs only."""
    plain, grouped = (trials(subject, Sparse(PATTERN), structure=pattern) for pattern in (None, PATTERN))
    # Steps that are measured are others with a pattern, as are directions.
    others = subject.simultaneous or isinstance(subject.policy(), MeasuringPolicy)
    for before, after in zip(plain, grouped, strict=True):
        grouped_too = subject.simultaneous or len(after.asked) < len(before.asked) / 2
        assert grouped_too, "inputs that share no output do not move together"
        exact = after.expected, subject.tolerance()
        expected, allowed = exact if others else (before.g, 100 * torch.finfo(subject.dtype).eps)
        compare(after.g, expected, allowed, "with a pattern")


def check_cost(subject: Subject) -> None:
    """A gradient costs the evaluations that the estimator says."""
    out_features, in_features = PATTERN.shape
    for structure, groups in ((None, None), (PATTERN, Pattern(PATTERN).groups(in_features, out_features))):
        wanted = BATCH * subject.estimator(DIRECTIONS).evaluations(in_features if groups is None else groups.count)
        asked = len(trials(subject, Sparse(PATTERN), structure=structure)[0].asked)
        assert asked == wanted, f"{asked} evaluations where the estimator says {wanted}"


def check_limits(subject: Subject) -> None:
    """No point outside the limits is evaluated, and differences are divided by the way that is left inside."""
    x = torch.tensor([-2, -0.9999, 0.9995], dtype=subject.dtype)
    rows = torch.cartesian_prod(x, x, x)
    for trial in trials(subject._replace(policy=fixed), Waves(3), rows=rows, limits=(-1, 1)):
        farthest = float(trial.asked.abs().max())
        assert farthest <= 1, f"a point at {farthest} outside the limits of 1"
        compare(trial.g, trial.expected, subject.tolerance(order=1), "at the limits")


def check_failures(subject: Subject) -> None:
    """An evaluation that fails costs no entry but its own, and not even that one if its other end was evaluated.

    Entries of which nothing is known are zero.
    """
    exact = Waves()

    def failing(x: Tensor) -> Tensor:
        return torch.where(x[:, :1] > 0, math.nan, exact(x))

    x = -torch.ones(BATCH, exact.in_features, dtype=subject.dtype)
    x[::2, 0] = -1e-4  # from where a step to one side fails
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the layer says that evaluations fail
        results = trials(subject._replace(policy=fixed), exact, n=1, rows=x, fn=failing)
    one_sided = subject.estimator(DIRECTIONS).shared_base
    for g, expected, *_ in results:
        lost = g == 0
        lost[:, 1:] &= subject.simultaneous
        compare(torch.where(lost, expected, g), expected, subject.tolerance(order=1), "beside failures")
        assert one_sided or not lost.any(), f"{int(lost.sum())} entries are lost although one of two ends was evaluated"


def fixed() -> Policy:
    """The policy for checks of an estimator alone: steps of 1e-3."""
    return Fixed(1e-3)


CHECKS = (check_value, check_order, check_rate, check_seed, check_chunks, check_structure)
ESTIMATOR_CHECKS = (check_cost, check_limits, check_failures)


def check_estimator(estimator: Estimator | Callable[[int], Estimator], policy: Callable[[], Policy] = fixed) -> None:
    """Run everything that an estimator must pass, in single and in double precision.

    Args:
        estimator: What is checked; one that takes random directions as a function of their number.
        policy: Makes the policy that it is checked with. Its steps must be 1e-3 or less.

    Example:
        >>> check_estimator(bondgrad.Central())
    """
    make = (lambda _: estimator) if isinstance(estimator, Estimator) else estimator
    example = make(DIRECTIONS)
    for dtype in (torch.float32, torch.float64):
        for check in (*CHECKS, *ESTIMATOR_CHECKS):
            check(Subject(make, policy, dtype, example.order, example.together))


def check_policy(policy: Callable[[], Policy]) -> None:
    """Run everything that a policy must pass, with central differences, in single and in double precision.

    Args:
        policy: Makes what is checked. Its steps at rows of size 1 must be 1e-3 or less.

    Example:
        >>> check_policy(lambda: bondgrad.policies.Fixed(1e-3))
    """
    for dtype in (torch.float32, torch.float64):
        for check in CHECKS:
            check(Subject(lambda _: Central(), policy, dtype, order=2))
    if not isinstance(policy(), MeasuringPolicy):  # which has to start first
        check_parts(policy())


def check_parts(policy: Policy) -> None:
    """Two processes that share a batch do what one does; and what was bad in a batch is not remembered."""
    d, rows, share, differences = 3, 8, (slice(0, 5), slice(5, 8)), Central().differences
    data = torch.Generator("cpu").manual_seed(0)
    state = policy.init(d)
    for number in range(4):
        x, g = torch.randn(2, rows, d, generator=data, device="cpu")
        if number == 2:
            g[0], g[1, 0] = math.nan, math.inf
        before = {name: value.clone() for name, value in state.items()}
        sums = policy.measure(x[share[0]]) + policy.measure(x[share[1]])
        batches = [Batch(x, torch.Generator("cpu").manual_seed(number), rows)]
        batches += [Batch(x[s], torch.Generator("cpu").manual_seed(number), rows, s.start, sums) for s in share]
        steps, *parts = (policy.steps(state, batch, 1, 1e-6) for batch in batches)
        for ours, first, second in zip(steps[:2], *(part[:2] for part in parts), strict=True):
            assert torch.allclose(ours, torch.cat((first, second), 1)), "the parts of a batch are moved otherwise"
        seen = [Observation(x[s], g[s], part, differences) for s, part in zip(share, parts, strict=True)]
        first, second = (policy.summarize(state, one) for one in seen)
        other = policy.observe(state, first + second, rows, differences)
        summary = policy.summarize(state, Observation(x, g, steps, differences))
        assert all(torch.equal(value, before[name]) for name, value in state.items()), "a state was written into"
        state = policy.observe(state, summary, rows, differences)
        assert state.keys() == before.keys(), f"the state has {[*state]} after a step, and had {[*before]}"
        for name, value in state.items():
            assert value.shape == before[name].shape, f"the shape of {name} changes"
            assert bool(torch.isfinite(value).all()), f"{name} is not finite after a gradient that is not"
            assert torch.allclose(value, other[name]), f"{name} depends on how many processes there are"


def trials(
    subject: Subject,
    box: ExactBox,
    n: int = DIRECTIONS,
    seed: int = 0,
    rows: Tensor | None = None,
    fn: Callable[[Tensor], Tensor] | None = None,
    **settings: Any,  # noqa: ANN401
) -> list[Trial]:
    """Take a few training steps through the box, each with another loss.

    Args:
        subject: What is checked.
        box: The box as it should be.
        n: Directions, where that means something.
        seed: Of the layer.
        rows: [B, d] those of every step. None: other random ones in each.
        fn: The box as it is. None: as it should be.
        settings: Further ones of the layer.
    """
    asked: list[Tensor] = []

    def recording(x: Tensor) -> Tensor:
        asked.append(x.clone())
        return (fn or box)(x)

    estimator, policy = subject.estimator(n), subject.policy()
    layer = BlackBox(recording, box.in_features, estimator=estimator, policy=policy, seed=seed, **settings)
    limits, structure = settings.get("limits", (-math.inf, math.inf)), settings.get("structure")
    data = torch.Generator().manual_seed(3)
    results: list[Trial] = []
    while len(results) < STEPS:
        asked_more = layer.trial_due  # than a gradient needs
        x = torch.randn(BATCH, box.in_features, dtype=torch.float64, generator=data) if rows is None else rows.clone()
        x = x.to(subject.dtype).requires_grad_()
        y = layer(x)
        gy = torch.randn(y.shape, dtype=torch.float64, generator=data).to(subject.dtype)
        asked.clear()
        (g,) = torch.autograd.grad(y, x, gy)
        if not asked_more:
            inside, points = x.detach().clamp(*limits), torch.cat(asked)
            exact = box.vjp(inside, gy)
            expected = along(points, box, inside, gy, structure) if subject.simultaneous else exact
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


def compare(g: Tensor, expected: Tensor, allowed: float, where: str) -> None:
    """Refuse a gradient that is farther from what was expected than allowed."""
    error = relative_error(g, expected)
    assert error < allowed, f"relative error {error:.1e} > {allowed:.1e} {where}"


def relative_error(g: Tensor, expected: Tensor) -> float:
    """The norm of the difference over the norm of what was expected."""
    return float((g - expected).norm() / expected.norm())


def slope(x: tuple[float, ...], y: list[float]) -> float:
    """The power p of a least-squares fit y = c·xᵖ."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])
