"""What can be told of a function without calling it: the arrays that it takes, and whether it takes a seed."""

import functools
import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from bondgrad.calling._signature import find_interfaces, seed_position

TORCH_FIRST, NUMPY_FIRST = ("torch", "numpy"), ("numpy", "torch")
gain = np.ones(3)


def by_array(x: np.ndarray, other: torch.Tensor):
    return x


def by_typed_array(x: npt.NDArray[np.float64]):
    return x


def by_tensor(x: "torch.Tensor", other: np.ndarray):
    return x


def names_numpy(x):
    return np.sin(x)


def names_numpy_inside(x):
    return [row for row in map(lambda r: np.sin(r), x)]  # noqa: C416, C417 - in a function of its own


def names_an_array(x):
    return x * gain


def names_both(x):
    return torch.from_numpy(np.sin(x.numpy()))


def names_neither(x):
    return x * math.pi


def closes_over(value):
    def fn(x):
        return x * value

    return fn


def closes_over_what_is_not_there_yet():
    def fn(x):
        return later(x)

    found = find_interfaces(fn)
    later = np.sin
    return found, later


class CallsNumpy:
    def __call__(self, x):
        return np.sin(x)

    def method(self, x):
        return np.cos(x)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (nn.Identity(), ("torch",)),
        (np.tanh, ("numpy",)),
        (by_array, ("numpy",)),
        (by_typed_array, ("numpy",)),
        (by_tensor, ("torch",)),
        (names_numpy, NUMPY_FIRST),
        (names_numpy_inside, NUMPY_FIRST),
        (names_an_array, NUMPY_FIRST),
        (names_both, TORCH_FIRST),
        (names_neither, TORCH_FIRST),
        (closes_over(np.ones(3)), NUMPY_FIRST),
        (closes_over(torch.ones(3)), TORCH_FIRST),
        (closes_over(3.0), TORCH_FIRST),
        (CallsNumpy(), NUMPY_FIRST),
        (CallsNumpy().method, NUMPY_FIRST),
        (functools.partial(functools.partial(names_numpy)), NUMPY_FIRST),
        (math.sin, TORCH_FIRST),  # a builtin, of which there is no code to look at
        (torch.sin, TORCH_FIRST),
    ],
)
def test_which_arrays_are_tried_in_which_order(fn, expected):
    assert find_interfaces(fn) == expected


def test_a_variable_that_is_not_assigned_yet_tells_nothing():
    assert closes_over_what_is_not_there_yet()[0] == TORCH_FIRST


class TakesSeed(nn.Module):
    def forward(self, x, seed):
        return x


@pytest.mark.parametrize(
    ("fn", "position"),
    [
        (lambda x: x, None),
        (lambda x, seed: x, 1),
        (lambda x, context, seed=0: x, 2),
        (lambda x, *, seed: x, math.inf),
        (lambda x, *context, seed=0: x, math.inf),
        (lambda seed: seed, None),  # so the rows are called
        (lambda x, *seed: x, None),
        (lambda x, **seed: x, None),
        (lambda x, seed, /: x, None),  # which cannot be given by name
        (TakesSeed(), 1),
        (math.hypot, None),  # a builtin that does not say what it takes
    ],
)
def test_where_a_seed_is_taken(fn, position):
    assert seed_position(fn) == position
