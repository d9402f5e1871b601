"""The paper's structured black boxes, as far as benchmarks need them."""

import math

import torch
from torch import Tensor, nn

from bondgrad.networks import ffnn


class Parallel(nn.Module):
    """Networks side by side, each with inputs and outputs of its own."""

    def __init__(self, blocks: int = 100, n_in: int = 5, hidden: int = 100, n_out: int = 5) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(blocks, n_in, hidden) / math.sqrt(n_in))
        self.w2 = nn.Parameter(torch.randn(blocks, hidden, n_out) / math.sqrt(hidden))

    def forward(self, x: Tensor) -> Tensor:
        """[N, blocks·n_in] -> [N, blocks·n_out]."""
        by_block = x.view(len(x), self.w1.shape[0], -1).transpose(0, 1)
        return (torch.tanh(by_block @ self.w1) @ self.w2).transpose(0, 1).reshape(len(x), -1)


class Tiled(nn.Module):
    """One network for consecutive groups of inputs: the shape of the paper's Rockmelon."""

    def __init__(self, groups: int = 60) -> None:
        super().__init__()
        self.groups, self.network = groups, ffnn([10, 500, 500, 500, 500, 2])

    def forward(self, x: Tensor) -> Tensor:
        """[N, groups·10] -> [N, groups·2]."""
        return self.network(x.view(len(x) * self.groups, -1)).view(len(x), -1)


class Echo(nn.Module):
    """An echo state network: s_t = tanh(W s_{t-1} + V x_t), y_t = U s_t. Counts the time steps it was asked for."""

    def __init__(self, spectral_radius: float, d: int = 5, hidden: int = 200, d_out: int = 5) -> None:
        super().__init__()
        w = torch.rand(hidden, hidden) * 2 - 1
        self.w = nn.Parameter(w * (spectral_radius / torch.linalg.eigvals(w).abs().max()))
        self.v = nn.Parameter(torch.rand(hidden, d) * 2 - 1)
        self.u = nn.Parameter(torch.randn(d_out, hidden) / math.sqrt(hidden))
        self.time_steps = 0

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """[N, T, d] and [N, hidden] -> [N, T, d_out] and [N, hidden]."""
        self.time_steps += x.shape[0] * x.shape[1]
        states = []
        for u in (x @ self.v.T).unbind(1):
            state = torch.tanh(torch.addmm(u, state, self.w.T))
            states.append(state)
        return torch.stack(states, 1) @ self.u.T, state
