"""Black boxes that only benchmarks need."""

import math

import torch
from torch import Tensor, nn

from bondgrad.reservoirs import EchoState


class Parallel(nn.Module):
    """Networks side by side, as `bondgrad.reservoirs.Parallel`, but without biases."""

    def __init__(self, blocks: int = 100, n_in: int = 5, hidden: int = 100, n_out: int = 5) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(blocks, n_in, hidden) / math.sqrt(n_in))
        self.w2 = nn.Parameter(torch.randn(blocks, hidden, n_out) / math.sqrt(hidden))

    def forward(self, x: Tensor) -> Tensor:
        """[N, blocks·n_in] -> [N, blocks·n_out]."""
        by_block = x.view(len(x), self.w1.shape[0], -1).transpose(0, 1)
        return (torch.tanh(by_block @ self.w1) @ self.w2).transpose(0, 1).reshape(len(x), -1)


class Echo(EchoState):
    """The paper's echo state network, which counts the time steps it was asked for."""

    def __init__(self, spectral_radius: float) -> None:
        super().__init__(5, 200, 5, spectral_radius=spectral_radius)
        self.time_steps = 0

    def answer(self, x: Tensor, state: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """[N, T, d] and [N, hidden] -> [N, T, d_out] and [N, hidden]."""
        self.time_steps += x.shape[0] * x.shape[1]
        return super().answer(x, state)
