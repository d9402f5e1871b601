"""Differences between the two ends of a move, where either evaluation may have failed, in requests of limited size.

`column_vjp` computes a gradient from differences along one input, or one group of inputs, at a time.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bondgrad.estimators._estimator import Evaluate, Site, within_limits
from bondgrad.measuring._moves import one_input_moved
from bondgrad.structure._groups import GroupSubset


def chunks(batch: int, items: int, points: int, max_rows: int, whole: bool = False) -> list[tuple[slice, slice]]:
    """Divide the points around a batch of rows into requests of at most `max_rows` points.

    If the moves of one row fit into a request, each request has all moves of some rows, so that the points of a row are
    next to each other; otherwise it has some moves of one row. The sizes depend on the arguments alone, and are as
    equal as possible, since equal shapes give equal rounding.

    Args:
        batch: The number of rows.
        items: The number of moves of each row: groups, or directions.
        points: The number of points of a move.
        max_rows: The largest number of points in a request. The points of one move always stay together.
        whole: Whether every request must contain all rows. Then only moves are divided.

    Returns:
        The rows and the moves of each request.
    """
    room = max_rows // points
    most_rows, most_items = (batch, room // batch) if whole else (room // items, room)
    return [(rows, part) for rows in _even_slices(batch, most_rows) for part in _even_slices(items, most_items)]


def _even_slices(total: int, largest: int) -> list[slice]:
    """Slices that divide range(total) as equally as possible, with at most `largest` numbers each."""
    count = -(-total // max(1, largest))
    return [slice(total * i // count, total * (i + 1) // count) for i in range(count)]


def output_difference(y: Tensor, ok: Tensor | None, base: Tensor) -> Tensor:
    """The difference of the outputs between the two ends of each move: y⁺ - y⁻, [b, j, d_out].

    An end that failed counts as not moved, here and in `input_difference`. What remains is the difference between the
    other end and the row itself.

    Args:
        y: [b, j, ends, d_out] the outputs at one or two ends of j moves of each row. A single end is compared with the
            row itself.
        ok: [b, j, ends, d_out or 1] which of them did not fail; None: all.
        base: [b, d_out] the outputs at the rows themselves.
    """
    if ok is not None:
        y = torch.where(ok, y, base[:, None, None, :])
    first, *rest = y.unbind(2)
    return first - (rest[0] if rest else base.unsqueeze(1))


def loss_change(y: Tensor, ok: Tensor | None, base: Tensor, gy: Tensor) -> Tensor:
    """The first-order change of the loss between the two ends of each move: gy·(y⁺ - y⁻), [b, j].

    The outputs are subtracted first: gy·y⁺ - gy·y⁻ would lose to rounding the digits that carry the derivative.

    Args:
        y: [b, j, ends, d_out] as for `output_difference`.
        ok: [b, j, ends] which of the evaluations did not fail; None: all.
        base: [b, d_out] the outputs at the rows themselves.
        gy: [b, d_out] the gradient of the loss.
    """
    change = output_difference(y, None if ok is None else ok.unsqueeze(3), base)
    if change.is_cuda:  # bmm reads the memory once; on a CPU it would be slower
        return torch.bmm(change, gy.to(change.dtype).unsqueeze(2)).squeeze(2)
    return change.mul_(gy.unsqueeze(1)).sum(2)


def input_difference(ends: Sequence[Tensor], ok: Tensor | None, x: Tensor) -> Tensor:
    """The distance between the two ends of each move, as rounding and limits left it: x⁺ - x⁻, shaped like x.

    It is zero where all ends failed, which makes a slope NaN.

    Args:
        ends: The values of the inputs at one or two ends, each shaped like x. A single end is compared with x.
        ok: [..., ends] which of the evaluations did not fail; None: all.
        x: [...] the values of the inputs in the rows themselves.
    """
    if ok is not None:
        ends = [torch.where(ok[..., side], end, x) for side, end in enumerate(ends)]
    return ends[0] - (ends[1] if len(ends) == 2 else x)


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
    moved = (x + delta if sign > 0 else x - delta for sign in signs)
    ends = [within_limits(end, site.low, site.high, site.grid) for end in moved]  # [B, d] each
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
            g[rows, part.inputs] = slopes.to(g.dtype)  # outputs may be more precise than x
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
