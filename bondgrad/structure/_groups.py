"""Which inputs move together in one evaluation, and which outputs then speak for each of them."""

from typing import NamedTuple

import torch
from torch import Tensor


class Groups:
    """Inputs divided into groups such that no output depends on two inputs of a group.

    One evaluation moves a whole group, and every output that changes has one input to thank for it. Outputs are counted
    in cells of consecutive ones that depend on the same inputs.

    Args:
        colour: [d] the group of each input, from 0 on; -1 for an input that is never moved, whose gradient is zero.
        depends: [cells, d] bool, which cells depend on which inputs.
        cell: Outputs in a cell.
    """

    def __init__(self, colour: Tensor, depends: Tensor, cell: int = 1) -> None:
        self.colour, self.depends, self.cell = colour, depends, cell
        self.count = int(colour.max()) + 1
        self._matrices: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._parts: dict[tuple[int, int, torch.device], Moves] = {}

    def part(self, groups: slice, device: torch.device) -> "Moves":
        """Some of the groups, ready for work on a device."""
        key = (groups.start, groups.stop, device)
        if key not in self._parts:
            self._parts[key] = self._make(groups.start, groups.stop, device)
        return self._parts[key]

    def total(self, products: Tensor) -> Tensor:
        """Add up, for every input, what the outputs say that depend on it: [..., d_out] -> [..., d]."""
        key = products.dtype, products.device
        if key not in self._matrices:
            self._matrices[key] = self.depends.to(products)
        cells = products if self.cell == 1 else products.view(*products.shape[:-1], -1, self.cell).sum(-1)
        return cells @ self._matrices[key]

    def _make(self, start: int, stop: int, device: torch.device) -> "Moves":
        members = (self.colour >= start) & (self.colour < stop)
        whole = bool(members.all())
        inputs = members.nonzero().squeeze(1)  # [n]
        group = self.colour[inputs] - start  # [n]
        columns = self.depends[:, inputs].T  # [n, cells]
        cells = columns.shape[1]
        counts = columns.sum(1)  # of cells that speak for each input
        # The cells of each input, those that are none of its own at the end.
        order = columns.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices
        nothing = (stop - start) * cells  # where a zero stands
        # Inputs with about as many cells are added up together, lest the one with the most decides the cost of all.
        class_of = counts.clamp(min=1).double().log2().ceil().long()
        sums = []
        for width in sorted(set(class_of.tolist())):
            where = (class_of == width).nonzero().squeeze(1)  # [k]
            most = max(1, int(counts[where].max()))
            index = group[where, None] * cells + order[where, :most]
            index = torch.where(torch.arange(most, device="cpu") < counts[where, None], index, nothing)  # [k, most]
            sums.append(Sum(where.to(device), index.flatten().to(device), most, bool((index == nothing).any())))
        owner = torch.full((stop - start, cells), -1, device="cpu")
        i, c = columns.nonzero().unbind(1)
        owner[group[i], c] = i
        moved = torch.zeros(stop - start, len(self.colour), dtype=torch.bool, device="cpu")
        moved[group, inputs] = True
        return Moves(
            inputs=slice(None) if whole else inputs.to(device),
            moved=moved.to(device),
            owner=owner.flatten().to(device),
            cell=self.cell,
            sums=sums,
        )


class Sum(NamedTuple):
    """Inputs for which about equally many cells speak."""

    where: Tensor  # [k] which inputs, counted within the part
    cells: Tensor  # [k·most] their cells, counted over the groups of the part
    most: int
    padded: bool  # whether some of the cells are the zero behind the last


class Moves(NamedTuple):
    """Some of the groups, j of them, with n inputs."""

    inputs: Tensor | slice  # [n] which
    moved: Tensor  # [j, d] bool: the inputs that move with each group
    owner: Tensor  # [j·cells] the input, counted within the part, that a cell speaks for; -1: none
    cell: int
    sums: list[Sum]

    def total(self, products: Tensor) -> Tensor:
        """Add up, for every input, what its outputs say: [b, j, d_out] -> [b, n].

        By gathering, not by scattering: on a GPU the order in which scattered numbers are added is not defined.
        """
        b = products.shape[0]
        cells = products if self.cell == 1 else products.view(b, products.shape[1], -1, self.cell).sum(3)
        cells = cells.flatten(1)  # [b, j·cells]
        if any(s.padded for s in self.sums):
            cells = torch.nn.functional.pad(cells, (0, 1))
        totals = [cells.index_select(1, s.cells) for s in self.sums]
        totals = [t if s.most == 1 else t.view(b, -1, s.most).sum(2) for t, s in zip(totals, self.sums, strict=True)]
        if len(totals) == 1:
            return totals[0]
        out = cells.new_empty(b, sum(t.shape[1] for t in totals))
        for t, s in zip(totals, self.sums, strict=True):
            out[:, s.where] = t
        return out

    def heard(self, finite: Tensor) -> tuple[Tensor, Tensor]:
        """Which inputs can be spoken for, given which outputs [b, j, ends, d_out] are finite.

        Returns:
            For every input [b, n, ends] whether all its outputs are, and the same for every output [b, j, ends, d_out]
            about the input it speaks for. A device that fails in one module costs the others nothing.
        """
        b, j, ends, d_out = finite.shape
        lost = (~finite).to(torch.float32).transpose(1, 2).reshape(b * ends, j, d_out)
        inputs = (self.total(lost) == 0).view(b, ends, -1)  # [b, ends, n]
        cells = (inputs[:, :, self.owner] & (self.owner >= 0)).view(b, ends, j, -1)
        outputs = cells.repeat_interleave(self.cell, 3).transpose(1, 2)
        return inputs.transpose(1, 2), outputs
