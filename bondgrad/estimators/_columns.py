"""One input, or one group of inputs, moved at a time: the work shared by central and forward differences."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bondgrad.estimators._estimator import Evaluate, Site, change, chunks, clamped, difference, span
from bondgrad.measuring._moves import one_input_moved
from bondgrad.structure._groups import Moves


def column_vjp(site: Site, evaluate: Evaluate, max_rows: int, signs: Sequence[int]) -> Tensor:
    """Differences along each input, between x + delta and x (`signs` = (1,)) or x - delta (`signs` = (1, -1))."""
    x, delta = site.x, site.delta[0]  # [B, d] each
    batch, d = x.shape
    count = d if site.groups is None else site.groups.count
    ends = [clamped(x + delta if sign > 0 else x - delta, site.low, site.high) for sign in signs]
    if site.groups is None and batch * d * len(signs) <= max_rows:
        # Nothing to cut: usual for small boxes, where every operation counts.
        return _slopes(site, evaluate, ends, slice(0, batch), slice(0, d))
    g = torch.zeros_like(x)
    for rows, which in chunks(batch, count, len(signs), max_rows, site.whole):
        near = site._replace(x=x[rows], y=site.y[rows], gy=site.gy[rows])
        if site.groups is None:
            g[rows, which] = _slopes(near, evaluate, [end[rows, which] for end in ends], rows, which)
        else:
            part = site.groups.part(which, x.device)
            slopes = _grouped_slopes(near, evaluate, [end[rows] for end in ends], rows, part)
            g[rows, part.inputs] = slopes.to(g.dtype)  # a box may answer in more digits than x has
    return g


def _slopes(site: Site, evaluate: Evaluate, ends: list[Tensor], rows: slice, inputs: slice) -> Tensor:
    """The slopes [b, j] along j inputs of b rows, `ends` [b, j] being where those inputs are moved to."""
    x = site.x
    d, j = x.shape[1], ends[0].shape[1]
    y, ok = evaluate(one_input_moved(x, inputs, torch.stack(ends, 1)), rows)  # [b, j, ends, d_out], [b, j, ends]
    return change(y, ok, site.y, site.gy).div_(span(ends, ok, x if j == d else x[:, inputs]))


def _grouped_slopes(site: Site, evaluate: Evaluate, ends: list[Tensor], rows: slice, part: Moves) -> Tensor:
    """The slopes [b, n] along the n inputs of some groups, `ends` [b, d] being where all inputs are moved to."""
    x, inputs = site.x, part.inputs
    points = torch.where(part.moved[:, None], torch.stack(ends, 1)[:, None], x[:, None, None])  # [b, j, ends, d]
    y, ok = evaluate(points, rows)  # [b, j, ends, d_out], [b, j, ends]
    spoken = None
    if ok is not None:
        ok, spoken = part.heard(torch.isfinite(y))  # [b, n, ends], [b, j, ends, d_out]
    change = part.total(difference(y, spoken, site.y).mul_(site.gy.unsqueeze(1)))  # [b, n]
    return change.div_(span([end[:, inputs] for end in ends], ok, x[:, inputs]))
