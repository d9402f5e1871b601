"""One input, or one group of inputs, moved at a time: the work shared by central and forward differences."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bondgrad.estimators._differences import chunks, input_difference, loss_change, output_difference, within_limits
from bondgrad.estimators._estimator import Evaluate, Site
from bondgrad.measuring._moves import one_input_moved
from bondgrad.structure._groups import GroupSubset


def column_vjp(site: Site, evaluate: Evaluate, max_rows: int, signs: Sequence[int]) -> Tensor:
    """The gradient [B, d] from differences along each input by itself, or along each group of inputs.

    Args:
        site: Where the gradient is wanted. Its first perturbation is used.
        evaluate: Evaluates the box.
        max_rows: How many points may exist at one time.
        signs: (1,) for differences between x + delta and x, (1, -1) for those between x + delta and x - delta.
    """
    x, delta, groups = site.x, site.delta[0], site.groups  # [B, d] each of x and delta
    batch, d = x.shape
    ends = [within_limits(x + delta if sign > 0 else x - delta, site.low, site.high) for sign in signs]  # [B, d] each
    if groups is None and batch * d * len(signs) <= max_rows:
        # One request is usual for small boxes, where every tensor operation counts.
        return _slopes(site, evaluate, ends, slice(0, batch), slice(0, d))
    g = torch.zeros_like(x)
    for rows, which in chunks(batch, d if groups is None else groups.count, len(signs), max_rows, site.whole):
        near = site._replace(x=x[rows], y=site.y[rows], gy=site.gy[rows])
        if groups is None:
            g[rows, which] = _slopes(near, evaluate, [end[rows, which] for end in ends], rows, which)
        else:
            part = groups.subset(which, x.device)
            slopes = _grouped_slopes(near, evaluate, [end[rows] for end in ends], rows, part)
            g[rows, part.inputs] = slopes.to(g.dtype)  # a box may answer in higher precision than x has
    return g


def _slopes(site: Site, evaluate: Evaluate, ends: list[Tensor], rows: slice, inputs: slice) -> Tensor:
    """The slopes [b, j] along j inputs of b rows, given the values `ends` [b, j] that these inputs are moved to."""
    x = site.x  # [b, d]
    y, ok = evaluate(one_input_moved(x, inputs, torch.stack(ends, 1)), rows)  # [b, j, ends, d_out], [b, j, ends]
    change = loss_change(y, ok, site.y, site.gy)  # [b, j]
    return change.div_(input_difference(ends, ok, x if ends[0].shape == x.shape else x[:, inputs]))


def _grouped_slopes(site: Site, evaluate: Evaluate, ends: list[Tensor], rows: slice, part: GroupSubset) -> Tensor:
    """The slopes [b, n] along the n inputs of j groups, given the values `ends` [b, d] that all inputs are moved to."""
    x, inputs = site.x, part.inputs
    points = torch.where(part.moved[:, None], torch.stack(ends, 1)[:, None], x[:, None, None])  # [b, j, ends, d]
    y, ok = evaluate(points, rows)  # [b, j, ends, d_out], [b, j, ends]
    moved, usable = (None, None) if ok is None else part.usable(torch.isfinite(y))  # [b, n, ends], [b, j, ends, d_out]
    products = output_difference(y, usable, site.y).mul_(site.gy.unsqueeze(1))  # [b, j, d_out]
    return part.sum_by_input(products).div_(input_difference([end[:, inputs] for end in ends], moved, x[:, inputs]))
