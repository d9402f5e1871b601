"""Structure that a layer finds out during training: what is known so far, and when it searches again."""

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bondgrad.errors import counted
from bondgrad.structure._structure import Dense, Pattern, Sequence, Structure, as_pattern
from bondgrad.structure.discovery._dependencies import find_dependencies
from bondgrad.structure.discovery._memory_length import memory_length, response
from bondgrad.structure.discovery._missing_dependencies import check_pattern
from bondgrad.structure.discovery._search_batch import SETTINGS, SearchBatch
from bondgrad.torch_support._random import Generators

CPU = torch.device("cpu")
Knowledge = dict[str, Any]  # numbers and tensors, as they are saved; empty: nothing is known


class AutoPattern:
    """A pattern of dependencies that is found out during training.

    Its `Knowledge` is `depends`, [d_out, d] bool, and `noise`, [d_out], the standard deviation of the outputs, which is
    zero where it is no more than rounding.
    """

    def structure(self, known: Knowledge) -> Structure:
        """The structure that follows from what is known; if nothing is, one that holds for any box."""
        return Pattern(known["depends"]) if known else Dense()

    def same(self, known: Knowledge, before: Knowledge) -> bool:
        """Whether the structure that follows from what is known is that of before."""
        return bool(before) and known["depends"] is before["depends"]

    def least_budget(self, cost: int, known: Knowledge) -> float:
        """The evaluations that a search must be allowed to cost before it comes, if the last one had that cost."""
        return SETTINGS.floor * SETTINGS.interval if known else cost

    def search(self, known: Knowledge, batch: SearchBatch, budget: float, generator: torch.Generator) -> Knowledge:
        """What is known after a search; `known` itself, if nothing new was found.

        If nothing was known before, the search is thorough; otherwise it is a check of what was known, which costs no
        more than the budget, if it finds nothing.
        """
        if not known:
            found = find_dependencies(batch, generator)
            if found.answered < SETTINGS.least_answered:
                return known
            idle = ~found.depends.any(0)  # [d]
            if bool(idle.any()):
                warnings.warn(
                    f"a BlackBox with structure='auto' saw no output react to {_named(idle, 'input')}: no gradient "
                    "goes there until one does. If one should now, give structure= or structure='dense'.",
                    stacklevel=2,
                )
            noise = torch.zeros_like(found.noise) if found.deterministic else found.noise
            return {"depends": found.depends, "noise": noise}
        depends = known["depends"].to(batch.x.device)
        noise = known["noise"].to(batch.y) if "noise" in known else batch.y.new_zeros(len(depends))
        missing, noise = check_pattern(depends, noise, batch, budget, generator)
        if not bool(missing.any()):
            return known | {"noise": noise.cpu()}
        warnings.warn(
            f"a BlackBox with structure='auto' found {counted(int(missing.sum()), 'dependency')} that its pattern did "
            f"not have, of {_named(missing.any(1), 'output')} on {_named(missing.any(0), 'input')}. The pattern has "
            "been completed, and training goes on; gradients of late may have been wrong. If this comes again and "
            "again, use structure='dense'.",
            stacklevel=2,
        )
        return {"depends": (depends | missing).cpu(), "noise": noise.cpu()}


def _named(which: Tensor, noun: str) -> str:
    """The first eight True entries of a tensor [n], as text: "output 3", "the outputs 1, 2"; "..." stands for more."""
    numbers = which.nonzero().squeeze(1).tolist()
    listed = ", ".join([*map(str, numbers[:8]), *["..."] * (len(numbers) > 8)])
    return f"{noun} {listed}" if len(numbers) == 1 else f"the {noun}s {listed}"


class AutoHorizon:
    """A horizon of sequences that is found out during training.

    Its `Knowledge` is `horizon` (None, if the memory was as long as the sequences), `last`, the length of the memory
    that was measured last, and `time`, the length of the longest sequence at which it was measured.
    """

    def structure(self, known: Knowledge) -> Structure:
        """See `AutoPattern.structure`."""
        return Sequence(known["horizon"] if known else None)

    def same(self, known: Knowledge, before: Knowledge) -> bool:
        """See `AutoPattern.same`. The length that was measured last may be new although the horizon is the same."""
        return known is before or (bool(before) and known["horizon"] == before["horizon"])

    def least_budget(self, cost: int, known: Knowledge) -> float:
        """See `AutoPattern.least_budget`. Every search costs the same."""
        return cost

    def search(self, known: Knowledge, batch: SearchBatch, budget: float, generator: torch.Generator) -> Knowledge:
        """See `AutoPattern.search`. The budget changes nothing."""
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
        self.steps = 0  # of training since the last search
        self.budget = math.inf  # evaluations that a search may cost; less than zero, where the last one took too many
        self.least = 0.0  # evaluations that it must be allowed to cost before it comes
        self.alarm = True  # whether to search at once: nothing is known, or more may have changed with what did
        self.woken = 0  # dependencies that were found after the first search

    def step(self, evaluations: int) -> None:
        """Count a training step, whose gradient cost so many evaluations; several readings of a point count as one."""
        self.steps += 1
        self.budget += max(SETTINGS.share * evaluations, SETTINGS.floor)

    def due(self, time: int = 1) -> bool:
        """Whether to search before the gradient of sequences of that length."""
        return self.unsettled(time) or (self.steps >= SETTINGS.interval and self.budget >= self.least)

    def unsettled(self, time: int = 1) -> bool:
        """Whether the structure may well be another one after the next search."""
        return self.alarm or time > self.known.get("time", math.inf)

    def search(self, batch: SearchBatch) -> Discovery:
        """Search the structure of the box. The tracker itself is not changed before `accept`."""
        generator = self.random.fork(CPU)
        known = self.auto.search(self.known, batch, math.inf if self.alarm else self.budget, generator)
        structure = self.structure if self.auto.same(known, self.known) else self.auto.structure(known)
        return Discovery(known, structure, batch.evaluations, generator)

    def accept(self, found: Discovery) -> None:
        """Keep what a search has found."""
        self.random.join(CPU, found.generator)
        before, changed = self.known, found.structure is not self.structure
        # Where a known structure has changed, more may have.
        self.alarm = changed and bool(before)
        self.steps, self.budget = 0, 0.0 if changed or not before else min(0.0, self.budget - found.evaluations)
        self.least = self.auto.least_budget(found.evaluations, found.known)
        if self.alarm and "depends" in before:
            self.woken += int((found.known["depends"] & ~before["depends"]).sum())
        self.known, self.structure = found.known, found.structure

    def get_extra_state(self) -> dict[str, Any]:
        """What `state_dict` saves."""
        return {
            "known": self.known,
            "steps": self.steps,
            "budget": self.budget,
            "least": self.least,
            "alarm": self.alarm,
            "woken": self.woken,
            "random": self.random.state(),
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Load what `get_extra_state` gave."""
        known: Knowledge = state["known"] or {}  # None, in states that were saved before
        try:
            structure = self.auto.structure(known)
        except KeyError as error:
            raise ValueError(f"what was saved is not about {type(self.auto).__name__}: {known}") from error
        structure.check(self.in_features, None)
        self.known, self.structure = known, structure
        # States that were saved before had other counts: then the next search is due at once.
        self.alarm, self.steps, self.budget = state.get("alarm", True), state.get("steps", 0), state.get("budget", 0.0)
        self.least, self.woken = state.get("least", 0.0), state.get("woken", 0)
        self.random.load(state["random"])
