"""Groups of inputs that move together in one evaluation, and which outputs then depend on each of them."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Groups:
    """Inputs divided into groups such that no output depends on two inputs of a group.

    One evaluation moves a whole group: each output depends on at most one input of it, so a change can be attributed.
    Consecutive outputs that depend on the same inputs form a cell, and are handled as one.

    Args:
        colour: [d] the number of each input's group, from 0 on; -1 for an input that is never moved, whose gradient is
            zero.
        depends: [cells, d] bool, which cells depend on which inputs.
        cell: The number of outputs in a cell.

    Attributes:
        count: The number of groups.
    """

    def __init__(self, colour: Tensor, depends: Tensor, cell: int = 1) -> None:
        self.colour, self.depends, self.cell = colour.cpu(), depends.cpu(), cell
        self.count = int(colour.max()) + 1
        self._matrices: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._subsets: dict[tuple[int, int, torch.device], GroupSubset] = {}

    def subset(self, groups: slice, device: torch.device) -> "GroupSubset":
        """Some of the groups, with the indices that are needed to work with them on a device."""
        key = (groups.start, groups.stop, device)
        if key not in self._subsets:
            self._subsets[key] = self._make(groups.start, groups.stop, device)
        return self._subsets[key]

    def sum_by_input(self, products: Tensor) -> Tensor:
        """For every input, the sum over the outputs that depend on it: [..., d_out] -> [..., d]."""
        key = products.dtype, products.device
        if key not in self._matrices:
            self._matrices[key] = self.depends.to(products)
        return _by_cell(products, self.cell) @ self._matrices[key]

    def _make(self, start: int, stop: int, device: torch.device) -> "GroupSubset":
        """The `GroupSubset` of the groups from `start` to `stop` - 1."""
        members = (self.colour >= start) & (self.colour < stop)  # [d]
        inputs = members.nonzero().squeeze(1)  # [n]
        group = self.colour[inputs] - start  # [n]
        columns = self.depends[:, inputs].T  # [n, cells]
        cells = columns.shape[1]
        counts = columns.sum(1)  # [n] cells that depend on each input
        # For each input the cells that depend on it, followed by all others.
        order = columns.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices  # [n, cells]
        padding = (stop - start) * cells  # the index of a zero, appended after the last cell
        # Inputs with similar numbers of cells are gathered together: one input with many cells would otherwise pad all.
        class_of = counts.clamp(min=1).double().log2().ceil().long()
        gathers = []
        for size_class in sorted(set(class_of.tolist())):
            where = (class_of == size_class).nonzero().squeeze(1)  # [k]
            width = max(1, int(counts[where].max()))
            index = group[where, None] * cells + order[where, :width]
            index = torch.where(torch.arange(width, device="cpu") < counts[where, None], index, padding)  # [k, width]
            gathers.append(index.to(device))
        source = torch.full((stop - start, cells), -1, device="cpu")
        i, c = columns.nonzero().unbind(1)
        source[group[i], c] = i
        moved = self.colour == torch.arange(start, stop, device="cpu")[:, None]  # [j, d]
        which = slice(None) if bool(members.all()) else inputs.to(device)
        padded = any(bool((gather == padding).any()) for gather in gathers)
        place = class_of.argsort(stable=True).argsort().to(device)  # the inverse of the order of the gathers
        return GroupSubset(which, moved.to(device), source.flatten().to(device), self.cell, gathers, place, padded)


class GroupSubset(NamedTuple):
    """Some of the groups: j groups with n inputs, and indices on the device where they are used."""

    inputs: Tensor | slice  # [n] the inputs in these groups
    moved: Tensor  # [j, d] bool, the inputs that move with each group
    source: Tensor  # [j·cells] the input that a cell depends on, as a position in `inputs`; -1: none of the group
    cell: int  # the number of outputs in a cell
    gathers: list[Tensor]  # [k, width] each, for k inputs that similar numbers of cells depend on: these cells, counted
    # over all groups of the subset; shorter lists are padded, with the index of a zero after the last cell
    place: Tensor  # [n] the position of each input among the inputs of all `gathers`
    padded: bool  # whether any of the `gathers` is padded

    def sum_by_input(self, products: Tensor) -> Tensor:
        """For every input, the sum over the outputs that depend on it when its group moves: [b, j, d_out] -> [b, n].

        Cells are gathered, not scattered: on a GPU the order in which scattered numbers are added is not defined.
        """
        b = products.shape[0]
        cells = _by_cell(products, self.cell).flatten(1)  # [b, j·cells]
        if self.padded:
            cells = torch.nn.functional.pad(cells, (0, 1))
        totals = []
        for gather in self.gathers:
            total = cells.index_select(1, gather.flatten())  # [b, k·width]
            totals.append(total if gather.shape[1] == 1 else total.view(b, *gather.shape).sum(2))
        return totals[0] if len(totals) == 1 else torch.cat(totals, 1).index_select(1, self.place)

    def usable(self, finite: Tensor) -> tuple[Tensor, Tensor]:
        """Which evaluations can be used for which inputs, where some outputs are not finite.

        An evaluation is of no use for an input if any output that depends on this input is not finite. Other inputs of
        the group are not affected, so that a device that fails in one module costs the other modules nothing.

        Args:
            finite: [b, j, ends, d_out] which outputs are finite.

        Returns:
            For every input [b, n, ends] whether the evaluation can be used; and for every output [b, j, ends, d_out]
            the same about the input of the group that it depends on, False if there is none.
        """
        b, j, ends, d_out = finite.shape
        failed = (~finite).to(torch.float32).transpose(1, 2).reshape(b * ends, j, d_out)
        inputs = (self.sum_by_input(failed) == 0).view(b, ends, -1)  # [b, ends, n]
        cells = (inputs[:, :, self.source] & (self.source >= 0)).view(b, ends, j, -1)
        outputs = cells.repeat_interleave(self.cell, 3).transpose(1, 2)
        return inputs.transpose(1, 2), outputs


def _by_cell(products: Tensor, cell: int) -> Tensor:
    """Sums over the outputs of each cell: [..., d_out] -> [..., cells]."""
    return products if cell == 1 else products.view(*products.shape[:-1], -1, cell).sum(-1)


def colour(depends: Tensor) -> Tensor:
    """Groups of inputs that share no output, as few as can be found quickly: [d] numbers from 0 on.

    This is DSATUR: the next input is the one whose neighbours have the most different colours, and among equals the one
    with the most neighbours; it gets the first colour that no neighbour has. On arrays this takes a few milliseconds
    for 500 inputs, where networkx needs seconds.

    Args:
        depends: [d_out, d] bool, which outputs depend on which inputs.

    References:
        D. Brélaz, "New methods to color the vertices of a graph", Communications of the ACM, 1979.
    """
    used = depends.cpu().float()
    joined = ((used.T @ used) > 0).fill_diagonal_(False).numpy()  # [d, d]
    d = len(joined)
    colours = np.full(d, -1)
    taken = np.zeros((d, d), bool)  # [input, colour] whether some neighbour has this colour
    urgency = joined.sum(1) / (d + 1)  # [d] colours of the neighbours, plus a fraction that decides between equals
    for _ in range(d):
        i = int(urgency.argmax())
        colours[i] = taken[i].argmin()
        urgency[i] = -np.inf
        neighbours = np.flatnonzero(joined[i])
        new = neighbours[~taken[neighbours, colours[i]]]
        taken[new, colours[i]] = True
        urgency[new] += 1
    return torch.from_numpy(colours)


def lower_bound(depends: Tensor) -> int:
    """The least possible number of groups: inputs that one output depends on must be in different groups."""
    return max(1, int(depends.sum(1).max()))
