"""What every policy must pass."""

import math
from collections.abc import Callable

import torch

from bondgrad.estimators import Central
from bondgrad.policies import Batch, MeasuringPolicy, Observation, Policy
from bondgrad.testing.conformance import CHECKS, Subject


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
        batches = [Batch(x, torch.Generator("cpu"), rows)]
        batches += [Batch(x[s], torch.Generator("cpu"), rows, s.start, sums) for s in share]
        for batch in batches:
            batch.generator.manual_seed(number)
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
