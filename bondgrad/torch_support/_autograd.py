"""The layer in autograd's graph: `Bridge` in eager code, two opaque operators for compilers and `torch.func`.

To `torch.compile` the box is an operator with a gradient: it compiles what is around it. To the transforms of
`torch.func` it is the same operator. Operators take tensors and numbers only, so the layer is passed as a number. In
eager code the bridge does the same with less overhead.
"""

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from bondgrad.errors import BoxError
from bondgrad.step._records import ForwardRecord

if TYPE_CHECKING:
    from bondgrad.step._layer import Layer


def refuse_forward_mode(*_: Any) -> Any:  # noqa: ANN401
    """Raise an error that says what to do instead."""
    raise BoxError(
        "forward-mode derivatives (torch.func.jvp, jacfwd, hessian) do not pass through a BlackBox: use vjp, jacrev or "
        "backward() instead"
    )


class Bridge(torch.autograd.Function):
    """A copy of y, in the dtype of x, whose gradient with respect to x is vjp(x, y, gy, *context)."""

    jvp = staticmethod(refuse_forward_mode)  # type: ignore[assignment]

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, vjp: Callable[..., Tensor], *context: Tensor) -> Tensor:  # noqa: ANN401
        """Copy y, and save what the backward pass needs.

        Args:
            ctx: The context of autograd.
            x: [B, d] the inputs, in the graph.
            y: [B, d_out] the outputs of the box there, computed outside autograd.
            vjp: Called in the backward pass. Returns g [B, d].
            context: Further arguments of vjp. Writing into one before the backward pass is an error, as usual.
        """
        ctx.save_for_backward(x, y, *context)
        ctx.vjp = vjp
        return y.to(x.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """The gradient g [B, d] for gy [B, d_out], the gradient of the loss with respect to y."""
        x, y, *context = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            g = Once.apply(ctx.vjp(x.detach(), y, gy.detach(), *context), x, gy)  # type: ignore[no-untyped-call]
        else:
            g = ctx.vjp(x, y, gy, *context)
        return g, None, None, *(None for _ in context)


def check_tangent(x: Tensor) -> None:
    """Raise BoxError if x has a tangent: without a backward pass it would be dropped silently."""
    if forward_ad._current_level < 0:
        return
    # While compiling, tangents cannot be seen; compiled code would drop them.
    if torch.compiler.is_compiling() or forward_ad.unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
        refuse_forward_mode()


class Once(torch.autograd.Function):
    """A copy of a gradient that raises an error if it is differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(g: Tensor, *_: Tensor) -> Tensor:
        """A copy of g. The other arguments are those that g depends on, so that it is in their graph."""
        return g.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ANN401
        """Save nothing, since `backward` raises an error."""

    @staticmethod
    def backward(_ctx: Any, *_: Tensor) -> Any:  # noqa: ANN401
        """Raise an error that says what to do instead."""
        raise BoxError(
            "second derivatives through a BlackBox are not estimated: leave out create_graph=True, or keep the terms "
            "that need them away from the box"
        )


_layers: "weakref.WeakValueDictionary[int, Layer]" = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register(layer: "Layer") -> int:
    """A number for `lookup`. It does not keep the layer alive."""
    number = next(_numbers)
    _layers[number] = layer
    return number


def lookup(number: int) -> "Layer":
    """The layer that was registered under this number. Raises BoxError if it does not exist any more."""
    layer = _layers.get(number)
    if layer is None:
        raise BoxError("the BlackBox that this graph calls is gone: keep the model as long as what was made of it")
    return layer


def transforming() -> bool:
    """Whether a transform of `torch.func` is active."""
    return torch._C._are_functorch_transforms_active()


def needs_operators() -> bool:
    """Whether a compiler or a transform is active, so that the layer must be an operator."""
    return torch.compiler.is_compiling() or transforming()


# A compiler must not capture the box into CUDA graphs of its own: it may be any code.
TAGS = (torch.Tag.cudagraph_unsafe, torch.Tag.nondeterministic_seeded)


# The operators take rows, [B, ...] each; the number of the layer; the dtype of autocast, if the box runs under it; and
# a ticket, an empty tensor that is new in every call: a compiler would merge two calls with the same arguments into
# one, but the box may return different outputs each time.


@torch.library.custom_op("bondgrad::evaluate", mutates_args=(), tags=TAGS)
def evaluate(rows: list[Tensor], layer: int, autocast: torch.dtype | None, _ticket: Tensor) -> Tensor:
    """The outputs of the box at x [B, d], in float64, which represents the outputs of every dtype exactly.

    The rows are x and the contexts.
    """
    x, *context = rows
    return lookup(layer).evaluate_rows(x.detach(), tuple(context), autocast, graded=False)[0].double()


@torch.library.custom_op("bondgrad::differentiate", mutates_args=(), tags=TAGS)
def differentiate(rows: list[Tensor], layer: int, autocast: torch.dtype | None, _ticket: Tensor, train: bool) -> Tensor:
    """The gradient [B, d] at x [B, d].

    The rows are x, the outputs of `evaluate` there, the gradient gy [B, d_out] of the loss, and the contexts.
    """
    x, y, gy, *context = rows
    box = lookup(layer)
    dtype = torch.promote_types(x.dtype, box.function.dtype)  # of the outputs before `evaluate` made them float64
    return box.differentiate_rows(ForwardRecord(train, autocast), x, y.to(dtype), gy, *context).contiguous()


@evaluate.register_fake
def _(rows: list[Tensor], layer: int, *_: object) -> Tensor:
    if torch.compiler.is_exporting():
        raise BoxError(
            "a model with a BlackBox cannot be exported, since what it calls lives in this process: export the "
            "networks before and after it"
        )
    box, x = lookup(layer), rows[0]
    assert box.out_features is not None  # a layer with an unknown number of outputs is not compiled
    return x.new_empty(len(x), x.shape[1] // box.in_features * box.out_features, dtype=torch.float64)


@differentiate.register_fake
def _(rows: list[Tensor], *_: object) -> Tensor:
    return rows[0].new_empty(rows[0].shape)


def map_rows(operator: Any, info: Any, dims: tuple[Any, ...], rows: list[Tensor], *rest: Any) -> Any:  # noqa: ANN401
    """The rule of an operator for `torch.func.vmap`: the mapped dimension and the rows become one batch."""
    size, given = info.batch_size, zip(rows, dims[0], strict=True)
    mapped = [t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0) for t, dim in given]
    return operator([t.flatten(0, 1) for t in mapped], *rest).unflatten(0, (size, -1)), 0


evaluate.register_vmap(functools.partial(map_rows, evaluate))
differentiate.register_vmap(functools.partial(map_rows, differentiate))


class Opaque(torch.autograd.Function):
    """An autograd function of the two operators: `evaluate` forward, `differentiate` backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, layer: int, autocast: torch.dtype | None, _train: bool, ticket: Tensor, *context: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The outputs of the box in the dtype of x; and in float64, for the backward pass."""
        y = evaluate([x, *context], layer, autocast, ticket)
        return y.to(x.dtype, copy=True), y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ANN401
        """Save what the backward pass needs."""
        x, ctx.layer, ctx.autocast, ctx.train, ticket, *context = inputs
        ctx.save_for_backward(x, output[1], ticket, *context)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, gy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """The gradient with respect to x, by `differentiate`."""
        x, y, ticket, *context = ctx.saved_tensors
        g = differentiate([x.detach(), y, gy.detach(), *context], ctx.layer, ctx.autocast, ticket, ctx.train)
        if not torch.compiler.is_compiling():  # compiled code refuses second derivatives itself
            g = Once.apply(g, x, gy)  # type: ignore[no-untyped-call]
        return g, None, None, None, None, *(None for _ in context)


class Transformed(Opaque):
    """`Opaque` for transforms. Compilers accept neither a `jvp` nor Python objects in the context of autograd."""

    jvp = staticmethod(refuse_forward_mode)  # type: ignore[assignment]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ANN401
        """Save also a check that the box is the same in the backward pass; it keeps the layer alive."""
        Opaque.setup_context(ctx, inputs, output)
        ctx.check = lookup(inputs[1]).unchanged()

    @staticmethod
    def backward(ctx: Any, gy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """As `Opaque.backward`, after a check that the box is that of the forward pass."""
        ctx.check()
        return Opaque.backward(ctx, gy, _)


def attach(x: Tensor, layer: int, autocast: torch.dtype | None, train: bool, context: tuple[Tensor, ...]) -> Tensor:
    """The outputs of the box at x [B, d], by the operators, with a gradient: for compilers and transforms."""
    ticket = torch.empty(0, device=x.device)
    if not torch.compiler.is_compiling():
        parameters = lookup(layer).function.tensors.parameters()
        if any(t is not None and torch._C._functorch.is_batchedtensor(t) for t in parameters):
            raise BoxError("the parameters of a box cannot be mapped over: leave them out of the vmap")
        return Transformed.apply(x, layer, autocast, train, ticket, *context)[0]  # type: ignore[no-untyped-call, no-any-return]
    if transforming():
        raise BoxError("a transform of torch.func over a BlackBox cannot be compiled: transform the compiled model")
    if x.requires_grad and torch.is_grad_enabled():
        return Opaque.apply(x, layer, autocast, train, ticket, *context)[0]  # type: ignore[no-untyped-call, no-any-return]
    # Without a gradient the compiler cannot trace `Opaque`.
    return evaluate([x, *context], layer, autocast, ticket).to(x.dtype)  # type: ignore[no-any-return]
