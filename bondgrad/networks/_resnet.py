"""ResNet-101 for pictures of about 28×28 pixels."""

from torch import Tensor, nn
from torch.nn import functional

from bondgrad.errors import positive_int
from bondgrad.networks._convolution import convolution

STAGES = ((64, 3), (128, 4), (256, 23), (512, 3))  # width of the bottleneck, blocks
EXPANSION = 4


def resnet101(out_features: int, *, in_channels: int = 1) -> nn.Module:
    """ResNet-101 (He et al., 2016): [N, in_channels, 28, 28] -> [N, out_features].

    It begins with a 3×3 convolution of stride 1 and does not pool: 28 pixels leave nothing to throw away. The stages
    see 28, 14, 7 and 4 of them, which takes 1.97 billion multiplications a picture. (The beginning that is meant for
    224 pixels would leave 7, 4, 2 and 1; it takes 0.15 billion.)

    Args:
        out_features: Outputs of the linear layer at the end.
        in_channels: Colours.
    """
    width = STAGES[0][0]
    modules: list[nn.Module] = [convolution(in_channels, width, 3), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    for stage, (bottleneck, blocks) in enumerate(STAGES):
        for block in range(blocks):
            modules.append(_Bottleneck(width, bottleneck, stride=2 if stage and not block else 1))
            width = EXPANSION * bottleneck
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*modules, *head, nn.Linear(width, positive_int("out_features", out_features)))


class _Bottleneck(nn.Module):
    """Three convolutions beside a shortcut: [N, n_in, H, W] -> [N, 4·width, H/stride, W/stride].

    The stride is in the 3×3 convolution, where every pixel is still seen; in the 1×1 before it, where the paper has
    it, three of four would be skipped.
    """

    def __init__(self, n_in: int, width: int, stride: int) -> None:
        super().__init__()
        n_out = EXPANSION * width
        last = nn.BatchNorm2d(n_out)
        # The block begins as its shortcut alone (Goyal et al., 2017): a hundred layers learn from the first step on.
        nn.init.zeros_(last.weight)
        self.residual = nn.Sequential(
            *(convolution(n_in, width, 1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(convolution(width, width, 3, stride), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(convolution(width, n_out, 1), last),
        )
        self.shortcut: nn.Module = nn.Identity()
        if n_in != n_out:
            self.shortcut = nn.Sequential(convolution(n_in, n_out, 1, stride), nn.BatchNorm2d(n_out))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.residual(x) + self.shortcut(x), inplace=True)
