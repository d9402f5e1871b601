"""Checks that every estimator must pass with every policy.

`check_estimator` and `check_policy` run all checks of an estimator or a policy. A single check of one combination is

    check_value(Subject(lambda n: MyEstimator(), lambda: MyPolicy(), torch.float64, order=2))

Each check raises AssertionError with the measured values. Checks see the layer from outside: the points at which the
box is evaluated, and the gradient.
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

# Largest relative error of a gradient from small steps, by dtype and order of accuracy (1, or more). In float32 it
# comes from rounding, in float64 from the length of the step.
TOLERANCE = {torch.float32: (1e-1, 5e-2), torch.float64: (5e-3, 5e-5)}
FIRST = 5  # factor on the tolerance at the first step, where a policy may know nothing and draw very short steps
BATCH = 16  # rows of a training step
STEPS = 3  # training steps of a check
DIRECTIONS = 3  # random directions of estimators that use them
PATTERN = torch.rand(9, 12, generator=torch.Generator("cpu").manual_seed(0), device="cpu") < 0.2  # of a sparse box


class Subject(NamedTuple):
    """What is checked: an estimator with a policy, in a dtype."""

    estimator: Callable[[int], Estimator]  # makes the estimator, with n directions where it has any
    policy: Callable[[], Policy]  # makes the policy, whose steps must be 1e-3 or less
    dtype: torch.dtype  # of x
    order: int  # the power of the step with which the error falls
    simultaneous: bool = False  # whether all inputs of a row move at once, so that g is exact on average only

    def tolerance(self, order: int | None = None) -> float:
        """The largest relative error of a gradient, for the order of the subject or another one."""
        return TOLERANCE[self.dtype][min(order or self.order, 2) - 1]


class Trial(NamedTuple):
    """One estimated gradient, with the values that it is compared with."""

    g: Tensor  # [B, d] the estimate
    expected: Tensor  # [B, d] the estimate in the limit of small steps
    exact: Tensor  # [B, d] the exact gradient
    asked: Tensor  # [N, d] the points at which the box was evaluated for it


def check_value(subject: Subject) -> None:
    """Check that the gradient is the exact one, for boxes of different shapes, at the first and at later steps."""
    for box in (Linear(), Quadratic(), TanhNetwork(), Waves(), Linear(1, 1)):
        for number, trial in enumerate(trials(subject, box), 1):
            allowed = subject.tolerance() * (FIRST if number == 1 else 1)
            compare(trial.g, trial.expected, allowed, f"for {type(box).__name__} in step {number}")


def check_order(subject: Subject) -> None:
    """Check that the error falls with the step by the stated order, in float64 only, since rounding hides it else."""
    if subject.dtype != torch.float64:
        return
    sizes = (0.04, 0.02, 0.01)
    sized = [subject._replace(policy=functools.partial(rescaled, subject.policy(), size)) for size in sizes]
    for box in (TanhNetwork(), Waves()):
        last = [trials(one, box)[-1] for one in sized]
        order = slope(sizes, [relative_error(trial.g, trial.expected) for trial in last])
        assert abs(order - subject.order) < 0.15, f"{type(box).__name__}: order {order:.2f}, not {subject.order}"


def check_rate(subject: Subject) -> None:
    """Check that the error of random directions falls with one over the square root of their number."""
    if not subject.simultaneous:
        return
    counts = (16, 1024)
    runs = [trials(subject, TanhNetwork(), n=n) for n in counts]
    rate = slope(counts, [sum(relative_error(trial.g, trial.exact) for trial in run) for run in runs])
    assert abs(rate + 0.5) < 0.1, f"error falls with the power {rate:.2f} of the number of directions, not -0.5"


def check_seed(subject: Subject) -> None:
    """Check that the result depends on the seed of the layer, and not on the global seed."""
    runs = []
    for layer_seed, global_seed in ((1, 1), (1, 2), (2, 1)):
        torch.manual_seed(global_seed)
        runs.append(trials(subject, Waves(), seed=layer_seed))
    for first, same, other in zip(*runs, strict=True):
        assert torch.equal(first.g, same.g), "two runs with the same seed differ"
        assert torch.equal(first.asked, same.asked), "two runs with the same seed ask for different points"
        assert not torch.equal(first.asked, other.asked), "two runs with different seeds ask for the same points"


def check_chunks(subject: Subject) -> None:
    """Check that the result does not depend on the number of rows in a call of the box."""
    evaluators = (Local(), Local(max_rows=1), Local(memory=1), Local(max_rows=7, memory=500))
    whole, *parts = (
        torch.stack([trial.g for trial in trials(subject, Cubes(), evaluator=evaluator)]) for evaluator in evaluators
    )
    for part in parts:
        assert torch.equal(whole, part), f"largest difference {(whole - part).abs().max():.1e}"


def check_structure(subject: Subject) -> None:
    """Check that a pattern reduces the cost of a gradient, and does not change its value beyond the tolerance."""
    plain, grouped = (trials(subject, Sparse(PATTERN), structure=pattern) for pattern in (None, PATTERN))
    # With a pattern, measured steps and simultaneous estimates are different ones: compare with the expected value.
    others = subject.simultaneous or isinstance(subject.policy(), MeasuringPolicy)
    for before, after in zip(plain, grouped, strict=True):
        grouped_too = subject.simultaneous or len(after.asked) < len(before.asked) / 2
        assert grouped_too, "inputs that share no output do not move together"
        exact = after.expected, subject.tolerance()
        expected, allowed = exact if others else (before.g, 100 * torch.finfo(subject.dtype).eps)
        compare(after.g, expected, allowed, "with a pattern")


def check_cost(subject: Subject) -> None:
    """Check that a gradient costs as many evaluations as `Estimator.evaluations` says."""
    out_features, in_features = PATTERN.shape
    for structure, groups in ((None, None), (PATTERN, Pattern(PATTERN).groups(in_features, out_features))):
        wanted = BATCH * subject.estimator(DIRECTIONS).evaluations(in_features if groups is None else groups.count)
        asked = len(trials(subject, Sparse(PATTERN), structure=structure)[0].asked)
        assert asked == wanted, f"{asked} evaluations where the estimator says {wanted}"


def check_limits(subject: Subject) -> None:
    """Check that no point outside the limits is evaluated, and that steps shortened by limits give right slopes."""
    x = torch.tensor([-2, -0.9999, 0.9995], dtype=subject.dtype)
    rows = torch.cartesian_prod(x, x, x)
    for trial in trials(subject._replace(policy=fixed), Waves(3), rows=rows, limits=(-1, 1)):
        farthest = float(trial.asked.abs().max())
        assert farthest <= 1, f"a point at {farthest} outside the limits of 1"
        compare(trial.g, trial.expected, subject.tolerance(order=1), "at the limits")


def check_failures(subject: Subject) -> None:
    """Check that a failed evaluation affects no other entry of the gradient, nor its own if the other end succeeded.

    Entries without any successful evaluation are zero.
    """
    exact = Waves()

    def failing(x: Tensor) -> Tensor:
        return torch.where(x[:, :1] > 0, math.nan, exact(x))

    x = -torch.ones(BATCH, exact.in_features, dtype=subject.dtype)
    x[::2, 0] = -1e-4  # a step to one side of this fails
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the layer warns that evaluations fail
        results = trials(subject._replace(policy=fixed), exact, n=1, rows=x, fn=failing, evaluator=Local(retries=0))
    one_sided = subject.estimator(DIRECTIONS).shared_base
    for g, expected, *_ in results:
        lost = g == 0
        lost[:, 1:] &= subject.simultaneous
        compare(torch.where(lost, expected, g), expected, subject.tolerance(order=1), "beside failures")
        assert one_sided or not lost.any(), f"{int(lost.sum())} entries are lost although one of two ends was evaluated"


def fixed() -> Policy:
    """A policy with steps of 1e-3, for checks of an estimator alone."""
    return Fixed(1e-3)


CHECKS = (check_value, check_order, check_rate, check_seed, check_chunks, check_structure)
ESTIMATOR_CHECKS = (check_cost, check_limits, check_failures)


def check_estimator(estimator: Estimator | Callable[[int], Estimator], policy: Callable[[], Policy] = fixed) -> None:
    """Run all checks of an estimator, in single and in double precision.

    Args:
        estimator: The estimator; or a function that makes it from the number of its random directions.
        policy: Makes the policy that it is checked with. The steps must be 1e-3 or less.

    Example:
        >>> check_estimator(bondgrad.Central())
    """
    make = (lambda _: estimator) if isinstance(estimator, Estimator) else estimator
    example = make(DIRECTIONS)
    for dtype in (torch.float32, torch.float64):
        for check in (*CHECKS, *ESTIMATOR_CHECKS):
            check(Subject(make, policy, dtype, example.order, example.together))


def check_policy(policy: Callable[[], Policy]) -> None:
    """Run all checks of a policy, with central differences, in single and in double precision.

    Args:
        policy: Makes the policy. Its steps at inputs of size 1 must be 1e-3 or less.

    Example:
        >>> check_policy(lambda: bondgrad.policies.Fixed(1e-3))
    """
    for dtype in (torch.float32, torch.float64):
        for check in CHECKS:
            check(Subject(lambda _: Central(), policy, dtype, order=2))
    if not isinstance(policy(), MeasuringPolicy):  # which would need a `start`
        check_parts(policy())


def check_parts(policy: Policy) -> None:
    """Check that two processes with parts of a batch do what one does, and that the state of a policy stays finite."""
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
    """The gradients of a few training steps through the box, each with another loss.

    Args:
        subject: What is checked.
        box: The box, for exact gradients.
        n: The number of directions, for estimators that use them.
        seed: The seed of the layer.
        rows: [B, d] the rows of every step. None: random rows, new ones in each step.
        fn: The function to evaluate instead of the box. None: the box.
        settings: Further arguments of the layer.
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
        asked_more = layer.trial_due  # a trial evaluates more points than a gradient needs
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
    """The least-squares slope [B, d] along each input, from the exact Jacobian, for the directions that were used.

    Args:
        asked: [B·n·2, d] the points at which the box was evaluated, row by row, in pairs.
        box: The box.
        x: [B, d] the rows.
        gy: [B, d_out] the gradient of the loss.
        depends: [d_out, d] which outputs depend on which inputs; None: all on all.
    """
    pairs = asked.view(len(x), -1, 2, x.shape[1]).double()
    span = pairs[:, :, 0] - pairs[:, :, 1]  # [B, n, d]
    change = torch.einsum("bo,boi,bni->bno", gy.double(), box.jacobian(x.double()), span)
    used = torch.ones(box.out_features, box.in_features) if depends is None else depends
    change = change @ used.double()  # [B, n, d]
    return ((change * span).sum(1) / span.square().sum(1)).to(x.dtype)


def rescaled(policy: Policy, rms: float) -> Policy:
    """A copy of the policy whose steps are scaled to a given root mean square."""
    other = copy.copy(policy)

    def steps(state: State, batch: Batch, n: int, noise: float) -> Steps:
        drawn = policy.steps(state, batch, n, noise)
        return drawn._replace(size=drawn.size * (rms / drawn.size.square().mean().sqrt()))

    other.steps = steps  # type: ignore[method-assign]
    return other


def compare(g: Tensor, expected: Tensor, allowed: float, where: str) -> None:
    """Raise AssertionError if the relative error of a gradient is not below what is allowed."""
    error = relative_error(g, expected)
    assert error < allowed, f"relative error {error:.1e} > {allowed:.1e} {where}"


def relative_error(g: Tensor, expected: Tensor) -> float:
    """The norm of the difference over the norm of the expected gradient."""
    return float((g - expected).norm() / expected.norm())


def slope(x: tuple[float, ...], y: list[float]) -> float:
    """The power p of a least-squares fit y = c·xᵖ."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])
