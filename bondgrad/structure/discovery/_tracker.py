"""Structure that a layer finds out during training: what is known so far, and when it searches again."""

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bondgrad.structure._structure import Dense, Pattern, Sequence, Structure, as_pattern
from bondgrad.structure.discovery._dependencies import EVALUATIONS_OF_A_CHECK, find_dependencies, missing_dependencies
from bondgrad.structure.discovery._memory_length import memory_length, response
from bondgrad.structure.discovery._search_batch import SETTINGS, SearchBatch
from bondgrad.torch_support._random import Generators

CPU = torch.device("cpu")
Knowledge = dict[str, Any]  # numbers and tensors, as they are saved; empty: nothing is known


class AutoPattern:
    """A pattern of dependencies that is found out during training. Its `Knowledge` is `depends`, [d_out, d] bool."""

    def structure(self, known: Knowledge) -> Structure:
        """The structure that follows from what is known; if nothing is, one that holds for any box."""
        return Pattern(known["depends"]) if known else Dense()

    def search(self, known: Knowledge, batch: SearchBatch, generator: torch.Generator) -> Knowledge:
        """What is known after a search; `known` itself, if nothing new was found.

        If nothing was known before, the search is thorough; otherwise it is a check of what was known.
        """
        if not known:
            found = find_dependencies(batch, generator)
            if found.answered < SETTINGS.least_answered:
                return known
            if idle := _listed(~found.depends.any(0)):
                warnings.warn(
                    f"a BlackBox with structure='auto' saw no output react to the inputs {idle}: they get no gradient "
                    "until one does. If they should, give structure= or structure='dense'.",
                    stacklevel=2,
                )
            return {"depends": found.depends}
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
    """The indices of the first eight True entries of a tensor [n], as text; "..." stands for more."""
    numbers = which.nonzero().squeeze(1).tolist()
    return ", ".join([*map(str, numbers[:8]), *["..."] * (len(numbers) > 8)])


class AutoHorizon:
    """A horizon of sequences that is found out during training.

    Its `Knowledge` is `horizon` (None, if the memory was as long as the sequences), `last`, the length of the memory
    that was measured last, and `time`, the length of the longest sequence at which it was measured.
    """

    def structure(self, known: Knowledge) -> Structure:
        """See `AutoPattern.structure`."""
        return Sequence(known["horizon"] if known else None)

    def search(self, known: Knowledge, batch: SearchBatch, generator: torch.Generator) -> Knowledge:
        """See `AutoPattern.search`."""
        measured, time = memory_length(*response(batch, generator)), batch.x.shape[1] // batch.features
        if measured == 0 or measured == time < known.get("time", 0):  # too short a sequence shows nothing
            return known
        found = {"horizon": None if measured == time else measured, "last": measured}
        if time > known.get("time", 0):
            return found | {"time": time}
        horizon = known["horizon"] or known["time"]
        if measured <= horizon:
            longest = max(measured, known["last"])  # one short measurement alone changes nothing
            found["horizon"] = longest if longest < SETTINGS.worthwhile * horizon else known["horizon"]
        return known | found


AutoStructure = AutoPattern | AutoHorizon  # what a layer can find out by itself; `StructureTracker` keeps what is known


def resolve(structure: Any, fn: Callable[..., Any]) -> Structure | AutoStructure:  # noqa: ANN401
    """The structure that an argument stands for; None stands for `fn.structure`, or for "dense" if there is none."""
    given = getattr(fn, "structure", None) if structure is None else structure
    if isinstance(given, str) and given in ("dense", "auto"):
        return Dense() if given == "dense" else AutoPattern()
    if isinstance(given, Structure):
        return AutoHorizon() if isinstance(given, Sequence) and given.horizon == "auto" else given
    if (pattern := as_pattern(given)) is not None:
        return Pattern(pattern)
    if structure is None:  # the function has no such attribute, or one that means something else
        return Dense()
    raise ValueError(
        "structure must be 'dense', 'auto', Blocks(n_in, n_out), Sequence(horizon), a pattern [out_features, "
        f"in_features] of booleans (pattern.bool()), or None, got {structure!r}"
    )


class Discovery(NamedTuple):
    """The result of a search, which `StructureTracker.accept` keeps."""

    known: Knowledge
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
        self.known: Knowledge = {}
        self.structure = self.auto.structure({})
        self.credit = math.inf  # evaluations of training since the last search
        self.price = EVALUATIONS_OF_A_CHECK  # evaluations of a search that finds nothing new

    def due(self, time: int = 1) -> bool:
        """Whether to search before the gradient of sequences of that length."""
        return self.credit * SETTINGS.share >= self.price or time > self.known.get("time", math.inf)

    def search(self, batch: SearchBatch) -> Discovery:
        """Search the structure of the box. The tracker itself is not changed before `accept`."""
        generator = self.random.fork(CPU)
        known = self.auto.search(self.known, batch, generator)
        # The length that was measured last may be new although the horizon is the same.
        same = known is self.known or ("horizon" in known and known["horizon"] == self.known.get("horizon", 0))
        structure = self.structure if same else self.auto.structure(known)
        return Discovery(known, structure, batch.evaluations, generator)

    def accept(self, found: Discovery) -> None:
        """Keep what a search has found."""
        self.random.join(CPU, found.generator)
        if found.structure is self.structure:
            self.credit, self.price = 0, found.evaluations
        else:  # where a known structure has changed, more may have, so that the next search is due at once
            self.credit = math.ceil(self.price / SETTINGS.share) if self.known else 0
        self.known, self.structure = found.known, found.structure

    def get_extra_state(self) -> dict[str, Any]:
        """What `state_dict` saves."""
        return {"known": self.known, "credit": self.credit, "price": self.price, "random": self.random.state()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Load what `get_extra_state` gave."""
        known: Knowledge = state["known"] or {}  # None, in states that were saved before
        try:
            structure = self.auto.structure(known)
        except KeyError as error:
            raise ValueError(f"what was saved is not about {type(self.auto).__name__}: {known}") from error
        structure.check(self.in_features, None)
        self.known, self.structure, self.credit, self.price = known, structure, state["credit"], state["price"]
        self.random.load(state["random"])
