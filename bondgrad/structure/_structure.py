"""What is known of which outputs depend on which inputs."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from bondgrad.errors import positive_int
from bondgrad.structure._colouring import colour
from bondgrad.structure._groups import Groups

T = TypeVar("T")
KEPT = 8  # shapes for which a structure keeps its groups: sequences may come in ever other lengths


class Window(NamedTuple):
    """Groups of inputs whose evaluations start at the same time step."""

    start: int
    groups: Groups | None


class Structure:
    """Says which inputs may move together."""

    in_time = False  # whether x is sequences of rows

    def check(self, in_features: int, out_features: int | None) -> None:
        """Refuse a box of another shape; `out_features` is None where it is not known yet."""

    def width(self, in_features: int) -> int | None:
        """The number of outputs, if it follows."""
        return None

    def groups(self, in_features: int, out_features: int) -> Groups | None:
        """The groups. None: every input is one of its own, and all outputs speak for it."""
        return None

    def windows(self, in_features: int, out_features: int, time: int, starts: Sequence[int]) -> list[Window]:
        """The groups by where their evaluation can start, given the time steps at which the box can.

        Sequences only; other structures know one time step, and start there.
        """
        return [Window(0, self.groups(in_features, out_features))]

    def _kept(self, key: Hashable, make: Callable[[], T]) -> T:
        """What a shape needs, made once."""
        made: dict[Hashable, T] = self.__dict__.setdefault("_made", {})
        if key not in made:
            if len(made) >= KEPT:
                made.pop(next(iter(made)))
            made[key] = make()
        return made[key]

    def __getstate__(self) -> dict[str, Any]:
        """Copies need not carry what can be made again."""
        return {name: value for name, value in self.__dict__.items() if name != "_made"}


class Dense(Structure):
    """Every output may depend on every input."""

    def __repr__(self) -> str:
        return "'dense'"


class Blocks(Structure):
    """Modules side by side: outputs `n_out` at a time depend on the inputs `n_in` at a time, in their order.

    One input of every block moves at a time, so that a gradient costs as much as that of one block.

    Args:
        n_in: Inputs of a block.
        n_out: Outputs of a block.
    """

    def __init__(self, n_in: int, n_out: int) -> None:
        self.n_in, self.n_out = positive_int("n_in", n_in), positive_int("n_out", n_out)

    def __repr__(self) -> str:
        return f"Blocks({self.n_in}, {self.n_out})"

    def check(self, in_features: int, out_features: int | None) -> None:
        """See `Structure.check`."""
        blocks, rest = divmod(in_features, self.n_in)
        if rest or out_features not in (None, blocks * self.n_out):
            raise ValueError(
                f"{self} does not fit a box with {in_features} inputs and {out_features or 'any number of'} outputs: "
                "there must be a whole number of blocks, the same for both"
            )

    def width(self, in_features: int) -> int | None:
        """See `Structure.width`."""
        return in_features // self.n_in * self.n_out

    def groups(self, in_features: int, out_features: int) -> Groups | None:
        """See `Structure.groups`."""
        return self._kept(in_features, lambda: self._make(in_features))

    def _make(self, in_features: int) -> Groups:
        i = torch.arange(in_features, device="cpu")
        block = torch.arange(in_features // self.n_in, device="cpu")
        return Groups(i % self.n_in, block[:, None] == i // self.n_in, self.n_out)


class Pattern(Structure):
    """Any pattern, whose inputs are put into groups by colouring.

    Args:
        depends: [d_out, d_in] bool, True where an output depends on an input.
    """

    def __init__(self, depends: Tensor | np.ndarray) -> None:
        pattern = as_pattern(depends)
        if pattern is None:
            raise ValueError(f"a pattern must be boolean, [out_features, in_features], got {depends!r}")
        self.depends = pattern.cpu().clone()
        self._dense = bool(self.depends.all())

    def __repr__(self) -> str:
        d_out, d_in = self.depends.shape
        made = list(self.__dict__.get("_made", {}).values())  # colouring takes a while: once it is needed
        groups = f", {made[0].count} groups" if made else ""
        return f"Pattern({d_out} x {d_in}, {float(self.depends.double().mean()):.1%} filled{groups})"

    def check(self, in_features: int, out_features: int | None) -> None:
        """See `Structure.check`."""
        if self.depends.shape[1] != in_features or out_features not in (None, self.depends.shape[0]):
            raise ValueError(
                f"the pattern in structure must be [out_features, in_features] = [{out_features or '...'}, "
                f"{in_features}], got {list(self.depends.shape)}"
            )

    def width(self, in_features: int) -> int | None:
        """See `Structure.width`."""
        return self.depends.shape[0]

    def groups(self, in_features: int, out_features: int) -> Groups | None:
        """See `Structure.groups`."""
        return None if self._dense else self._kept(0, lambda: Groups(colour(self.depends), self.depends))


def as_pattern(value: object) -> Tensor | None:
    """The value as a pattern [d_out, d_in] of booleans, if it is one."""
    if isinstance(value, np.ndarray) and value.dtype == bool:
        value = torch.from_numpy(np.ascontiguousarray(value))
    if not isinstance(value, Tensor) or value.dtype != torch.bool or value.ndim != 2 or value.numel() == 0:
        return None
    return value.to_dense() if value.layout != torch.strided else value
