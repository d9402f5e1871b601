"""Base classes of methods that perturb parameters: one of all, and one of those that perturb all parameters at once."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import reduce

import torch
from torch import Tensor

from bondgrad.errors import positive_float, positive_int
from bondgrad.torch_support._random import Generators

Closure = Callable[[], "Tensor | float"]  # returns the loss at the present values of the parameters


class ParameterMethod(ABC):
    """Estimates the gradient of a loss from its values at perturbed parameters.

    Args:
        params: The parameters whose gradient is wanted.
        mu: Size of the perturbation.
    """

    def __init__(self, params: Iterable[Tensor], mu: float = 1e-3) -> None:
        if isinstance(params, Tensor):
            raise TypeError("params must be an iterable of tensors: put a single one into a list")
        self.params = list(params)
        if not self.params:
            raise ValueError("params is empty: give the parameters whose gradient is wanted")
        if not all(isinstance(p, Tensor) and p.is_leaf and p.dtype.is_floating_point for p in self.params):
            raise TypeError("params must be leaf tensors of floating point, such as module.parameters()")
        self.mu = positive_float("mu", mu)

    def estimate(self, closure: Closure) -> None:
        """Overwrite the `.grad` of every parameter. The parameters keep their values bit for bit, even on errors.

        Args:
            closure: Returns the loss at the present values of the parameters. It is called without gradients, so it
                must not call backward.
        """
        with torch.no_grad():
            originals = [p.clone() for p in self.params]
            try:
                gradient = self.gradient(closure)
            finally:
                torch._foreach_copy_(self.params, originals)
        for p, g in zip(self.params, gradient, strict=True):
            p.grad = g

    @abstractmethod
    def gradient(self, closure: Closure) -> list[Tensor]:
        """A gradient for each parameter, shaped like it. It may leave the parameters at any values."""


class SimultaneousPerturbation(ParameterMethod):
    """The mean over n random directions of (f(θ⁺) - f(θ⁻)) / (θ⁺ - θ⁻), for each of P parameters.

    A direction in which the loss is not finite is left out. If that leaves none, the gradient is zero.

    Args:
        params: The parameters whose gradient is wanted.
        mu: Size of the perturbation.
        n: Number of random directions.
        seed: The seed of the random numbers. None: drawn from torch's global generator.
    """

    def __init__(self, params: Iterable[Tensor], mu: float = 1e-3, n: int = 1, seed: int | None = None) -> None:
        super().__init__(params, mu)
        self.n = positive_int("n", n)
        self.random = Generators(seed)

    @abstractmethod
    def sizes(self, at: Tensor) -> Tensor:
        """Sizes [P] of the perturbations of parameters with the values at [P]."""

    def uniform(self, at: Tensor) -> Tensor:
        """Random numbers [P] from -1 to 1, in the type and on the device of the parameter values at [P]."""
        return torch.empty_like(at).uniform_(-1, 1, generator=self.random.on(at.device))

    def gradient(self, closure: Closure) -> list[Tensor]:
        """See `ParameterMethod.gradient`."""
        # One vector for all: a network has hundreds of tensors, and a kernel for each would take most of the time.
        start = _flat(self.params)  # [P]
        total = torch.zeros_like(start)
        used = torch.zeros((), device=start.device)  # on the device, so that a CUDA graph can be captured
        loss_dtype = torch.float32 if start.device.type == "mps" else torch.float64  # MPS has no double precision
        for _ in range(self.n):
            delta = torch.copysign(self.sizes(start), self.uniform(start))
            ends, losses = [], []
            for sign in (1, -1):
                torch._foreach_copy_(self.params, _split(torch.add(start, delta, alpha=sign), self.params))
                ends.append(_flat(self.params))
                losses.append(torch.as_tensor(closure(), dtype=loss_dtype, device=start.device))
            difference, span = losses[0] - losses[1], ends[0] - ends[1]  # `span` is what rounding left of 2Δ
            finite = torch.isfinite(difference)
            used += finite
            total += torch.where((span == 0) | ~finite, 0, difference.to(total) / span)
        total /= used.clamp(min=1)
        gradient = [torch.empty_like(p) for p in self.params]  # in their memory format, as fused optimizers require
        torch._foreach_copy_(gradient, _split(total, self.params))
        return gradient


def _flat(params: list[Tensor]) -> Tensor:
    """All parameters as one vector [P], on the device of the first one.

    It is at least in single precision, since a sum of hundreds of numbers stalls in bfloat16.
    """
    dtype = reduce(torch.promote_types, (p.dtype for p in params), torch.float32)
    return torch.cat([p.reshape(-1).to(params[0].device, dtype) for p in params])


def _split(flat: Tensor, params: list[Tensor]) -> list[Tensor]:
    """The counterpart of `_flat`: views of a vector [P] in the shapes of the parameters."""
    parts = torch.split(flat, [p.numel() for p in params])
    return [part.view(p.shape) for part, p in zip(parts, params, strict=True)]
