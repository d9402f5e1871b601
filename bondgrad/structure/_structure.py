"""What is known about which outputs depend on which inputs."""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from bondgrad.errors import positive_int
from bondgrad.structure._groups import Groups, colour

T = TypeVar("T")
CACHED_SHAPES = 8  # shapes of boxes for which a structure keeps its groups: the lengths of sequences may vary
MOST_PIECES = 8  # pieces of a sequence in the forward pass: n of them save (n - 1) / 2n of the time steps


class Window(NamedTuple):
    """Groups of inputs whose evaluations all start at the same time step, where a box can start in the middle."""

    start: int  # the first time step that is evaluated; zero for boxes of rows
    groups: Groups | None  # of the inputs from there on; None: every input is a group of its own


class Structure:
    """What is known about which outputs depend on which inputs: it says which inputs may move together.

    A subclass overrides `groups`, or for sequences `windows`, and `check` where not every box fits.
    """

    in_time = False  # whether rows are sequences, so that x has a dimension for time before that of its inputs

    def check(self, in_features: int, out_features: int | None) -> None:
        """Raise ValueError for a box of another shape; `out_features` is None where it is not known yet."""

    def width(self, in_features: int) -> int | None:
        """The number of outputs, if it follows from the structure; else None."""
        return None

    def groups(self, in_features: int, out_features: int) -> Groups | None:
        """The groups of inputs; None: every input is a group of its own, and every output may depend on it."""
        return None

    def windows(self, in_features: int, out_features: int, time: int, starts: list[int]) -> list[Window]:
        """The groups by the time step at which their evaluations start; for boxes of rows, all at time step zero.

        Args:
            in_features: The number of inputs of a time step.
            out_features: The number of outputs of a time step.
            time: The number of time steps of a sequence.
            starts: Time steps at which the box can start, in order, the first of them zero.
        """
        return [Window(0, self.groups(in_features, out_features))]

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """The result of `make`, kept under a key. Of several keys, the last eight are kept.

        Args:
            key: What the result depends on, such as the number of inputs.
            make: Called without arguments if there is no result under this key.
        """
        if key not in self.cache:
            if len(self.cache) >= CACHED_SHAPES:
                self.cache.pop(next(iter(self.cache)))
            self.cache[key] = make()
        return cast(T, self.cache[key])

    @property
    def cache(self) -> dict[Hashable, Any]:
        """What `cached` keeps, by its key. Copies and pickles of a structure do not have it."""
        return cast(dict[Hashable, Any], self.__dict__.setdefault("_cache", {}))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_cache"}


class Dense(Structure):
    """Every output may depend on every input."""

    def __repr__(self) -> str:
        return "'dense'"


class Blocks(Structure):
    """Blocks side by side: each `n_out` consecutive outputs depend on `n_in` consecutive inputs, in the same order.

    One input of every block moves at a time, so that a gradient costs as many evaluations as that of one block.

    Args:
        n_in: The number of inputs of a block.
        n_out: The number of outputs of a block.
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
                "there must be a whole number of blocks, the same for both. Give Blocks(n_in, n_out) that divide them"
            )

    def width(self, in_features: int) -> int | None:
        """See `Structure.width`."""
        return in_features // self.n_in * self.n_out

    def groups(self, in_features: int, out_features: int) -> Groups | None:
        """See `Structure.groups`."""
        return self.cached(in_features, lambda: self._make(in_features))

    def _make(self, in_features: int) -> Groups:
        i = torch.arange(in_features, device="cpu")
        block = torch.arange(in_features // self.n_in, device="cpu")
        return Groups(i % self.n_in, block[:, None] == i // self.n_in, self.n_out)


class Pattern(Structure):
    """Any pattern of dependencies; inputs are divided into groups by colouring (see `colour`).

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
        # Colouring takes a while, so that groups are counted only if they are there already.
        groups = "".join(f", {groups.count} groups" for groups in self.cache.values())
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
        return None if self._dense else self.cached("groups", lambda: Groups(colour(self.depends), self.depends))


class Sequence(Structure):
    """The box maps sequences to sequences, x [..., T, d_in] -> [..., T, d_out]; no output depends on later inputs.

    An evaluation is one sequence. The exact gradient moves one input of one time step at a time, which costs T times as
    many evaluations as there are inputs. If the memory of the box fades, time steps `horizon` apart can move together:
    an output is then taken to depend only on the inputs of the last `horizon` time steps, its own among them.

    Where the box can start from a state (`BlackBox(state=...)`), evaluations start shortly before the first time step
    that they move, which saves up to 44 % of the time steps. To know the states there, the forward pass calls the box
    in pieces, eight at most.

    Args:
        horizon: The number of time steps that an input has an effect on. None: all later ones. 1: only its own. "auto":
            it is measured at the first training step, and again from time to time.
    """

    in_time = True

    def __init__(self, horizon: int | str | None = None) -> None:
        if isinstance(horizon, str) and horizon != "auto":
            raise ValueError(f"horizon must be a number of time steps, None or 'auto', got {horizon!r}")
        self.horizon = horizon if horizon is None or isinstance(horizon, str) else positive_int("horizon", horizon)

    def __repr__(self) -> str:
        return f"Sequence(horizon={self.horizon!r})"

    def starts(self, time: int) -> list[int]:
        """The time steps at which evaluations should start, where the box can start from a state."""
        return list(range(0, self._period(time), -(-time // MOST_PIECES)))

    def windows(self, in_features: int, out_features: int, time: int, starts: list[int]) -> list[Window]:
        """See `Structure.windows`."""
        key = (in_features, out_features, time, *starts)
        return self.cached(key, lambda: self._make(in_features, out_features, time, starts))

    def _make(self, in_features: int, out_features: int, time: int, starts: list[int]) -> list[Window]:
        period = self._period(time)
        used = [start for start in starts if start < period]
        return [
            Window(start, _groups_in_time(in_features, out_features, time - start, period, stop - start))
            for start, stop in zip(used, [*used[1:], period], strict=True)
        ]

    def _period(self, time: int) -> int:
        """The distance of time steps that move together: the horizon, or the whole length of the sequence."""
        return min(self.horizon, time) if isinstance(self.horizon, int) else time


def _groups_in_time(in_features: int, out_features: int, time: int, period: int, phases: int) -> Groups:
    """Groups in which one input moves at every `period`-th time step.

    The first time step of a group is one of the first `phases`; time steps that belong to no group never move.
    """
    t = torch.arange(time, device="cpu")
    phase = (t % period)[:, None]  # [T, 1]
    colour = torch.where(phase < phases, phase * in_features + torch.arange(in_features, device="cpu"), -1)  # [T, d]
    lag = t[:, None] - t  # [T, T] from input to output
    depends = ((lag >= 0) & (lag < period)).repeat_interleave(in_features, 1)  # [T, T·d]
    return Groups(colour.flatten(), depends, out_features)


def as_pattern(value: object) -> Tensor | None:
    """The value, or what it has as `depends`, as a pattern [d_out, d_in] of booleans; None if it is something else."""
    value = getattr(value, "depends", value)  # as a `Detection` has it
    if isinstance(value, np.ndarray) and value.dtype == bool:
        value = torch.from_numpy(np.ascontiguousarray(value))
    if not isinstance(value, Tensor) or value.dtype != torch.bool or value.ndim != 2 or value.numel() == 0:
        return None
    return value.to_dense() if value.layout != torch.strided else value
