"""How coarse the outputs of a box are."""

import math

import torch
from torch import Tensor

ROUGH = (torch.float16, torch.bfloat16, torch.float32)  # what outputs may have been rounded to before they came


class Grain:
    """What rounding does to outputs, from what they look like.

    Outputs that always differ by at least some amount were rounded to it, which asking again does not show.

    Args:
        gy: [r, d_out] weight of every output in the loss, float64.
        d: Inputs.
    """

    def __init__(self, gy: Tensor, d: int) -> None:
        self._gy = gy
        self._dtypes = list(ROUGH)  # that the outputs so far would fit into
        self._quantum = torch.full_like(gy[0], math.inf)  # [d_out] least difference of two outputs
        self._size = torch.zeros_like(gy)  # [r, d_out] largest output near each row
        self._moves = torch.zeros(len(gy), d, 1, dtype=torch.bool, device=gy.device)  # [r, d, d_out] see `moved`

    def rounding(self) -> tuple[Tensor, Tensor]:
        """Standard deviation [r, d] of what it does to the loss: by outputs that move with an input, and by the rest.

        What does not move is the same on both sides of a step, and cancels.
        """
        quantum = torch.where(torch.isfinite(self._quantum), self._quantum / math.sqrt(12), 0)
        eps = torch.finfo(self._dtypes[0] if self._dtypes else torch.float64).eps
        squares = (self._gy * torch.maximum(quantum, eps * self._size)).square()[:, None]  # [r, 1, d_out]
        near = torch.where(self._moves, squares, 0).sum(2)
        return near.sqrt(), (squares.sum(2) - near).clamp(min=0).sqrt()

    def look(self, y: Tensor) -> None:
        """Learn from outputs y [r, n, d_out] near each row, NaN where there is no answer."""
        self._dtypes = [dtype for dtype in self._dtypes if bool(((y.to(dtype).to(y) == y) | y.isnan()).all())]
        exact = y.double()
        gaps = exact.flatten(0, 1).sort(0).values.diff(dim=0)
        gaps = torch.where(gaps > 0, gaps, math.inf)
        if len(gaps):
            self._quantum = torch.minimum(self._quantum, gaps.amin(0))
        self._size = torch.maximum(self._size, exact.abs().nan_to_num(0).amax(1))

    def moved(self, inputs: Tensor, moves: Tensor) -> None:
        """Learn that some inputs, by their numbers [k], move some of the outputs: bool [r, k, d_out]."""
        self._moves = self._moves.expand(-1, -1, moves.shape[2]).contiguous()
        self._moves[:, inputs] |= moves
