"""Which outputs depend on which inputs, and what that saves."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bondgrad.measuring._rounding import ROUNDING_UNITS
from bondgrad.measuring._sampler import MeasurementSkipped, Sampler
from bondgrad.probing._facts import Facts
from bondgrad.probing._number_format import percent
from bondgrad.structure import colour
from bondgrad.structure.discovery._dependencies import find_dependencies
from bondgrad.structure.discovery._search_batch import SETTINGS as SEARCH
from bondgrad.structure.discovery._search_batch import SearchBatch

# What would hide too many dependencies, over the spread of the outputs: standard deviations, and steps of a lattice.
MOST_HIDING = {"noise": 0.03, "rounding": 0.03, "steps": 0.4}
LEAST_ANSWERED = 0.5  # share of the pattern about which anything must have been found out


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


def measure_dependence(sampler: Sampler, facts: Facts, generator: torch.Generator) -> Dependence:
    """Move every input by itself, at some rows, as `structure.detect` does."""
    if facts.found.company is not None and facts.found.company.matters:
        raise MeasurementSkipped("rows influence one another, so it cannot be seen")
    rounding = (2 * facts.floor or 64 * facts.unit) * facts.scale  # [d_out] in the difference of two answers
    rounding = facts.repeat_tolerance if facts.noisy else rounding  # noise is measured once more, in the search
    lattice = [0.0] if facts.found.rounding is None else [quantum or 0.0 for quantum in facts.found.rounding.quantum]
    steps = float((facts.y.new_tensor(lattice) / facts.output_spread).max())
    sizes = {"noise": facts.relative(facts.noise), "rounding": facts.relative(rounding), "steps": steps}
    for what, size in sizes.items():
        if size > MOST_HIDING[what]:
            raise MeasurementSkipped(f"{what} of {percent(size)} of the spread would hide it")
    rows, d = facts.usable, sampler.x.shape[1]
    sampler.require(SEARCH.rows * (d * (2 if facts.noisy else 1) + SEARCH.repeats + 1))
    eps = float((rounding / facts.positive_scale).max()) / ROUNDING_UNITS
    x, y, at_once = sampler.x[rows], facts.y[rows], sampler.caller.largest

    def ask(points: Tensor, which: Tensor) -> Tensor:
        return sampler.ask(points, rows[which])

    batch = SearchBatch(x, y, ask, at_once, max(eps, 1e-12), eps, sampler.low, sampler.high)
    found = find_dependencies(batch, generator)
    if found.answered < LEAST_ANSWERED:
        raise MeasurementSkipped("too many points failed")
    depends = found.depends  # [d_out, d]
    if not bool(depends.any()):
        raise MeasurementSkipped("no output reacted to any input")
    groups = int(colour(depends).max()) + 1
    idle = (~depends.any(0)).nonzero().squeeze(1).tolist()
    return Dependence(groups, d, float(depends.double().mean()), _blocks(depends, groups), idle)


def _blocks(depends: Tensor, groups: int) -> tuple[int, int] | None:
    """(inputs, outputs) of blocks side by side that hold all of the pattern [d_out, d] and cost no more groups."""
    d_out, d = depends.shape
    count = d // groups
    if groups == d or d % groups != 0 or d_out % count != 0:
        return None
    mask = torch.kron(torch.eye(count), torch.ones(d_out // count, groups)).bool()
    return None if bool((depends & ~mask).any()) else (groups, d_out // count)
