"""Feed-forward networks."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import nn


def ffnn(sizes: Sequence[int], activation: Callable[[], nn.Module] = nn.Tanh) -> nn.Sequential:
    """Linear layers of the given sizes, with an activation between them and none at the end.

    Example:
        >>> ffnn([8, 100, 5], nn.ReLU)[1]
        ReLU()
    """
    layers: list[nn.Module] = []
    for n_in, n_out in pairwise(sizes):
        layers += [nn.Linear(n_in, n_out), activation()]
    return nn.Sequential(*layers[:-1])
