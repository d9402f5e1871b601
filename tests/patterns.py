"""Which outputs depend on which inputs, for tests."""

import torch


def blocks(count, n_in, n_out):
    return torch.kron(torch.eye(count), torch.ones(n_out, n_in)).bool()


def banded(d, width):
    i = torch.arange(d)
    return (i[:, None] - i).abs() <= width


def column_arrow(d):
    pattern = torch.eye(d).bool()
    pattern[:, 0] = True
    return pattern


def grid(side):
    x, y = torch.arange(side * side) // side, torch.arange(side * side) % side
    return ((x[:, None] - x).abs() + (y[:, None] - y).abs()) <= 1


def shuffled(pattern, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (torch.randperm(n, generator=generator) for n in pattern.shape)
    return pattern[rows][:, columns]


PATTERNS = {
    "blocks": blocks(4, 3, 2),
    "shuffled blocks": shuffled(blocks(4, 3, 2)),
    "banded": banded(12, 1),
    "column arrow": column_arrow(12),
    "grid": grid(4),
    "random": torch.rand(10, 15, generator=torch.Generator().manual_seed(1)) < 0.15,
    "an input without outputs": torch.tensor([[1, 0, 0], [0, 0, 1]]).bool(),
    "nothing": torch.zeros(3, 4).bool(),
    "dense": torch.ones(3, 4).bool(),
}
