"""Slopes at several steps side by side, from which noise and curvature can be told apart."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

AMPLITUDE = (2.0, 1.0, 0.5)  # of the noise in the three slopes of a trial
ROUNDED = 1e-14  # variance in units of the square: less is rounding


class First(NamedTuple):
    """A box of which nothing is known yet, at some rows of the first training step."""

    spread: Tensor  # [d] how far the inputs vary: see `spread_of`
    deviation: Tensor  # [d] the same, whatever their size; zero where rows are alike
    noise: Tensor  # h² times the variance that noise brings to the slopes, as repeated answers tell
    slopes: Callable[[Tensor], Tensor]  # at steps [d]: [r, d], scaled as in a `Trial`


class Trial(NamedTuple):
    """What was measured at some rows of a training step.

    Slopes are scaled, as if the loss's gradient at the outputs that speak for an input had norm 1. The scale of the
    loss is gone from them then, and equal noise on the outputs is equal noise in all of them. As a function of the step
    h a slope is

        D(h) = D + T hᵖ + noise / h

    with p the estimator's order.
    """

    spread: Tensor  # [d] how far the inputs vary: see `spread_of`
    step: Tensor  # [r, d] h
    slopes: Tensor  # [3, r, d] D(h/2), D(h), D(2h); not finite where nothing is known
    sound: Tensor  # [r, d] whether no evaluation failed of those behind them
    repeated: Tensor  # [r, d_out] by how much the answers changed when the rows themselves were asked about again

    def noise(self, order: int, shared: bool) -> Tensor:
        """Estimates [r, d] of the variance that noise brings to D(h): each from one entry, right on average.

        They come from the combination of the three slopes from which both D and T hᵖ drop out.

        Args:
            order: The estimator's.
            shared: Whether it measures all slopes of a row from one and the same answer.
        """
        weight = 0.5**order
        combination = self.slopes.new_tensor([1, -(1 + weight), weight])  # [3]
        variance = combination @ noise_covariance(shared).to(combination) @ combination
        left: Tensor = torch.tensordot(combination, self.slopes, 1)
        return left.square() / variance


def noise_covariance(shared: bool) -> Tensor:
    """Of the noise in D(h/2), D(h), D(2h): [3, 3], for a variance of 1 in D(h)."""
    amplitude = torch.tensor(AMPLITUDE, dtype=torch.float64, device="cpu")
    independent = amplitude.square().diag()
    # With an end in common, half of every variance is one and the same number.
    return 0.5 * independent + 0.5 * amplitude.outer(amplitude) if shared else independent


def spread_of(x: Tensor, sums: Tensor | None = None, rows: int = 0) -> tuple[Tensor, Tensor]:
    """How far the inputs vary, [d]: their standard deviation over the batch, or half their size if that is more.

    The size speaks where rows are alike; where all are zero it is one. And the standard deviation alone, [d].

    Args:
        x: [B, d].
        sums: [2·d] `sums_of` the joint batch of several processes.
        rows: How many there are in it.
    """
    if sums is None:
        sums, rows = sums_of(x), x.shape[0]
    mean, square = (sums / rows).nan_to_num(0, 0, 0).view(2, -1)
    variance = (square - mean.square()).clamp_min(0)
    deviation = torch.where(variance > ROUNDED * square, variance, 0).sqrt()
    spread = torch.maximum(deviation, square.sqrt() / 2)
    return torch.where(spread > 0, spread, 1).to(x.dtype), deviation.to(x.dtype)


def sums_of(x: Tensor) -> Tensor:
    """Of x [B, d] and of its squares, [2·d]; in double precision, since a variance is what large numbers leave."""
    wide = x if x.device.type == "mps" else x.double()
    return torch.cat((wide.sum(0), wide.square().sum(0)))
