"""Points at which one input of a row is moved."""

import torch
from torch import Tensor


def one_input_moved(x: Tensor, inputs: slice | Tensor, values: Tensor) -> Tensor:
    """Copies of every row, in each of which one input has another value.

    Args:
        x: [r, d] the rows.
        inputs: The n inputs to be moved one by one: consecutive ones as a slice with start and stop, any others by
            their numbers [n], or by numbers of their own for every row [r, n].
        values: [r, k, n] the k values that each of them gets, the ends of a move.

    Returns:
        [r, n, k, d].
    """
    (r, d), (_, k, n) = x.shape, values.shape
    points = x.view(r, 1, 1, d).expand(r, n, k, d).clone(memory_format=torch.contiguous_format)
    if isinstance(inputs, slice):
        points.diagonal(inputs.start, 1, 3).copy_(values)
    else:
        where = inputs.expand(r, n)[:, :, None, None].expand(r, n, k, 1)
        points.scatter_(3, where, values.transpose(1, 2).unsqueeze(3))
    return points
