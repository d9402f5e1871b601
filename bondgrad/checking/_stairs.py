"""Inputs along which outputs are piecewise constant, which is seen on the ladder of steps that a check begins with."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bondgrad.checking._levels import Levels


@dataclass(frozen=True)
class StairSettings:
    """The thresholds of what counts as piecewise constant, found on benchmarks/foreign_boxes.py."""

    rounding_units: float = 16.0  # an output has changed if it did by so many units of its rounding
    large_change: float = 1024.0  # a change that is no effect of rounding has so many units of it
    coarse_change: float = 3e4  # one that is no effect of half precision, either
    begins: float = 5.0  # ratio of changes over neighbouring steps, from which on a slope begins there: four, and more
    vanishing: float = 0.5  # part of the rows at which the shortest step that changes an output must be over a jump
    linear: float = 0.1  # part of the rows at which outputs may change in proportion to the shortest two steps
    rows: int = 4  # the least number of rows with jumps that say anything of one input and output
    least_flat: float = (
        1 / 64
    )  # part of the spread; jumps at shorter distances are roughness, over which steps average,
    least_even: float = (
        3e-4  # unless levels are even, or the box changes by jumps only; all outputs are rounded somewhere
    )
    levels: float = 20.0  # outputs have levels at equal distances if their jumps are fewer of their deviations
    width: float = 10.9  # length of flat parts, in units of the longest step without a change, in the geometric mean:
    # 4 e, if the distance to the nearest jump has any value with the same probability


SETTINGS = StairSettings()


class Staircase(NamedTuple):
    """What is known of outputs that are piecewise constant along some inputs."""

    coarse: Tensor  # [d, d_out] bool: the output is piecewise constant along the input
    smooth: Tensor  # [d, d_out] bool: it is not, and changes
    flat: Tensor  # [d] typical length of the flat parts, in units of the spread; NaN: there are none
    regular: bool  # whether levels have equal distances, as those of rounded outputs

    @property
    def without_slope(self) -> Tensor:
        """The inputs [d] along which there is no slope to compare a gradient with."""
        return self.coarse.any(1) & (not self.regular)

    @property
    def everywhere(self) -> bool:
        """Whether there is no slope along any input."""
        return not self.regular and not bool((self.smooth.any(1) & ~self.without_slope).any())


class OutputChanges:
    """Collects how each of d_out outputs changes along each of d inputs, over a ladder of steps.

    Args:
        y: [r, d_out] the outputs at r rows.
        eps: Relative rounding of the outputs.
    """

    def __init__(self, y: Tensor, eps: float) -> None:
        self._y, self._eps = y.double()[:, None, None, None], eps
        self._parts: list[tuple[Tensor, ...]] = []

    def observe(self, moves: Tensor, y: Tensor) -> None:
        """Take in the outputs after moves of k inputs.

        Args:
            moves: [r, k, rungs] from the longest to the shortest, in units of the spread, as they were set.
            y: [r, k, rungs, 2, d_out] after moves up and down.
        """
        change = (y.double() - self._y).abs().amax(3)  # [r, k, rungs, d_out]
        unknown, change = change.isnan(), change.nan_to_num(0)
        unit = self._eps * torch.maximum(y.double().abs().nan_to_num(0).amax((2, 3)), self._y[:, :, 0, 0].abs())
        changed = change > SETTINGS.rounding_units * unit[:, :, None]
        reached, rungs = changed.any(2), changed.shape[2]  # [r, k, d_out]
        last = rungs - 1 - changed.flip(2).long().argmax(2)  # the shortest step that changes the output

        def at(rung: Tensor, values: Tensor) -> Tensor:
            return values.gather(2, rung.clamp(0, rungs - 1)[:, :, None]).squeeze(2)  # [r, k, d_out]

        # Much changes over this step, and nothing at all over the next: that is a jump, or a slope begins between them.
        jump, longer = at(last, change), at(last - 1, change.masked_fill(unknown, torch.inf))
        vanishes = reached & (last < rungs - 1) & (jump > SETTINGS.large_change * unit)
        known = vanishes & (last > 0)
        jumps = known & (longer < SETTINGS.begins * jump)
        ratio = change[:, :, -2] / change[:, :, -1]
        linear = changed[:, :, -2] & changed[:, :, -1] & ((ratio - 4).abs() < 1.5)
        unmoved = at(last + 1, moves.abs()[..., None].expand_as(change))  # zero where values cannot be set so close
        flat = SETTINGS.width * torch.where(vanishes, unmoved.log(), torch.nan).nanmean(0).exp()  # [k, d_out]
        size = torch.where(vanishes, jump, torch.nan).nanmedian(0).values
        coarse = vanishes & (jump > SETTINGS.coarse_change * unit)
        self._parts.append((*(t.sum(0) for t in (reached, vanishes, known, jumps, coarse, linear)), flat, size))

    def staircase(self, deviation: Tensor, levels: Levels) -> Staircase | None:
        """The inputs and outputs that look piecewise constant; None: there are none.

        Args:
            deviation: [d_out] that of the outputs by what is known of their rounding.
            levels: The levels of the outputs.
        """
        parts = (torch.cat(part) for part in zip(*self._parts, strict=True))
        reached, vanishes, known, jumps, large, linear, flat, size = parts  # [d, d_out]
        slopes = linear > SETTINGS.linear * reached
        clear = reached - (vanishes - known)  # rows at which it can be told whether a jump begins or a slope
        coarse = (jumps >= SETTINGS.rows) & (jumps >= SETTINGS.vanishing * clear) & ~slopes
        # What is not known of one input is likely to be as with the others, if nothing has slopes.
        everywhere = int(large.sum()) >= SETTINGS.vanishing * int(reached.sum())
        everywhere &= int(linear.sum()) <= SETTINGS.linear * int(reached.sum())
        whole = (vanishes > 0) & ~slopes & everywhere
        coarse = (coarse | whole) & (flat > SETTINGS.least_even)
        if not bool(coarse.any()):
            return None
        # A tree with few leaves has jumps as small as those of rounding, compared with its levels.
        relative = (size / deviation)[coarse].median()
        regular = bool(relative < SETTINGS.levels) and levels.even(coarse.any(0))
        if not regular:
            # Rough outputs, which half precision makes inside a box, have jumps at short distances.
            fine = (jumps >= SETTINGS.rows) & (flat <= SETTINGS.least_flat)
            coarse = whole & coarse | coarse & ~fine.any(0)
            if not bool(coarse.any()):
                return None
        flat = torch.where(coarse, flat.log(), torch.nan).nanmean(1).exp()
        return Staircase(coarse, (reached > 0) & ~coarse, flat, regular)
