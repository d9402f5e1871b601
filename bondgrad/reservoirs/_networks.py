"""The paper's random reservoirs: networks whose weights stay as they were drawn."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from bondgrad.errors import positive_float, positive_int
from bondgrad.networks import ffnn
from bondgrad.reservoirs._reservoir import Reservoir, random_numbers
from bondgrad.structure import Blocks, Sequence


class Fixed(Reservoir):
    """One hidden layer with tanh, fully connected: no two inputs can move together.

    Args:
        d_in: Inputs.
        hidden: Nodes of the hidden layer.
        d_out: Outputs.
        seed: Of the weights. None: from torch's own random numbers.

    Example:
        >>> box = bondgrad.BlackBox(Fixed(5, 500, 5, seed=0), in_features=5)
        >>> sum(p.numel() for p in box.fn.parameters())
        5505
    """

    def __init__(self, d_in: int, hidden: int, d_out: int, *, seed: int | None = None) -> None:
        super().__init__(d_in, d_out)
        with random_numbers(seed):
            self.network = ffnn([d_in, positive_int("hidden", hidden), d_out]).requires_grad_(False)

    def answer(self, x: Tensor) -> Tensor:
        """[N, d_in] -> [N, d_out]."""
        y: Tensor = self.network(x)
        return y


class Parallel(Reservoir):
    """Networks side by side, each with inputs and outputs of its own; all in one product.

    One input of every network moves at the same time, and a gradient costs as much as that of one of them.

    Args:
        blocks: Networks.
        n_in: Inputs of each.
        hidden: Nodes of its hidden layer.
        n_out: Outputs of each.
        seed: Of the weights. None: from torch's own random numbers.
    """

    def __init__(self, blocks: int, n_in: int, hidden: int, n_out: int, *, seed: int | None = None) -> None:
        super().__init__(positive_int("blocks", blocks) * n_in, blocks * n_out)
        self.blocks, self.structure = blocks, Blocks(n_in, n_out)
        sizes = [n_in, positive_int("hidden", hidden), n_out]
        with random_numbers(seed):
            networks = [ffnn(sizes) for _ in range(blocks)]  # as `Fixed` draws them
        first, second = ([network[layer] for network in networks] for layer in (0, 2))
        self.weight1, self.bias1 = _stacked(first)
        self.weight2, self.bias2 = _stacked(second)

    def answer(self, x: Tensor) -> Tensor:
        """[N, blocks·n_in] -> [N, blocks·n_out]."""
        by_block = x.view(len(x), self.blocks, self.in_features // self.blocks).transpose(0, 1)
        hidden = torch.tanh(torch.baddbmm(self.bias1, by_block, self.weight1))
        return torch.baddbmm(self.bias2, hidden, self.weight2).transpose(0, 1).flatten(1)


def _stacked(layers: list[Any]) -> tuple[nn.Parameter, nn.Parameter]:
    """Weights [blocks, in, out] and biases [blocks, 1, out] of linear layers."""
    weight = torch.stack([layer.weight.detach().T for layer in layers])
    bias = torch.stack([layer.bias.detach()[None] for layer in layers])
    return nn.Parameter(weight, requires_grad=False), nn.Parameter(bias, requires_grad=False)


class EchoState(Reservoir):
    """A recurrent network, s_t = tanh(W s_{t-1} + V x_t), read out by y_t = U s_t: it remembers, and forgets.

    It maps sequences, [N, T, d_in] -> [N, T, d_out], which begin with nothing to remember. Give `BlackBox` its `start`,
    and it goes on from call to call; a batch of rows [T, d_in] is then one sequence.

    Args:
        d_in: Inputs.
        hidden: Nodes.
        d_out: Outputs.
        spectral_radius: Of W: by about this factor memory fades in one time step, or faster.
        horizon: Time steps after which an input is forgotten, as in `Sequence`. "auto": measured while training.
        seed: Of the weights. None: from torch's own random numbers.

    Example:
        >>> echo = EchoState(5, 200, 5, spectral_radius=0.5, seed=0)
        >>> box = bondgrad.BlackBox(echo, in_features=5, state=echo.start)
        >>> box(torch.randn(64, 5)).shape
        torch.Size([64, 5])
    """

    start: Tensor  # [1, hidden] the state of a network that has seen nothing

    def __init__(
        self,
        d_in: int,
        hidden: int,
        d_out: int,
        *,
        spectral_radius: float = 0.5,
        horizon: int | str | None = "auto",
        seed: int | None = None,
    ) -> None:
        super().__init__(d_in, d_out)
        hidden = positive_int("hidden", hidden)
        self.structure = Sequence(horizon)
        with random_numbers(seed):
            w = torch.rand(hidden, hidden) * 2 - 1
            v = torch.rand(hidden, d_in) * 2 - 1
            u = torch.randn(d_out, hidden) / math.sqrt(hidden)
        w *= positive_float("spectral_radius", spectral_radius) / torch.linalg.eigvals(w).abs().max()
        self.w, self.v, self.u = (nn.Parameter(weight, requires_grad=False) for weight in (w, v, u))
        self.register_buffer("start", torch.zeros(1, hidden, device=w.device), persistent=False)

    def answer(self, x: Tensor, state: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """[N, T, d_in] -> [N, T, d_out]; given a state [N, hidden], also the one after the last time step."""
        now = self.start.expand(len(x), -1) if state is None else state
        states = []
        for driven in (x @ self.v.T).unbind(1):  # [N, hidden]
            now = torch.tanh(torch.addmm(driven, now, self.w.T))
            states.append(now)
        y = torch.stack(states, 1) @ self.u.T
        return y if state is None else (y, now)
