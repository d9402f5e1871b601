"""DenseNet-BC for pictures of about 32×32 pixels."""

import torch
from torch import Tensor, nn

from bondgrad.errors import positive_int
from bondgrad.networks._convolution import convolution

BLOCKS = 3


def densenet(out_features: int, *, depth: int = 100, growth: int = 24, in_channels: int = 3) -> nn.Module:
    """DenseNet-BC (Huang et al., 2017): [N, in_channels, 32, 32] -> [N, out_features].

    Three dense blocks of (depth - 4) / 6 layers, at 32, 16 and 8 pixels. The last has 684 features by default.

    Args:
        out_features: Outputs of the linear layer at the end.
        depth: Layers with weights, on the longest way: 6 n + 4.
        growth: Features that every layer adds.
        in_channels: Colours.

    Example:
        >>> densenet(500, depth=10, growth=4)(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 500])
    """
    layers, rest = divmod(positive_int("depth", depth) - 4, 2 * BLOCKS)
    if layers < 1 or rest:
        raise ValueError(f"depth must be 10, 16, 22, ... (6 n + 4), got {depth}")
    width = 2 * positive_int("growth", growth)
    modules: list[nn.Module] = [convolution(in_channels, width, 3)]
    for block in range(BLOCKS):
        if block:
            modules += [*_activated(width, width // 2, 1), nn.AvgPool2d(2)]
            width //= 2
        for _ in range(layers):
            modules.append(_DenseLayer(width, growth))
            width += growth
    head = [nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*modules, *head, nn.Linear(width, positive_int("out_features", out_features)))


class _DenseLayer(nn.Module):
    """All features so far, [N, C, H, W], and new ones behind them: [N, C + growth, H, W].

    Every layer copies what came before it, and torch has no way round that: batch normalisation wants its features in
    one piece. Handing on the piece, not a list of its parts, leaves one addition a layer to the backward pass; of a
    list, every part would have its own.
    """

    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        self.new = nn.Sequential(*_activated(width, 4 * growth, 1), *_activated(4 * growth, growth, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, self.new(x)), 1)


def _activated(n_in: int, n_out: int, size: int) -> list[nn.Module]:
    """Normalised, rectified, convolved. Rectified in place: nothing else needs what the normalisation gives."""
    return [nn.BatchNorm2d(n_in), nn.ReLU(inplace=True), convolution(n_in, n_out, size)]
