"""Few groups: colouring the graph in which two inputs are joined if some output depends on both."""

import numpy as np
import torch
from torch import Tensor


def colour(depends: Tensor) -> Tensor:
    """Groups of inputs that share no output, as few as can be found quickly: [d] numbers from 0 on.

    DSATUR (Brélaz 1979): next comes the input whose neighbours have the most different colours, and of those with the
    most neighbours; it gets the first colour that none of them has. On arrays this takes a few milliseconds for 500
    inputs, where networkx needs seconds.

    Args:
        depends: [d_out, d] bool.
    """
    used = depends.cpu().float()
    joined = ((used.T @ used) > 0).fill_diagonal_(False).numpy()  # [d, d]
    d = len(joined)
    colours = np.full(d, -1)
    near = np.zeros((d, d), bool)  # [input, colour]: some neighbour has it
    urgency = joined.sum(1) / (d + 1)
    for _ in range(d):
        i = int(urgency.argmax())
        colours[i] = near[i].argmin()
        urgency[i] = -np.inf
        neighbours = np.flatnonzero(joined[i])
        new = neighbours[~near[neighbours, colours[i]]]
        near[new, colours[i]] = True
        urgency[new] += 1
    return torch.from_numpy(colours)


def lower_bound(depends: Tensor) -> int:
    """The least number of groups there can be: inputs that one output depends on must move apart."""
    return max(1, int(depends.sum(1).max()))
