"""What many tests need."""

import pytest
import torch

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])


def gradient(layer, x, gy, *context):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(layer(x, *context), x, gy)[0]


def close(g, exact, tolerance=1e-3):
    return float((g - exact).norm() / exact.norm()) < tolerance


def same_state(a, b, but=()):
    """Whether two states are equal, down to the last bit; values with a key in `but` are not looked at."""

    def equal(u, v):
        if isinstance(u, torch.Tensor) or isinstance(v, torch.Tensor):
            return type(u) is type(v) and torch.equal(u, v)
        if isinstance(u, (tuple, list)):
            return len(u) == len(v) and all(map(equal, u, v))
        return u.keys() == v.keys() and all(k in but or equal(u[k], v[k]) for k in u) if isinstance(u, dict) else u == v

    return equal(dict(a), dict(b))


def root(x):
    return x.sqrt()  # NaN below zero


def noisy(box, sigma, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def fn(x):
        y = box(x)
        return y + sigma * torch.randn(y.shape, dtype=y.dtype, generator=generator)

    return fn
