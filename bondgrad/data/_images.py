"""Pictures with a class each, as they are in the files: bytes."""

import hashlib
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Images(NamedTuple):
    """A data set of pictures. `Augmentation` makes of them what a network takes."""

    x_train: Tensor  # uint8 [N, C, H, W]
    y_train: Tensor  # int64 [N]
    x_test: Tensor  # uint8 [M, C, H, W]
    y_test: Tensor  # int64 [M]
    mean: tuple[float, ...]  # of the training pictures' pixels, per channel, where white is 1
    deviation: tuple[float, ...]
    classes: int


def images(train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray], classes: int) -> Images:
    """From pictures uint8 [N, C, H, W] and labels [N], of training and of testing."""
    # Copied: the arrays may be views of a file's bytes, which must not be written to, and keep all of it in memory.
    x_train, x_test = (torch.tensor(x) for x, _ in (train, test))
    y_train, y_test = (torch.tensor(y, dtype=torch.int64) for _, y in (train, test))
    return Images(x_train, y_train, x_test, y_test, *_statistics(x_train), classes)


def _statistics(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel of bytes [N, C, H, W], exact: from how often each byte is there."""
    value = torch.arange(256, dtype=torch.float64) / 255
    share = torch.stack([torch.bincount(x[:, c].flatten(), minlength=256) for c in range(x.shape[1])]).double()
    share /= share.sum(1, keepdim=True)  # [C, 256]
    mean = share @ value
    variance = (share * (value - mean[:, None]).square()).sum(1)
    return tuple(mean.tolist()), tuple(variance.sqrt().tolist())


def check_sum(name: str, data: bytes | memoryview, kind: str, expected: str, home: str) -> None:
    """Refuse bytes that are not those of the published file."""
    found = hashlib.new(kind, data, usedforsecurity=False).hexdigest()
    if found != expected:
        raise ValueError(
            f"{name} is not what was published: its {kind} is {found}, not {expected}. Remove it, and download it "
            f"again from {home}"
        )
