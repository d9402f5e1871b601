"""The paper's algorithms, read in other ways than the library reads them.

`settings.Reading` says which ways there are. The estimators and policies here are for experiments that ask which
reading gives the paper's numbers; what was measured to be best is in the library.
"""

import torch
from torch import Tensor

from bondgrad.estimators import (
    Central,
    Estimator,
    Evaluate,
    Forward,
    Simultaneous,
    Site,
    input_difference,
    output_difference,
    within_limits,
)
from bondgrad.experiments.settings import Gradient, Reading
from bondgrad.policies import Batch, Bond, Differences, MeasuringPolicy, Observation, Policy, State, Steps


def estimator(gradient: Gradient, in_features: int, out_features: int) -> Estimator:
    """The estimator of a method, as it is to be read, for a box with so many inputs and outputs."""
    normalize, before = gradient.normalize_rows, gradient.reading.normalize == "before"
    if gradient.method == "BOND":
        return JacobianRows(in_features) if normalize and before else Central(normalize)
    if gradient.method == "forward":
        return Forward(normalize)
    elementwise, plain = gradient.reading.bonds == "elementwise", gradient.reading.mean == "plain"
    if elementwise and in_features != out_features:
        raise ValueError(
            f"bonds: elementwise needs a box with as many outputs as inputs, got {in_features} inputs and "
            f"{out_features} outputs: use bonds: contracted"
        )
    if elementwise or plain or (normalize and before):
        return LiteralBonds(in_features, gradient.n, elementwise, normalize and before, normalize and not before)
    return Simultaneous(gradient.n, normalize)


class JacobianRows(Estimator):
    """Central differences, with the estimated Jacobian of every sample scaled to norm 1 before it is multiplied by gy.

        g_k = gy_k · J_k / ‖J_k‖

    The norm is the Frobenius norm of the whole Jacobian of sample k (of a sequence, of one time step's).

    Args:
        in_features: Inputs of a row.
    """

    def __init__(self, in_features: int) -> None:
        super().__init__()
        self.in_features = in_features

    def evaluations(self, groups: int) -> int:
        """See `Estimator.evaluations`."""
        return 2 * groups

    def vjp(self, site: Site, evaluate: Evaluate, max_rows: int) -> Tensor:
        """See `Estimator.vjp`. All points are made at once, whatever `max_rows` says."""
        x, delta = site.x, site.delta[0]  # [B, W] each
        ends = [within_limits(end, site.low, site.high) for end in (x + delta, x - delta)]
        count = x.shape[1] if site.groups is None else site.groups.count
        part = None if site.groups is None else site.groups.subset(slice(0, count), x.device)
        moved = torch.eye(count, dtype=torch.bool, device=x.device) if part is None else part.moved  # [groups, W]
        points = torch.where(moved[:, None], torch.stack(ends, 1)[:, None], x[:, None, None])  # [B, groups, 2, W]
        y, _ = evaluate(points, slice(0, len(x)))  # [B, groups, 2, W_out]
        change = output_difference(y, None, site.y)  # [B, groups, W_out]

        def total(products: Tensor) -> Tensor:  # [B, groups, W_out] -> [B, W]
            return products.sum(2) if part is None else part.sum_by_input(products)

        steps = input_difference(ends, None, x)  # [B, W]
        slope, square = total(change * site.gy.unsqueeze(1)) / steps, total(change.square()) / steps.square()
        return _over_norm(slope, square, self.in_features)


class LiteralBonds(Estimator):
    """BONDS as the paper's Algorithm is written, for several readings of it.

    With D = Y⁺ - Y⁻ and s = x⁺ - x⁻, the estimate is the plain mean over n perturbations of

        g_i = gy_i D_i / s_i   (element by element)   or   g_i = gy·D / s_i   (contracted).

    Args:
        in_features: Inputs of a row.
        n: Perturbations per row.
        elementwise: Which of the two.
        normalize_before: Scale what gy is multiplied by, of every row and perturbation, to norm 1.
        normalize_rows: Scale every row of g to norm 1.
    """

    together = True

    def __init__(
        self, in_features: int, n: int, elementwise: bool, normalize_before: bool, normalize_rows: bool
    ) -> None:
        super().__init__(normalize_rows)
        self.in_features, self.n, self.draws = in_features, n, n
        self.elementwise, self.normalize_before = elementwise, normalize_before

    def evaluations(self, groups: int) -> int:
        """See `Estimator.evaluations`."""
        return 2 * self.n

    def vjp(self, site: Site, evaluate: Evaluate, max_rows: int) -> Tensor:
        """See `Estimator.vjp`. All points are made at once, whatever `max_rows` says."""
        x, gy = site.x, site.gy.unsqueeze(1)  # [B, W], [B, 1, W_out]
        delta = site.delta.transpose(0, 1)  # [B, n, W]
        ends = [within_limits(end, site.low, site.high) for end in (x.unsqueeze(1) + delta, x.unsqueeze(1) - delta)]
        y, _ = evaluate(torch.stack(ends, 2), slice(0, len(x)))  # [B, n, 2, W_out]
        change, steps = output_difference(y, None, site.y), input_difference(ends, None, x)  # [B, n, W_out], [B, n, W]

        def total(products: Tensor) -> Tensor:  # [B, n, W_out] -> [B, n, W]
            if self.elementwise:
                return products
            if site.groups is None:
                return products.sum(2, keepdim=True).expand_as(steps)
            return site.groups.sum_by_input(products)

        slopes = total(change * gy) / steps  # [B, n, W]
        if self.normalize_before:
            slopes = _over_norm(slopes, total(change.square()) / steps.square(), self.in_features)
        return slopes.mean(1)


def _over_norm(slope: Tensor, square: Tensor, in_features: int) -> Tensor:
    """Slopes [..., W] over the root of the sum of `square` [..., W] over the inputs of each row.

    Rows of zeros stay zero, and an input that was not moved counts for nothing.
    """
    square = torch.where(torch.isfinite(square), square, 0)
    norm = square.reshape(-1, in_features).sum(1, keepdim=True).sqrt()
    rows = slope.reshape(-1, in_features)
    return torch.where(norm > 0, rows / norm, rows).view_as(slope)


def policy(inner: Policy, reading: Reading) -> Policy:
    """The policy, as it is to be read."""
    if reading.error_terms == "scaled":
        if not isinstance(inner, Bond) or inner.bounds != "error-terms":
            raise ValueError("error_terms: scaled is for a policy with bounds: error-terms")
        inner = ScaledErrorTerms(inner.bounds, inner.reduce, inner.betas, inner.eta, inner.max_step)
    if reading.perturbations == "shared" or not reading.least_step:
        return PolicyWithReading(inner, reading)
    return inner


class ScaledErrorTerms(Bond):
    """`Bond(bounds="error-terms")` with its upper bound times α_t = max |m̂|, as the simpler bounds have it."""

    def error_terms(self, m: Tensor, v: Tensor, g: Tensor, step: Tensor, noise: float) -> tuple[Tensor, Tensor]:
        """See `Bond.error_terms`."""
        lower, upper = super().error_terms(m, v, g, step, noise)
        magnitude = m.abs()
        return lower, upper * torch.where(torch.isfinite(magnitude), magnitude, 0).amax()


class PolicyWithReading(Policy):
    """A policy whose perturbations are the same for all rows of a batch, or may vanish in the rounding of x.

    Args:
        inner: Decides the sizes. It must not measure steps of its own.
        reading: Which of the two.
    """

    def __init__(self, inner: Policy, reading: Reading) -> None:
        if isinstance(inner, MeasuringPolicy):
            raise ValueError(f"another reading of perturbations is for policies of the paper, not for {inner!r}")
        self.inner, self.shared = inner, reading.perturbations == "shared"
        self.least_ulps = inner.least_ulps if reading.least_step else 0.0

    def __repr__(self) -> str:
        return f"PolicyWithReading({self.inner!r}, shared={self.shared}, least_ulps={self.least_ulps})"

    def init(self, in_features: int) -> State:
        """See `Policy.init`."""
        return self.inner.init(in_features)

    def measure(self, x: Tensor) -> Tensor:
        """See `Policy.measure`."""
        return self.inner.measure(x)

    def steps(self, state: State, batch: Batch, n: int, noise: float) -> Steps:
        """See `Policy.steps`."""
        steps = self.inner.steps(state, batch, n, noise)
        if not self.shared:
            return steps
        return steps._replace(
            size=steps.size[:, :1].expand_as(steps.size), sign=steps.sign[:, :1].expand_as(steps.sign)
        )

    def summarize(self, state: State, seen: Observation) -> Tensor:
        """See `Policy.summarize`."""
        return self.inner.summarize(state, seen)

    def observe(self, state: State, summary: Tensor, rows: int, differences: Differences) -> State:
        """See `Policy.observe`."""
        return self.inner.observe(state, summary, rows, differences)
