"""What a layer finds out about the structure of its box, and how often it looks."""

import warnings
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from bondgrad._random import Generators
from bondgrad.structure._detect import find_dependencies
from bondgrad.structure._memory_length import memory_length
from bondgrad.structure._scene import Scene
from bondgrad.structure._sequence import Sequence
from bondgrad.structure._structure import Dense, Pattern, Structure
from bondgrad.structure._watch import CHECKS, missed

SHARE = 0.01  # of the evaluations of training that looking again may cost
Known = dict[str, Any]  # numbers and tensors


class Unknown(ABC):
    """A structure to be found out. What is known is kept elsewhere, in `Findings`."""

    @abstractmethod
    def structure(self, known: Known | None) -> Structure:
        """What follows from what is known; None: nothing is, and the structure must be right for any box."""

    @abstractmethod
    def look(self, known: Known | None, scene: Scene, generator: torch.Generator) -> Known:
        """Ask the box: thoroughly, if nothing is known, else to see whether it still holds."""


class AutoPattern(Unknown):
    """Any pattern."""

    def structure(self, known: Known | None) -> Structure:
        """See `Unknown.structure`."""
        return Dense() if known is None else Pattern(known["depends"])

    def look(self, known: Known | None, scene: Scene, generator: torch.Generator) -> Known:
        """See `Unknown.look`."""
        if known is None:
            depends, noise, _ = find_dependencies(scene, generator)
            return {"depends": depends.cpu(), "noise": noise.cpu()}
        depends, noise = known["depends"].to(scene.x.device), known["noise"].to(scene.x.device)
        more = missed(depends, noise, scene, generator)
        if more is None or not bool(more.any()):
            return known
        outputs = more.any(1).nonzero().squeeze(1).tolist()
        warnings.warn(
            f"a BlackBox with structure='auto' found {int(more.sum())} dependencies that its pattern did not have, of "
            f"the outputs {', '.join(map(str, outputs[:8]))}{', ...' * (len(outputs) > 8)}. They were added, and "
            "training goes on; gradients since they appeared were wrong in these outputs.",
            stacklevel=2,
        )
        return known | {"depends": (depends | more).cpu()}


class AutoHorizon(Unknown):
    """A sequence with a memory of unknown length."""

    def structure(self, known: Known | None) -> Structure:
        """See `Unknown.structure`."""
        return Sequence(None if known is None else known["horizon"])

    def look(self, known: Known | None, scene: Scene, generator: torch.Generator) -> Known:
        """See `Unknown.look`."""
        horizon = memory_length(scene, generator)
        # A little less is not worth the change: others see the noise of the measurement.
        keep = known is not None and 0.75 * known["horizon"] <= horizon <= known["horizon"]
        return known if keep and known is not None else {"horizon": horizon}


class Findings(nn.Module):
    """What was found out so far; saved with the model."""

    def __init__(self, unknown: Unknown, seed: int | None) -> None:
        super().__init__()
        self.unknown = unknown
        self.known: Known | None = None
        self.credit = 0  # evaluations of training since the last look
        self.price = 2 * CHECKS  # evaluations that the last look cost, or so
        self.structure = unknown.structure(None)
        self.random = Generators(seed)

    def due(self) -> bool:
        """Whether it is time to look."""
        return self.known is None or self.credit * SHARE >= self.price

    def look(self, scene: Scene) -> None:
        """Ask the box, and keep what it says."""
        cpu = torch.device("cpu")
        generator = self.random.fork(cpu)
        asked = 0

        def evaluate(points: Tensor, rows: Tensor) -> Tensor:
            nonlocal asked
            asked += points.shape[:-1].numel()
            return scene.evaluate(points, rows)

        first = self.known is None
        known = self.unknown.look(self.known, scene._replace(evaluate=evaluate), generator)
        self.random.join(cpu, generator)
        if known is not self.known:
            self.known, self.structure = known, self.unknown.structure(known)
        self.credit = 0
        if not first:
            self.price = asked

    def get_extra_state(self) -> dict[str, Any]:
        """For `state_dict`."""
        return {"known": self.known, "credit": self.credit, "price": self.price, "random": self.random.state()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """The counterpart of `get_extra_state`."""
        self.known, self.credit, self.price = state["known"], state["credit"], state["price"]
        self.structure = self.unknown.structure(self.known)
        self.random.load(state["random"])
