"""California Housing, shipped with the package."""

import functools
import lzma
from importlib.resources import files
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class CaliforniaHousing(NamedTuple):
    """A split of the data, ready for training. Targets are in units of 10,000 USD."""

    x_train: Tensor  # [16512, 8] standardised by the training rows' mean and standard deviation
    y_train: Tensor  # [16512, 1]
    x_test: Tensor  # [4128, 8]
    y_test: Tensor  # [4128, 1]


def california_housing(seed: int) -> CaliforniaHousing:
    """The 20,640 districts of the 1990 census (Pace and Barry, 1997), split 80/20 by `seed`.

    The table is scikit-learn's, to the last digit: eight features and the median house value.
    """
    table = read_table()
    order = np.random.default_rng(seed).permutation(len(table))
    x, y = table[order, :8], table[order, 8:] * 10  # from 100,000 to 10,000 USD
    cut = len(table) * 4 // 5
    x = (x - x[:cut].mean(0)) / x[:cut].std(0)
    parts = (x[:cut], y[:cut], x[cut:], y[cut:])
    return CaliforniaHousing(*(torch.from_numpy(part).float() for part in parts))


@functools.cache
def read_table() -> np.ndarray:
    """The raw table, float64 [20640, 9]."""
    path = files("bondgrad.data") / "california_housing.csv.xz"
    with path.open("rb") as packed, lzma.open(packed, "rt") as lines:
        return np.loadtxt(lines, delimiter=",", skiprows=1)
