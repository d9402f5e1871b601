"""What all methods that perturb parameters have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from bondgrad.errors import positive_float

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
        for p in self.params:
            if not (isinstance(p, Tensor) and p.is_leaf and p.dtype.is_floating_point):
                raise TypeError("params must be leaf tensors of floating point, such as module.parameters()")
        self.mu = positive_float("mu", mu)

    def estimate(self, closure: Closure) -> None:
        """Overwrite the `.grad` of every parameter. Whatever happens, the parameters themselves stay bit for bit.

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
        """One gradient for each parameter, shaped like it. The parameters may be left at any values."""
