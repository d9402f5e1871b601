"""Boxes on which step policies are compared: networks, weak spots, and three that nothing was tuned on."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from boxes import Parallel
from torch import Tensor, nn

from bondgrad.networks import ffnn
from bondgrad.structure import Blocks, Structure

Rows = Callable[[Tensor], Tensor]


class Case(NamedTuple):
    """A box between networks."""

    smooth: Rows  # [N, d] -> [N, d_out], for the exact gradient
    answers: Rows  # the same as the box gives it, before noise
    d: int = 5
    d_out: int = 5
    squash: float = 0.0  # the inputs are brought into this range, if it is not 0
    scale: Tensor | None = None  # [d] in which the inputs come
    loss_scale: float = 1.0
    structure: Structure | None = None


def network(weight: float = 1.0) -> nn.Module:
    """5-500-5 with tanh, its weights multiplied."""
    net = ffnn([5, 500, 5]).requires_grad_(False)
    for p in net.parameters():
        p.mul_(weight)
    return net


def exponential() -> Rows:
    """Row by row, slopes differ by orders of magnitude."""
    w = torch.randn(5, 5) / math.sqrt(5)
    return lambda x: torch.exp(5 * x) @ w


def pendulum() -> Rows:
    """A damped pendulum that is pushed in five intervals: where it is after each of them, by Runge-Kutta."""
    push, dt, each = 2.0, 0.1, 8

    def change(s: Tensor, u: Tensor) -> Tensor:
        angle, speed = s.unbind(1)
        return torch.stack((speed, -torch.sin(angle) - 0.2 * speed + push * torch.tanh(u)), 1)

    def run(x: Tensor) -> Tensor:
        s = x.new_tensor([[0.5, 0.0]]).expand(len(x), 2)
        seen = []
        for u in x.unbind(1):
            for _ in range(each):
                k1 = change(s, u)
                k2 = change(s + dt / 2 * k1, u)
                k3 = change(s + dt / 2 * k2, u)
                s = s + dt / 6 * (k1 + 2 * k2 + 2 * k3 + change(s + dt * k3, u))
            seen.append(s[:, 0])
        return torch.stack(seen, 1)

    return run


def interferometer() -> Rows:
    """Light through three fixed mixers with phase shifters between them: five intensities."""
    mixers = [torch.linalg.qr(torch.randn(5, 5, dtype=torch.complex64))[0] for _ in range(3)]

    def run(x: Tensor) -> Tensor:
        light = torch.ones(len(x), 5, dtype=torch.complex64) / math.sqrt(5)
        for mixer in mixers:
            light = (light * torch.exp(1j * x)) @ mixer
        return 5 * light.abs().square()

    return run


def oscillators() -> Rows:
    """Five coupled phases, kicked by the inputs and left to themselves for a while: where they are then (Kuramoto)."""
    own = torch.linspace(-1, 1, 5)

    def run(x: Tensor) -> Tensor:
        phase = x
        for _ in range(40):
            pull = torch.sin(phase.unsqueeze(1) - phase.unsqueeze(2)).mean(2)
            phase = phase + 0.05 * (own + 2 * pull)
        return 2 * torch.sin(phase)

    return run


def enzymes() -> Rows:
    """Hill kinetics: each output saturates in a mixture of concentrations."""
    w = torch.randn(5, 5) / math.sqrt(5)

    def run(x: Tensor) -> Tensor:
        return 2 * torch.sigmoid(2 * (x @ w))  # a / (1 + a), where a is the exponential of the mixture

    return run


def rounded(fn: Rows, decimals: int) -> Rows:
    """With so many decimals."""
    return lambda x: torch.round(fn(x), decimals=decimals)


def only_within(fn: Rows, limit: float) -> Rows:
    """NaN outside."""
    return lambda x: torch.where((x.abs() > limit).any(1, keepdim=True), math.nan, fn(x))


def make(name: str) -> Case:
    """A case by name; its weights come from torch's random numbers."""
    if name == "50 inputs":
        net = Parallel(10, 5, 100, 5).requires_grad_(False)
        return Case(net, net, 50, 50)
    if name == "50 inputs, blocks":
        net = Parallel(10, 5, 100, 5).requires_grad_(False)
        return Case(net, net, 50, 50, structure=Blocks(5, 5))
    if name == "exp(5x)":
        fn = exponential()
        return Case(fn, fn, squash=1.0)
    if name == "pendulum":
        fn = pendulum()
        return Case(fn, fn)
    if name in UNSEEN:
        fn = {"oscillators": oscillators, "interferometer": interferometer, "enzymes": enzymes}[name]()
        return Case(fn, fn)
    net = network(5.0 if name == "weights x 5" else 1.0)
    if name == "inputs 1e-3 to 1e3":
        scale = torch.logspace(-3, 3, 5)
        return Case(fn := lambda x: net(x / scale), fn, scale=scale)
    if name == "3 decimals":
        return Case(net, rounded(net, 3))
    if name == "1 decimal":
        return Case(net, rounded(net, 1))
    if name == "NaN outside":
        return Case(net, only_within(net, 1.5), squash=1.4)
    return Case(net, net, loss_scale={"loss x 1e6": 1e6, "loss x 1e-6": 1e-6}.get(name, 1.0))


TUNED = ("5-500-5", "weights x 5", "50 inputs")
UNSEEN = ("interferometer", "enzymes", "oscillators")
SCALES = ("50 inputs, blocks", "inputs 1e-3 to 1e3", "loss x 1e6", "loss x 1e-6", "3 decimals", "pendulum")
WEAK = ("exp(5x)", "NaN outside", "1 decimal")
