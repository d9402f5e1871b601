"""The convolution that all networks for pictures are made of."""

from torch import nn


def convolution(n_in: int, n_out: int, size: int, stride: int = 1) -> nn.Conv2d:
    """Square, padded so that stride 1 keeps the picture's size, with He's initial weights.

    It has no bias: the batch normalisation that follows, here or in the next layer, would take it out again. The
    weights are scaled by the outputs, as in the networks' own papers, which keeps the size of gradients.
    """
    layer = nn.Conv2d(n_in, n_out, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer
