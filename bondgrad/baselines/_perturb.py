"""What the baselines share: moving parameters, asking for the loss, and putting everything back."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import reduce

import torch
from torch import Tensor

Closure = Callable[[], "Tensor | float"]


def checked_parameters(params: Iterable[Tensor]) -> list[Tensor]:
    """The parameters as a list, refused where a gradient could not be stored."""
    if isinstance(params, Tensor):
        raise TypeError("params must be an iterable of tensors: put a single one into a list")
    listed = list(params)
    if not listed:
        raise ValueError("params is empty: give the parameters whose gradient is wanted")
    for p in listed:
        if not (isinstance(p, Tensor) and p.is_leaf and p.dtype.is_floating_point):
            raise TypeError("params must be leaf tensors of floating point, such as module.parameters()")
    return listed


@contextmanager
def restored(params: list[Tensor]) -> Iterator[list[Tensor]]:
    """Copies of the parameters; whatever happens inside, the parameters come back bit for bit."""
    with torch.no_grad():
        originals = [p.clone() for p in params]
        try:
            yield originals
        finally:
            torch._foreach_copy_(params, originals)


def fill_simultaneously(params: list[Tensor], closure: Closure, n: int, draw: Callable[[Tensor], Tensor]) -> None:
    """Set every `.grad` to the mean over n directions of (f(θ⁺) - f(θ⁻)) / (θ⁺ - θ⁻).

    A direction in which the loss is not finite is left out; if that leaves none, the gradient is zero.

    Args:
        params: What is moved, P numbers in all.
        closure: The loss.
        n: Directions.
        draw: One perturbation, shaped like the tensor given, [P].
    """
    with restored(params):
        # As one vector: a network has hundreds of parameters, and a kernel for each of them takes most of the time.
        start = _flat(params)  # [P]
        total = torch.zeros_like(start)
        used = torch.zeros((), device=start.device)  # there, as all that follows, so that a CUDA graph can do it too
        fine = torch.float32 if start.device.type == "mps" else torch.float64  # which has no other
        for _ in range(n):
            delta = draw(start)
            ends, losses = [], []
            for sign in (1, -1):
                torch._foreach_copy_(params, _split(torch.add(start, delta, alpha=sign), params))
                ends.append(_flat(params))
                losses.append(torch.as_tensor(closure(), dtype=fine, device=start.device))
            span = ends[0] - ends[1]  # what rounding left of 2Δ
            difference = losses[0] - losses[1]
            finite = torch.isfinite(difference)
            used += finite
            total += torch.where((span == 0) | ~finite, 0, difference.to(total) / span)
        total /= used.clamp(min=1)
        gradient = [torch.empty_like(p) for p in params]  # as they lie in memory, which fused optimizers ask for
        torch._foreach_copy_(gradient, _split(total, params))
    for p, g in zip(params, gradient, strict=True):
        p.grad = g


def _flat(params: list[Tensor]) -> Tensor:
    """All in one, [P], where the first one is. In single precision at least: in bf16 a sum of hundreds stalls."""
    dtype = reduce(torch.promote_types, (p.dtype for p in params), torch.float32)
    return torch.cat([p.reshape(-1).to(params[0].device, dtype) for p in params])


def _split(flat: Tensor, params: list[Tensor]) -> list[Tensor]:
    """The counterpart of `_flat`: views in the parameters' shapes."""
    parts = torch.split(flat, [p.numel() for p in params])
    return [part.view(p.shape) for part, p in zip(parts, params, strict=True)]
