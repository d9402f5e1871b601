"""Boxes whose Jacobian is known in closed form, written without automatic differentiation."""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor


class ExactBox(ABC):
    """A smooth box and its Jacobian. Weights are drawn from a seed, and used in the dtype and on the device of x."""

    def __init__(self, in_features: int, out_features: int) -> None:
        self.in_features = in_features
        self.out_features = out_features

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """The outputs [N, out_features] at x [N, in_features]."""

    @abstractmethod
    def jacobian(self, x: Tensor) -> Tensor:
        """The Jacobians [N, out_features, in_features] at x [N, in_features]."""

    def vjp(self, x: Tensor, gy: Tensor) -> Tensor:
        """The exact gradient [N, in_features] for gy [N, out_features]."""
        return (gy.unsqueeze(2) * self.jacobian(x)).sum(1)


def _weights(seed: int, *shape: int) -> Tensor:
    """Random weights in float64, with the variance 1 / shape[-1]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator) / math.sqrt(shape[-1])


class Linear(ExactBox):
    """y = A x: every difference is exact up to rounding."""

    def __init__(self, in_features: int = 4, out_features: int = 6, seed: int = 0) -> None:
        super().__init__(in_features, out_features)
        self.a = _weights(seed, out_features, in_features)

    def __call__(self, x: Tensor) -> Tensor:
        """See `ExactBox.__call__`."""
        return x @ self.a.to(x).T

    def jacobian(self, x: Tensor) -> Tensor:
        """See `ExactBox.jacobian`."""
        return self.a.to(x).expand(len(x), -1, -1)


class Quadratic(ExactBox):
    """y_o = xᵀ Q_o x: central differences are exact up to rounding, forward differences are not."""

    def __init__(self, in_features: int = 4, out_features: int = 6, seed: int = 0) -> None:
        super().__init__(in_features, out_features)
        q = _weights(seed, out_features, in_features, in_features)
        self.q = q + q.transpose(1, 2)

    def __call__(self, x: Tensor) -> Tensor:
        """See `ExactBox.__call__`."""
        return torch.einsum("oij,ni,nj->no", self.q.to(x), x, x)

    def jacobian(self, x: Tensor) -> Tensor:
        """See `ExactBox.jacobian`."""
        return 2 * torch.einsum("oij,nj->noi", self.q.to(x), x)


class TanhNetwork(ExactBox):
    """y = W₂ tanh(W₁ x): the frozen networks of the paper."""

    def __init__(self, in_features: int = 4, hidden: int = 16, out_features: int = 6, seed: int = 0) -> None:
        super().__init__(in_features, out_features)
        self.w1 = _weights(seed, hidden, in_features)
        self.w2 = _weights(seed + 1, out_features, hidden)

    def __call__(self, x: Tensor) -> Tensor:
        """See `ExactBox.__call__`."""
        return torch.tanh(x @ self.w1.to(x).T) @ self.w2.to(x).T

    def jacobian(self, x: Tensor) -> Tensor:
        """See `ExactBox.jacobian`."""
        t = torch.tanh(x @ self.w1.to(x).T)
        return torch.einsum("oh,nh,hi->noi", self.w2.to(x), 1 - t * t, self.w1.to(x))


class Waves(ExactBox):
    """y_o = sin(a_o · x): all derivatives exist and none is small."""

    def __init__(self, in_features: int = 4, out_features: int = 6, seed: int = 0) -> None:
        super().__init__(in_features, out_features)
        self.a = _weights(seed, out_features, in_features)

    def __call__(self, x: Tensor) -> Tensor:
        """See `ExactBox.__call__`."""
        return torch.sin(x @ self.a.to(x).T)

    def jacobian(self, x: Tensor) -> Tensor:
        """See `ExactBox.jacobian`."""
        a = self.a.to(x)
        return torch.cos(x @ a.T).unsqueeze(2) * a


class Sparse(ExactBox):
    """y_o = Σ_i sin(a_oi x_i), summed over the inputs that a pattern gives for each output.

    Args:
        depends: [out_features, in_features] bool, True where an output depends on an input.
        seed: The seed for the weights.
    """

    def __init__(self, depends: Tensor, seed: int = 0) -> None:
        super().__init__(depends.shape[1], depends.shape[0])
        self.depends = depends
        self.a = torch.where(depends, _weights(seed, *depends.shape, 1).squeeze(2), 0)

    def __call__(self, x: Tensor) -> Tensor:
        """See `ExactBox.__call__`."""
        return torch.sin(self.a.to(x) * x.unsqueeze(1)).sum(2)

    def jacobian(self, x: Tensor) -> Tensor:
        """See `ExactBox.jacobian`."""
        return self.a.to(x) * torch.cos(self.a.to(x) * x.unsqueeze(1))


class Cubes(ExactBox):
    """y_i = x_i³ - x_i: no output sums over inputs, so no rounding depends on how rows are grouped into calls."""

    def __init__(self, features: int = 5) -> None:
        super().__init__(features, features)

    def __call__(self, x: Tensor) -> Tensor:
        """See `ExactBox.__call__`."""
        return x * x * x - x

    def jacobian(self, x: Tensor) -> Tensor:
        """See `ExactBox.jacobian`."""
        return torch.diag_embed(3 * x * x - 1)
