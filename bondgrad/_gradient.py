"""The box at the rows of a batch, and its gradient there: from perturbations, through evaluations, to g."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from bondgrad._arguments import Limits
from bondgrad._device import look_is_free
from bondgrad._function import RowFunction
from bondgrad._ranks import ALONE, Part
from bondgrad.estimators import Estimator, Site
from bondgrad.evaluators import Evaluator
from bondgrad.policies import Steps


class Circumstances(NamedTuple):
    """Of a forward pass, for its backward pass."""

    training: bool
    autocast: torch.dtype | None  # for a box that does not run in full precision
    part: Part = ALONE  # of a joint batch
    ticket: int = 0  # of an answer kept for activation checkpointing; 0: none
    parameters: list[Tensor | None] | None = None  # of a box that is a module


class Parts(NamedTuple):
    """Of the layer, as far as they are needed here."""

    function: RowFunction
    evaluator: Evaluator
    estimator: Estimator
    limits: Limits | None


def evaluate(parts: Parts, x: Tensor, context: tuple[Tensor, ...]) -> Tensor:
    """The box at x [B, d]. What a call that fails may have taught about the function is forgotten."""
    function = parts.function
    known = function.out_features, function.interfaces
    try:
        return parts.evaluator.run(
            # Copies, since the function may write into its arguments.
            lambda: parts.evaluator.evaluate(
                function, x.clone(memory_format=torch.contiguous_format), tuple(c.clone() for c in context)
            )
        )[0]
    except BaseException:
        function.out_features, function.interfaces = known
        raise


def estimate(
    parts: Parts, steps: Steps, x: Tensor, y: Tensor, gy: Tensor, context: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor | None]:
    """The gradient at the box's inputs, and how many evaluations failed (None: none did).

    Args:
        parts: Of the layer.
        steps: How far to move.
        x: [B, d] the rows, inside the limits.
        y: [B, d_out] the box there.
        gy: [B, d_out] the loss's gradient at y.
        context: [B, ...] each: what else the box is given.

    Returns:
        g [B, d] before any scaling of its rows, and a tensor without dimensions.
    """
    function, evaluator, estimator, limits = parts
    low, high = (None, None) if limits is None else limits.like(x)
    site = Site(x, y, gy, torch.copysign(steps.size, steps.sign), low, high)
    batch = x.shape[0]
    row_bytes = sum([t.itemsize * (t.numel() // batch) for t in (x, y, *context)])
    wanted = batch * estimator.evaluations(x.shape[1])
    failed: list[Tensor] = []

    def evaluate_near(points: Tensor, rows: slice) -> tuple[Tensor, Tensor | None]:
        shape = points.shape[:-1]
        nearby = tuple(c[rows].repeat_interleave(shape[1:].numel(), 0) for c in context)
        y, ok = evaluator.evaluate(function, points.view(-1, points.shape[-1]), nearby)
        # A sum is finite only if all its terms are, which spares the closer look.
        if ok is not None or not look_is_free(y.device) or not math.isfinite(y.sum()):
            finite = torch.isfinite(torch.linalg.vector_norm(y, math.inf, dim=1))  # one pass over y
            ok = (finite if ok is None else finite & ok).view(shape)
            failed.append(ok.numel() - ok.sum())
        return y.view(*shape, -1), ok

    def work() -> Tensor:
        failed.clear()
        return estimator.vjp(site, evaluate_near, evaluator.portion(row_bytes, wanted, x.device))

    g = evaluator.run(work).to(x.dtype)
    if not look_is_free(x.device) or not math.isfinite(g.sum()):
        # What could not be estimated is zero; but where the loss's own gradient is not finite neither is ours, as loss
        # scalers expect.
        g = g.nan_to_num(0, 0, 0) + (gy * 0).sum(1, keepdim=True)
    return g, torch.stack(failed).sum() if failed else None


def normalized(g: Tensor) -> Tensor:
    """Rows of g [B, d] scaled to norm 1; rows of zeros stay zero."""
    # Scaled to a largest entry of 1 first, lest the squares of the norm over- or underflow.
    g = g / g.abs().amax(1, keepdim=True).clamp_min(torch.finfo(g.dtype).tiny)
    return torch.nn.functional.normalize(g, dim=1)
