"""What a layer has found out about the structure of its box, and when it searches again."""

import math
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bondgrad.structure._sequence import Sequence
from bondgrad.structure._structure import Dense, Pattern, Structure
from bondgrad.structure.discovery._dependencies import find_dependencies
from bondgrad.structure.discovery._memory_length import memory_length
from bondgrad.structure.discovery._search_batch import SearchBatch
from bondgrad.structure.discovery._watch import EVALUATIONS_OF_A_CHECK, missing_dependencies
from bondgrad.torch_support._random import Generators


@dataclass(frozen=True)
class TrackerSettings:
    """When a layer searches, and what it needs to change its structure."""

    least_answered: float = 0.5  # the part of a pattern for which evaluations must not fail, for it to be used
    worthwhile: float = 0.75  # a shorter horizon is used if it is below this part of the present one
    share: float = 0.01  # the part of the evaluations of training that searches may cost, after the first


SETTINGS = TrackerSettings()
CPU = torch.device("cpu")
Knowledge = dict[str, Any]  # numbers and tensors, in the form in which they are saved


class AutoStructure(ABC):
    """A structure that is found out during training. The state of knowledge is kept by `StructureTracker`."""

    @abstractmethod
    def structure(self, known: Knowledge | None) -> Structure:
        """The structure that follows from what is known; None: nothing is, and it must be right for any box."""

    def same(self, known: Knowledge | None, other: Knowledge | None) -> bool:
        """Whether the same structure follows from both."""
        return known is other

    def covers(self, known: Knowledge | None, time: int) -> bool:
        """Whether what is known holds for sequences of that length."""
        return True

    @abstractmethod
    def search(self, known: Knowledge | None, batch: SearchBatch, generator: torch.Generator) -> Knowledge | None:
        """What is known after evaluations of the box; None, if they showed nothing.

        If nothing was known before, the search is thorough; otherwise it is a check of what was known.
        """


class AutoPattern(AutoStructure):
    """Any pattern of dependencies. Known is `depends`, [d_out, d] bool."""

    def structure(self, known: Knowledge | None) -> Structure:
        """See `AutoStructure.structure`."""
        return Dense() if known is None else Pattern(known["depends"])

    def search(self, known: Knowledge | None, batch: SearchBatch, generator: torch.Generator) -> Knowledge | None:
        """See `AutoStructure.search`."""
        if known is None:
            found = find_dependencies(batch, generator)
            if found.answered < SETTINGS.least_answered:
                return None
            if idle := _listed(~found.depends.any(0)):
                warnings.warn(
                    f"a BlackBox with structure='auto' saw no output react to the inputs {idle}: they get no gradient "
                    "until one does. If they should, give structure= or structure='dense'.",
                    stacklevel=2,
                )
            return {"depends": found.depends.cpu()}
        depends = known["depends"].to(batch.x.device)
        missing = missing_dependencies(depends, batch, generator)
        if not bool(missing.any()):
            return known
        warnings.warn(
            f"a BlackBox with structure='auto' found {int(missing.sum())} dependencies that its pattern did not have, "
            f"of the outputs {_listed(missing.any(1))}. They were added, and training goes on; gradients since they "
            "appeared may have been wrong.",
            stacklevel=2,
        )
        return {"depends": (depends | missing).cpu()}


def _listed(which: Tensor) -> str:
    """The numbers of the True entries of a tensor [n], the first eight of them, in words."""
    numbers = which.nonzero().squeeze(1).tolist()
    return ", ".join([*map(str, numbers[:8]), *["..."] * (len(numbers) > 8)])


class AutoHorizon(AutoStructure):
    """A sequence with a memory of unknown length.

    Known are `horizon` (None, if the box did not forget within its sequences), `last`, the length that was measured
    last, and `time`, the length of the longest sequence that was measured.
    """

    def structure(self, known: Knowledge | None) -> Structure:
        """See `AutoStructure.structure`."""
        return Sequence(None if known is None else known["horizon"])

    def same(self, known: Knowledge | None, other: Knowledge | None) -> bool:
        """See `AutoStructure.same`."""
        unknown = {"horizon": 0}
        return bool((known or unknown)["horizon"] == (other or unknown)["horizon"])

    def covers(self, known: Knowledge | None, time: int) -> bool:
        """See `AutoStructure.covers`: nothing is known about lags beyond the longest sequence that was measured."""
        return known is None or time <= known["time"]

    def search(self, known: Knowledge | None, batch: SearchBatch, generator: torch.Generator) -> Knowledge | None:
        """See `AutoStructure.search`."""
        measured, time = memory_length(batch, generator), batch.x.shape[1] // batch.features
        if measured == 0:
            return known
        measured_or_none = None if measured == time else measured
        if known is None or time > known["time"]:
            return {"horizon": measured_or_none, "last": measured, "time": time}
        horizon = known["horizon"] or known["time"]
        if time < known["time"] and measured >= time:  # the sequence is too short to show anything
            return known
        if measured > horizon:
            return known | {"horizon": measured_or_none, "last": measured}
        longest = max(measured, known["last"])  # one short measurement alone changes nothing
        shorter = {"horizon": longest} if longest < SETTINGS.worthwhile * horizon else {}
        return known | shorter | {"last": measured}


class Discovery(NamedTuple):
    """The result of a search, which `StructureTracker.accept` keeps."""

    known: Knowledge | None
    structure: Structure
    evaluations: int  # that the search cost
    generator: torch.Generator  # after the search


class StructureTracker(nn.Module):
    """The structure as it is known so far, which is saved with the model.

    Args:
        auto: What is to be found out.
        in_features: The number of inputs of the box.
        seed: The seed for choices of rows and inputs. None: drawn from torch's global generator.
    """

    def __init__(self, auto: AutoStructure, in_features: int, seed: int | None) -> None:
        super().__init__()
        self.auto, self.in_features = auto, in_features
        self.random = Generators(seed)
        self.forget()

    def forget(self) -> None:
        """Return to the state in which nothing is known."""
        self.known: Knowledge | None = None
        self.structure = self.auto.structure(None)
        self.credit = math.inf  # evaluations of training since the last search
        self.price = EVALUATIONS_OF_A_CHECK  # evaluations of a search that finds nothing new

    def due(self, time: int = 1) -> bool:
        """Whether to search before the gradient of sequences of that length."""
        return self.credit * SETTINGS.share >= self.price or not self.auto.covers(self.known, time)

    def search(self, batch: SearchBatch) -> Discovery:
        """Search the structure of the box. The tracker itself is not changed before `accept`."""
        generator = self.random.fork(CPU)
        evaluations = 0

        def evaluate(points: Tensor, rows: Tensor) -> Tensor:
            nonlocal evaluations
            evaluations += points.shape[:-1].numel()
            return batch.evaluate(points, rows)

        known = self.auto.search(self.known, batch._replace(evaluate=evaluate), generator)
        structure = self.structure if self.auto.same(known, self.known) else self.auto.structure(known)
        return Discovery(known, structure, evaluations, generator)

    def accept(self, found: Discovery) -> None:
        """Keep what a search has found."""
        self.random.join(CPU, found.generator)
        if found.structure is self.structure:
            self.credit, self.price = 0, found.evaluations
        else:  # where a known structure has changed, more may have, so that the next search is due at once
            self.credit = 0 if self.known is None else math.ceil(self.price / SETTINGS.share)
        self.known, self.structure = found.known, found.structure

    def get_extra_state(self) -> dict[str, Any]:
        """What `state_dict` saves."""
        return {"known": self.known, "credit": self.credit, "price": self.price, "random": self.random.state()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Load what `get_extra_state` gave."""
        known: Knowledge | None = state["known"]
        try:
            structure = self.auto.structure(known)
        except KeyError as error:
            raise ValueError(f"what was saved is not about {type(self.auto).__name__}: {known}") from error
        structure.check(self.in_features, None)
        self.known, self.structure, self.credit, self.price = known, structure, state["credit"], state["price"]
        self.random.load(state["random"])
