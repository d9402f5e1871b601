"""Networks and boxes, as an experiment's file names them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bondgrad import reservoirs
from bondgrad.box import BlackBox
from bondgrad.experiments import readings
from bondgrad.experiments.evaluation import made_evaluator
from bondgrad.experiments.settings import ESTIMATED, Part, Settings, one_of, slug
from bondgrad.networks import densenet, ffnn, resnet101
from bondgrad.policies import Bond, Calibrated, Fixed, Gaussian, Optimal, Policy

AROUND = ("noise", "bench", "limits")  # what may be said of any box
ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh}
POLICIES: dict[str, Callable[..., Policy]] = {
    "bond": Bond,
    "calibrated": Calibrated,
    "gaussian": Gaussian,
    "fixed": Fixed,
    "optimal": Optimal,
}


class Parts(NamedTuple):
    """A model. All but the read-in and the read-out are frozen."""

    read_in: nn.Module
    read_out: nn.Module
    through: "Through | None"  # the box, with its noise, as a layer that autograd sees through
    exact: "Through | None"  # the same without noise, to compare with
    black_box: BlackBox | None  # the box as a layer that may only be called; None for AD and SPSA

    def close(self) -> None:
        """End what the evaluator of the box has started elsewhere."""
        if self.black_box is not None:
            self.black_box.evaluator.close()


class Through(nn.Module):
    """A reservoir that autograd sees through, in single precision whatever is around it.

    One with memory takes the rows of a batch for time steps. In training it goes on from batch to batch, unless `still`
    is set; in evaluation every call begins anew.

    Args:
        reservoir: Frozen.
        limits: (low, high) that it is kept within, if any.
        start: Of its memory, [1, hidden]. None: it has none.
    """

    start: Tensor | None  # [1, hidden]
    state: Tensor | None  # [1, hidden]

    def __init__(self, reservoir: Any, limits: tuple[float, float] | None, start: Tensor | None) -> None:  # noqa: ANN401
        super().__init__()
        self.reservoir, self.limits = reservoir, limits
        self.still = False
        self.register_buffer("start", start, persistent=False)
        self.register_buffer("state", None if start is None else start.clone())

    def forward(self, x: Tensor) -> Tensor:
        """[B, d_in] -> [B, d_out]."""
        x = x.float() if self.limits is None else x.float().clamp(*self.limits)
        with torch.autocast(x.device.type, enabled=False):
            if self.state is None:
                alone: Tensor = self.reservoir(x)
                return alone
            y, after = self.reservoir(x.unsqueeze(0), self.state if self.training else self.start)
        if self.training and not self.still:
            self.state.copy_(after.detach())
        first: Tensor = y[0]
        return first


def build(settings: Settings, seed: int, device: torch.device) -> Parts:
    """A model with weights that depend on the seed alone, so that methods differ in nothing but the gradient."""
    torch.manual_seed(seed)
    read_in: nn.Module = made(NETWORKS, settings.read_in)
    part = settings.box or {}
    noise, bench, limits = (part.get(name) for name in AROUND)
    reservoir = made_reservoir(part) if part else None
    read_out: nn.Module = made(NETWORKS, settings.read_out)
    if device.type == "cuda" and settings.read_in["kind"] != "ffnn":
        read_in = read_in.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    networks = read_in.to(device), read_out.to(device)
    if reservoir is None:
        return Parts(*networks, None, None, None)
    box = reservoir
    if noise:
        box = reservoirs.Noisy(reservoir, noise, seed=seed)
    if bench is not None:
        if noise or part["kind"] != "dots":
            raise ValueError("a bench is for kind dots, and has a noise of its own")
        on_bench = reservoirs.Instrument(reservoir.box, limits=reservoir.box.limits, seed=seed, **bench)
        box = reservoirs.Tile(on_bench, reservoir.groups)
    limits = None if limits is None else (limits[0], limits[1])
    start = getattr(reservoir, "start", None)
    through, exact = Through(box, limits, start).to(device), Through(reservoir, limits, start).to(device)
    black_box = None
    how = settings.gradient
    if how.method in ESTIMATED:
        evaluator = made_evaluator(how.evaluator, f"{slug(settings.run)}-{seed}.journal")
        elsewhere = evaluator is not None and evaluator.describe() is not None  # a box that the evaluator has itself
        black_box = BlackBox(
            None if elsewhere else box,
            box.in_features,
            box.out_features,
            estimator=readings.estimator(how, box.in_features, box.out_features),
            policy=made_policy(settings, 0),
            noise=how.noise,
            limits=limits,
            structure=how.structure or (box.structure if elsewhere else None),
            state=start,
            evaluator=evaluator,
            seed=seed,
        ).to(device)
    return Parts(*networks, through, exact, black_box)


def made_policy(settings: Settings, epoch: int) -> Policy:
    """The policy for an epoch, the first being 0."""
    how = settings.gradient
    part = dict(how.policy)
    if how.reading.eta == "scheduled":
        part["eta"] = settings.optimizer.rate * settings.schedule(epoch, settings.epochs)
    return readings.policy(made(POLICIES, part), how.reading)


def _ffnn(sizes: list[int], activation: str = "tanh") -> nn.Module:
    one_of("activation", activation, ACTIVATIONS)
    return ffnn(sizes, ACTIVATIONS[activation])


def _dots(groups: int) -> nn.Module:
    return reservoirs.Tile(reservoirs.QuantumDotArray(), groups)


NETWORKS: dict[str, Callable[..., nn.Module]] = {"ffnn": _ffnn, "densenet": densenet, "resnet101": resnet101}
RESERVOIRS: dict[str, Callable[..., Any]] = {
    "fixed": reservoirs.Fixed,
    "parallel": reservoirs.Parallel,
    "rockmelon": reservoirs.Rockmelon,
    "echo": reservoirs.EchoState,
    "dots": _dots,
}


def made_reservoir(part: Part) -> Any:  # noqa: ANN401
    """The box itself, without noise or a bench around it."""
    return made(RESERVOIRS, {name: value for name, value in part.items() if name not in AROUND})


def made(kinds: dict[str, Callable[..., Any]], part: Part) -> Any:  # noqa: ANN401
    """What {kind: ..., and arguments} stands for."""
    arguments = dict(part)
    kind = arguments.pop("kind", None)
    one_of("kind", kind, kinds)
    try:
        return kinds[kind](**arguments)
    except TypeError as error:
        raise ValueError(f"{kind}: {error}") from error
