"""Which outputs depend on which inputs, and what that saves."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bondgrad.measuring._rounding import ROUNDING_UNITS
from bondgrad.probing._asker import Asker, LeftOut
from bondgrad.probing._words import percent
from bondgrad.structure import colour
from bondgrad.structure.discovery._dependencies import SETTINGS as SEARCH
from bondgrad.structure.discovery._dependencies import find_dependencies
from bondgrad.structure.discovery._search_batch import SearchBatch

COARSE = 0.4  # the same of steps between answers
NOISY = 0.03  # standard deviation over the spread of the outputs, beyond which too much would be missed


@dataclass(frozen=True)
class Dependence:
    """The pattern, in numbers."""

    groups: int  # of inputs that can move together
    inputs: int
    filled: float  # fraction of the pattern
    blocks: tuple[int, int] | None  # (inputs, outputs) of each, where modules lie side by side
    idle: list[int]  # inputs that no output reacted to

    @property
    def words(self) -> str:
        """What a person wants to know."""
        if self.groups == self.inputs:
            return "No structure to be used: every input shares an output with every other."
        saving = f"{2 * self.groups:,} evaluations a row for a central gradient instead of {2 * self.inputs:,}"
        if self.blocks is not None:
            inputs = "one input" if self.blocks[0] == 1 else f"{self.blocks[0]} inputs"
            return f"{self.inputs // self.blocks[0]:,} blocks of {inputs}: {saving}."
        return f"Outputs depend on {percent(self.filled)} of the inputs; {self.groups} groups move together: {saving}."


def measure_dependence(asker: Asker, generator: torch.Generator) -> Dependence:
    """Move every input by itself, at some rows, as `structure.detect` does."""
    d = asker.x.shape[1]
    noise = float((asker.noise / asker.output_spread).square().mean().sqrt())
    if noise > NOISY:
        raise LeftOut(f"noise of {percent(noise)} of the spread would hide it")
    unit = _unit(asker)  # [d_out]
    hidden = float((unit / asker.output_spread).square().mean().sqrt())
    if hidden > NOISY:
        raise LeftOut(f"rounding of {percent(hidden)} of the spread would hide it")
    step = float((asker.quantum / asker.output_spread).max())
    if step > COARSE:
        raise LeftOut(f"steps of {percent(step)} of the spread would hide it")
    ends = 2 if noise > 0 else 1
    if asker.affordable() < SEARCH.rows * (d * ends + SEARCH.repeats) + SEARCH.rows:
        raise LeftOut
    rows = asker.usable

    def evaluate(points: Tensor, which: Tensor) -> Tensor:
        shape = points.shape[:-1]
        nearby = rows[which].repeat_interleave(shape[1:].numel())
        return asker.ask(points.reshape(-1, d), nearby).view(*shape, -1)

    eps = float((unit / asker.scale.clamp_min(1e-300)).max()) / ROUNDING_UNITS
    scene = SearchBatch(asker.x[rows], asker.y[rows], evaluate, asker.most, max(eps, 1e-12), eps, asker.low, asker.high)
    found = find_dependencies(scene, generator)
    depends = found.depends
    if found.answered < 0.5:
        raise LeftOut("too many points failed")
    if not bool(depends.any()):
        raise LeftOut("no output reacted to any input")
    groups = int(colour(depends).max()) + 1
    idle = (~depends.any(0)).nonzero().squeeze(1).tolist()
    return Dependence(groups, d, float(depends.double().mean()), _blocks(depends, groups), idle)


def _unit(asker: Asker) -> Tensor:
    """[d_out] standard deviation that rounding gives to the difference of two answers."""
    if bool((asker.noise > 0).any()):  # which is measured once more, where the search goes on
        return 2 * asker.eps * asker.scale
    return (2 * asker.floor if asker.floor > 0 else 64 * asker.eps) * asker.scale


def _blocks(depends: Tensor, groups: int) -> tuple[int, int] | None:
    """(inputs, outputs) of blocks side by side that hold all of the pattern [d_out, d] and cost no more groups."""
    d_out, d = depends.shape
    if groups == d or d % groups != 0 or d_out % (d // groups) != 0:
        return None
    count = d // groups
    mask = torch.kron(torch.eye(count), torch.ones(d_out // count, groups)).bool()
    return None if bool((depends & ~mask).any()) else (groups, d_out // count)
