"""What a layer finds out about the structure of its box, and how often it looks."""

import math
import warnings
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bondgrad.structure._sequence import Sequence
from bondgrad.structure._structure import Dense, Pattern, Structure
from bondgrad.structure.discovery._detect import find_dependencies
from bondgrad.structure.discovery._memory_length import memory_length
from bondgrad.structure.discovery._search_batch import SearchBatch
from bondgrad.structure.discovery._watch import PRICE, missed
from bondgrad.torch_support._random import Generators

HEARD = 0.5  # of the pattern there must be answers about, for it to be believed
LESS = 0.75  # of a horizon, for a shorter one to be worth a change
SHARE = 0.01  # of the evaluations of training that looking again may cost
CPU = torch.device("cpu")
Known = dict[str, Any]  # numbers and tensors


class AutoStructure(ABC):
    """A structure to be found out. What is known is kept elsewhere, in `StructureTracker`."""

    @abstractmethod
    def structure(self, known: Known | None) -> Structure:
        """What follows from what is known; None: nothing is, and the structure must be right for any box."""

    @abstractmethod
    def same(self, known: Known | None, other: Known | None) -> bool:
        """Whether the same structure follows from both."""

    def covers(self, known: Known | None, time: int) -> bool:
        """Whether what is known holds for sequences of that length."""
        return True

    @abstractmethod
    def look(self, known: Known | None, batch: SearchBatch, generator: torch.Generator) -> Known | None:
        """Ask the box: thoroughly, if nothing is known, else to see whether it still holds. None: nothing was seen."""


class AutoPattern(AutoStructure):
    """Any pattern."""

    def structure(self, known: Known | None) -> Structure:
        """See `AutoStructure.structure`."""
        return Dense() if known is None else Pattern(known["depends"])

    def same(self, known: Known | None, other: Known | None) -> bool:
        """See `AutoStructure.same`."""
        return known is other

    def look(self, known: Known | None, batch: SearchBatch, generator: torch.Generator) -> Known | None:
        """See `AutoStructure.look`."""
        if known is None:
            found = find_dependencies(batch, generator)
            if found.heard < HEARD:
                return None
            _warn_of_idle_inputs(found.depends)
            return {"depends": found.depends.cpu()}
        depends = known["depends"].to(batch.x.device)
        more = missed(depends, batch, generator)
        if not bool(more.any()):
            return known
        outputs = more.any(1).nonzero().squeeze(1).tolist()
        warnings.warn(
            f"a BlackBox with structure='auto' found {int(more.sum())} dependencies that its pattern did not have, of "
            f"the outputs {', '.join(map(str, outputs[:8]))}{', ...' * (len(outputs) > 8)}. They were added, and "
            "training goes on; gradients since they appeared may have been wrong.",
            stacklevel=2,
        )
        return {"depends": (depends | more).cpu()}


def _warn_of_idle_inputs(depends: Tensor) -> None:
    idle = (~depends.any(0)).nonzero().squeeze(1).tolist()
    if idle:
        warnings.warn(
            f"a BlackBox with structure='auto' saw no output react to the inputs {', '.join(map(str, idle[:8]))}"
            f"{', ...' * (len(idle) > 8)}: they get no gradient until one does. If they should, give structure= or "
            "structure='dense'.",
            stacklevel=2,
        )


class AutoHorizon(AutoStructure):
    """A sequence with a memory of unknown length.

    Known are the horizon (None: it did not forget within its sequences), what was measured last, and the length of the
    longest sequence that was looked at.
    """

    def structure(self, known: Known | None) -> Structure:
        """See `AutoStructure.structure`."""
        return Sequence(None if known is None else known["horizon"])

    def same(self, known: Known | None, other: Known | None) -> bool:
        """See `AutoStructure.same`."""
        nothing = {"horizon": 0}
        return bool((known or nothing)["horizon"] == (other or nothing)["horizon"])

    def covers(self, known: Known | None, time: int) -> bool:
        """See `AutoStructure.covers`: of what comes after longer times nothing is known."""
        return known is None or time <= known["time"]

    def look(self, known: Known | None, batch: SearchBatch, generator: torch.Generator) -> Known | None:
        """See `AutoStructure.look`."""
        measured, time = memory_length(batch, generator), batch.x.shape[1] // batch.features
        if measured == 0:
            return known
        measured_or_none = None if measured == time else measured
        if known is None or time > known["time"]:
            return {"horizon": measured_or_none, "last": measured, "time": time}
        horizon = known["horizon"] or known["time"]
        if time < known["time"] and measured >= time:  # too short to say anything
            return known
        if measured > horizon:
            return known | {"horizon": measured_or_none, "last": measured}
        longest = max(measured, known["last"])  # of two looks in a row, and a little less is not worth a change
        return known | ({"horizon": longest} if longest < LESS * horizon else {}) | {"last": measured}


class Discovery(NamedTuple):
    """What a look at the box brought."""

    known: Known | None
    structure: Structure
    asked: int  # evaluations
    generator: torch.Generator  # where it has got to


class StructureTracker(nn.Module):
    """What was found out so far; saved with the model."""

    def __init__(self, unknown: AutoStructure, in_features: int, seed: int | None) -> None:
        super().__init__()
        self.unknown, self.in_features = unknown, in_features
        self.random = Generators(seed)
        self.forget()

    def forget(self) -> None:
        """Nothing is known."""
        self.known: Known | None = None
        self.structure = self.unknown.structure(None)
        self.credit = math.inf  # evaluations of training since the last look
        self.price = PRICE  # evaluations that a look costs which finds nothing new

    def due(self, time: int = 1) -> bool:
        """Whether it is time to look, before a gradient of sequences of that length."""
        return self.credit * SHARE >= self.price or not self.unknown.covers(self.known, time)

    def look(self, batch: SearchBatch) -> Discovery:
        """Ask the box. What it says is kept by `accept`."""
        generator = self.random.fork(CPU)
        asked = 0

        def evaluate(points: Tensor, rows: Tensor) -> Tensor:
            nonlocal asked
            asked += points.shape[:-1].numel()
            return batch.evaluate(points, rows)

        known = self.unknown.look(self.known, batch._replace(evaluate=evaluate), generator)
        same = self.unknown.same(known, self.known)
        return Discovery(known, self.structure if same else self.unknown.structure(known), asked, generator)

    def accept(self, found: Discovery) -> None:
        """Keep what was found."""
        self.random.join(CPU, found.generator)
        if found.structure is self.structure:
            self.credit, self.price = 0, found.asked
        else:  # and, later than at first, more may have changed, so that the next look comes soon
            self.credit = 0 if self.known is None else math.ceil(self.price / SHARE)
        self.known, self.structure = found.known, found.structure

    def get_extra_state(self) -> dict[str, Any]:
        """For `state_dict`."""
        known = None if self.known is None else dict(self.known)
        return {"known": known, "credit": self.credit, "price": self.price, "random": self.random.state()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """The counterpart of `get_extra_state`."""
        known = None if state["known"] is None else dict(state["known"])
        try:
            structure = self.unknown.structure(known)
        except KeyError as error:
            raise ValueError(f"what was saved is not about {type(self.unknown).__name__}: {known}") from error
        structure.check(self.in_features, None)
        self.known, self.structure, self.credit, self.price = known, structure, state["credit"], state["price"]
        self.random.load(state["random"])
