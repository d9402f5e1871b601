"""Where autograd meets estimation, in plain eager code; `_operators` does the same for compilers and transforms."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from bondgrad.errors import BoxError

Vjp = Callable[..., Tensor]  # (x, y, gy, *context) -> g


def attach(x: Tensor, y: Tensor, vjp: Vjp, context: tuple[Tensor, ...]) -> Tensor:
    """A copy of y, in the dtype of x, whose gradient flows to x as vjp(x, y, gy, *context) says.

    Args:
        x: [B, d] in the graph.
        y: [B, d_out] the box there, computed outside autograd.
        vjp: Called in the backward pass.
        context: Kept for it. Writing into one before the backward pass is an error, as usual.
    """
    return Bridge.apply(x, y, vjp, *context)  # type: ignore[no-untyped-call, no-any-return]


def refuse_forward_mode(*_: Any) -> Any:  # noqa: ANN401
    """Say what to do instead."""
    raise BoxError(
        "forward-mode derivatives (torch.func.jvp, jacfwd, hessian) do not pass through a BlackBox: use vjp, jacrev or "
        "backward() instead"
    )


class Bridge(torch.autograd.Function):
    """See `attach`."""

    jvp = staticmethod(refuse_forward_mode)  # type: ignore[assignment]

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, vjp: Vjp, *context: Tensor) -> Tensor:  # noqa: ANN401
        """See `attach`."""
        ctx.save_for_backward(x, y, *context)
        ctx.vjp = vjp
        return y.to(x.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """From gy [B, d_out] to g [B, d]."""
        x, y, *context = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            g = Once.apply(ctx.vjp(x.detach(), y, gy.detach(), *context), x, gy)  # type: ignore[no-untyped-call]
        else:
            g = ctx.vjp(x, y, gy, *context)
        return g, None, None, *(None for _ in context)


def check_tangent(x: Tensor) -> None:
    """Refuse an x with a tangent, which would otherwise be lost without a word where no gradient is wanted."""
    if forward_ad._current_level < 0:
        return
    # A compiler sees no tangents, but would lose them.
    if torch.compiler.is_compiling() or forward_ad.unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
        refuse_forward_mode()


class Once(torch.autograd.Function):
    """Stands where a second derivative would have to pass, and refuses it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(g: Tensor, *_: Tensor) -> Tensor:
        """A copy of g, which depends on the other arguments in a way that is not known."""
        return g.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ANN401
        """Nothing to keep."""

    @staticmethod
    def backward(_ctx: Any, *_: Tensor) -> Any:  # noqa: ANN401
        """Refuse."""
        raise BoxError(
            "second derivatives through a BlackBox are not estimated: leave out create_graph=True, or keep the terms "
            "that need them away from the box"
        )
