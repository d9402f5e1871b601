"""One input moved at a time: the work shared by central and forward differences."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bondgrad.estimators._estimator import Evaluate, Site, change, chunks, clamped, span


def column_vjp(site: Site, evaluate: Evaluate, max_rows: int, signs: Sequence[int]) -> Tensor:
    """Differences along each input, between x + delta and x (`signs` = (1,)) or x - delta (`signs` = (1, -1))."""
    x, delta = site.x, site.delta[0]  # [B, d] each
    batch, d = x.shape
    ends = [clamped(x + delta if sign > 0 else x - delta, site.low, site.high) for sign in signs]
    if batch * d * len(signs) <= max_rows:  # nothing to cut: usual for small boxes, where every operation counts
        return _slopes(site, evaluate, ends, slice(0, batch), slice(0, d))
    g = torch.empty_like(x)
    for rows, inputs in chunks(batch, d, len(signs), max_rows):
        part = site._replace(x=x[rows], y=site.y[rows], gy=site.gy[rows])
        g[rows, inputs] = _slopes(part, evaluate, [end[rows, inputs] for end in ends], rows, inputs)
    return g


def _slopes(site: Site, evaluate: Evaluate, ends: list[Tensor], rows: slice, inputs: slice) -> Tensor:
    """The slopes [b, j] along j inputs of b rows, `ends` [b, j] being where those inputs are moved to."""
    x = site.x
    (b, d), (_, j) = x.shape, ends[0].shape
    points = x.view(b, 1, 1, d).expand(b, j, len(ends), d).clone(memory_format=torch.contiguous_format)
    points.diagonal(inputs.start, 1, 3).copy_(torch.stack(ends, 1))
    y, ok = evaluate(points, rows)  # [b, j, ends, d_out], [b, j, ends]
    return change(y, ok, site.y, site.gy).div_(span(ends, ok, x if j == d else x[:, inputs]))
