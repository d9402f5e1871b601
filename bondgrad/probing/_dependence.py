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
from bondgrad.structure.discovery._search_batch import SearchBatch
from bondgrad.structure.discovery._settings import SETTINGS as SEARCH


@dataclass(frozen=True)
class DependenceSettings:
    """What would hide too many dependencies."""

    noise: float = 0.03  # standard deviation over the spread of the outputs, of noise and of rounding
    quantum: float = 0.4  # steps between quantised outputs, over their spread
    answered: float = 0.5  # least share of the pattern about which anything was found out


SETTINGS = DependenceSettings()


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
    if facts.rows_coupled:
        raise MeasurementSkipped("rows influence one another, so it cannot be seen")
    unit = _rounding_deviation(facts)
    steps = float((facts.lattice / facts.output_spread).max())
    sizes = {"noise": facts.relative(facts.noise), "rounding": facts.relative(unit), "steps": steps}
    for what, size in sizes.items():
        if size > (SETTINGS.quantum if what == "steps" else SETTINGS.noise):
            raise MeasurementSkipped(f"{what} of {percent(size)} of the spread would hide it")
    depends = _search(sampler, facts, unit, generator)
    if not bool(depends.any()):
        raise MeasurementSkipped("no output reacted to any input")
    groups = int(colour(depends).max()) + 1
    idle = (~depends.any(0)).nonzero().squeeze(1).tolist()
    return Dependence(groups, depends.shape[1], float(depends.double().mean()), _blocks(depends, groups), idle)


def _search(sampler: Sampler, facts: Facts, unit: Tensor, generator: torch.Generator) -> Tensor:
    """[d_out, d] bool, which outputs depend on which inputs; `unit` [d_out] as `_rounding_deviation` has it."""
    rows, d = facts.usable, sampler.x.shape[1]
    sampler.require(SEARCH.rows * (d * (2 if facts.noisy else 1) + SEARCH.repeats + 1))

    def evaluate(points: Tensor, which: Tensor) -> Tensor:
        return sampler.ask(points, rows[which])

    eps = float((unit / facts.scale.clamp_min(1e-300)).max()) / ROUNDING_UNITS
    x, y, at_once = sampler.x[rows], facts.y[rows], sampler.caller.largest
    batch = SearchBatch(x, y, evaluate, at_once, max(eps, 1e-12), eps, sampler.low, sampler.high)
    found = find_dependencies(batch, generator)
    if found.answered < SETTINGS.answered:
        raise MeasurementSkipped("too many points failed")
    return found.depends


def _rounding_deviation(facts: Facts) -> Tensor:
    """[d_out] standard deviation that rounding gives to the difference of two answers."""
    if facts.noisy:  # which is measured once more, where the search goes on
        return facts.repeat_tolerance
    return (2 * facts.floor if facts.floor > 0 else 64 * facts.unit) * facts.scale


def _blocks(depends: Tensor, groups: int) -> tuple[int, int] | None:
    """(inputs, outputs) of blocks side by side that hold all of the pattern [d_out, d] and cost no more groups."""
    d_out, d = depends.shape
    if groups == d or d % groups != 0 or d_out % (d // groups) != 0:
        return None
    count = d // groups
    mask = torch.kron(torch.eye(count), torch.ones(d_out // count, groups)).bool()
    return None if bool((depends & ~mask).any()) else (groups, d_out // count)
