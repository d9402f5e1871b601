"""What is known of a box so far."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bondgrad.measuring._sampler import Sampler

if TYPE_CHECKING:
    from bondgrad.probing._history import Memory
    from bondgrad.probing._randomness import Randomness
    from bondgrad.probing._rounding import Rounding
    from bondgrad.probing._row_coupling import RowCoupling

SEVERAL_ROWS = 8  # rows of a call with several, where their number does not matter
TYPICAL_SHARE = 10  # typical rows may take one in so many of the evaluations


@dataclass(frozen=True)
class Facts:
    """What is known of a box so far. Measurements read it, and the probe extends it by what each of them found."""

    y: Tensor  # [n, d_out] outputs at the typical rows that were asked about; NaN where there are none
    unit: float  # the rounding unit of the type of the outputs, relative
    noise: Tensor  # [d_out] standard deviation; zero until it is known
    largest: Tensor  # [d_out] the largest deviation from the mean that was seen
    lattice: Tensor  # [d_out] distance of neighbouring outputs that are quantised; zero: they are not
    shared_noise: bool = False  # whether all rows of a call have the same noise
    noise_by_place: bool = False  # whether the noise is the same in every call, and another at every place in it
    remembers: bool = False  # whether outputs depend on the call before
    floor: float = 0.0  # of the rounding inside the box, relative
    rows_coupled: bool = False  # whether the rows of a call influence one another

    @staticmethod
    def at_typical_rows(sampler: Sampler) -> "Facts":
        """Ask about the typical rows, or about as many as a share of the budget allows."""
        y = sampler.ask_rows(torch.arange(min(len(sampler.x), max(2, sampler.affordable // TYPICAL_SHARE))))
        unknown = torch.zeros_like(y[0])
        return Facts(y, sampler.function.rounding or torch.finfo(sampler.dtype).eps, unknown, unknown, unknown)

    def with_randomness(self, found: "Randomness | None") -> "Facts":
        """Extended by the noise that was found."""
        if found is None:
            return self
        noise, largest = (self.noise.new_tensor(values) for values in (found.std, found.largest))
        shared = not found.within_a_call
        return replace(self, noise=noise, largest=largest, shared_noise=shared, noise_by_place=found.by_place)

    def with_answers(self, y: Tensor) -> "Facts":
        """Extended by outputs y [n, d_out] at the same typical rows, where none came before."""
        return replace(self, y=torch.where(torch.isfinite(self.y), self.y, y))

    def with_memory(self, found: "Memory | None") -> "Facts":
        """Extended by whether the box remembers."""
        return self if found is None else replace(self, remembers=found.remembers)

    def with_rounding(self, found: "Rounding | None") -> "Facts":
        """Extended by how finely the box computes."""
        if found is None:
            return self
        return replace(self, floor=found.floor, lattice=self.noise.new_tensor([q or 0.0 for q in found.quantum]))

    def with_row_coupling(self, found: "RowCoupling | None") -> "Facts":
        """Extended by whether rows influence one another."""
        return self if found is None else replace(self, rows_coupled=found.matters)

    @property
    def noisy(self) -> bool:
        """Whether any output has noise."""
        return bool((self.noise > 0).any())

    @cached_property
    def usable(self) -> Tensor:
        """[m] the typical rows at which the box gave finite answers."""
        return torch.isfinite(self.y).all(1).nonzero().squeeze(1)

    @cached_property
    def scale(self) -> Tensor:
        """[d_out] how large the outputs are: root mean square."""
        return self.y[self.usable].square().mean(0).sqrt()

    @cached_property
    def output_spread(self) -> Tensor:
        """[d_out] standard deviation over the rows; of outputs that do not change, their size, or one."""
        spread = self.y[self.usable].std(0, correction=int(len(self.usable) > 1))
        flat = spread <= self.unit / 4 * self.scale
        return torch.where(flat, torch.where(self.scale > 0, self.scale, 1.0), spread)

    @property
    def repeat_tolerance(self) -> Tensor:
        """[d_out] by how much outputs of the same call may differ without noise."""
        return 2 * self.unit * self.scale

    @cached_property
    def rounding(self) -> Tensor:
        """[d_out] a change of this size may come from rounding, such as when rows are grouped into other calls.

        Once the floor is known, that is what it goes by: outputs with an offset are larger than what they say.
        """
        if self.floor > 0:
            return max(2 * self.unit, 16 * self.floor) * self.scale
        most = 64 * self.unit * self.scale
        noisy = torch.minimum(most, torch.maximum(4 * self.noise, self.repeat_tolerance))
        return torch.where(self.noise > 0, noisy, most)

    def certain(self, n: int) -> Tensor:
        """[d_out] a difference between two means of n answers that is more than noise and rounding make.

        Nor does a single answer that lies far out make one.
        """
        chance = torch.maximum(6 * self.noise * math.sqrt(2 / n), 2.5 * self.largest / n)
        return torch.maximum(chance, self.rounding)

    def relative(self, change: Tensor) -> float:
        """Changes [..., d_out] over the spread of the outputs: root mean square over those that are known."""
        return float((change / self.output_spread).square().nanmean().sqrt().nan_to_num(0))

    def choose(self, count: int, generator: torch.Generator) -> Tensor:
        """[count] typical rows at which the box works: different ones, as far as there are."""
        order = self.usable[torch.randperm(len(self.usable), generator=generator)]
        return order[torch.arange(count) % len(order)]

    def settle(self, sampler: Sampler) -> None:
        """Ask a box that remembers about the same few rows, so that calls to be compared have the same past."""
        if self.remembers:
            sampler.ask_rows(self.usable[: max(SEVERAL_ROWS, sampler.caller.smallest)])
