"""The one place where autograd meets estimation."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Vjp = Callable[[Tensor, Tensor, Tensor], Tensor]  # (x, y, gy) -> g


def attach(rows: Tensor, x: Tensor, y: Tensor, vjp: Vjp) -> Tensor:
    """A copy of y whose gradient flows to `rows` as vjp(x, y, gy) says.

    Args:
        rows: [B, d] in the graph.
        x: [B, d] the points evaluated for them.
        y: [B, d_out] the box there, computed outside autograd.
        vjp: Called in the backward pass.
    """
    out: Tensor = Bridge.apply(rows, x, y, vjp)  # type: ignore[no-untyped-call]
    return out


class Bridge(torch.autograd.Function):
    """See `attach`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, x: Tensor, y: Tensor, vjp: Vjp) -> Tensor:  # noqa: ANN401
        """See `attach`."""
        ctx.save_for_backward(x, y)
        ctx.vjp = vjp
        return y.to(rows.dtype, copy=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401
        """From gy [B, d_out] to g [B, d]."""
        return ctx.vjp(*ctx.saved_tensors, gy), None, None, None
