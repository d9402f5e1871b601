"""What the baselines share: moving parameters, asking for the loss, and putting everything back."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

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
            for p, original in zip(params, originals, strict=True):
                p.copy_(original)


def fill_simultaneously(params: list[Tensor], closure: Closure, n: int, draw: Callable[[Tensor], Tensor]) -> None:
    """Set every `.grad` to the mean over n directions of (f(θ⁺) - f(θ⁻)) / (θ⁺ - θ⁻).

    A direction in which the loss is not finite is left out; if that leaves none, the gradient is zero.

    Args:
        params: What is moved.
        closure: The loss.
        n: Directions.
        draw: One perturbation, shaped like the parameter given.
    """
    # Summed in single precision at least: in bf16 a sum of hundreds stalls.
    total = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in params]
    used = torch.zeros((), device=params[0].device)  # there, as all that follows, so that a CUDA graph can do it too
    fine = torch.float32 if used.device.type == "mps" else torch.float64  # which has no other
    with restored(params) as originals:
        for _ in range(n):
            spans, losses = [], []
            deltas = [draw(p) for p in params]
            for sign in (1, -1):
                for p, original, delta in zip(params, originals, deltas, strict=True):
                    torch.add(original, delta, alpha=sign, out=p)
                spans.append([p.clone() for p in params])
                losses.append(torch.as_tensor(closure(), dtype=fine, device=used.device))
            difference = losses[0] - losses[1]
            finite = torch.isfinite(difference)
            used += finite
            for g, plus, minus in zip(total, *spans, strict=True):
                span = (plus - minus).to(g.dtype)  # what rounding left of 2Δ
                g += torch.where((span == 0) | ~finite, 0, difference.to(g) / span)
    for p, g in zip(params, total, strict=True):
        p.grad = (g / used.clamp(min=1).to(g)).to(p.dtype)
