"""Boxes of sequences: outputs depend on the inputs of their own time step and of earlier ones."""

from collections.abc import Sequence as Numbers

import torch

from bondgrad.errors import positive_int
from bondgrad.structure._groups import Groups
from bondgrad.structure._structure import Structure, Window

PIECES = 8  # into which a sequence is cut where the box can start in the middle


class Sequence(Structure):
    """The box maps sequences to sequences, x [..., T, d_in] -> [..., T, d_out], and does not look ahead.

    An evaluation is one sequence. The exact gradient moves one input of one time step at a time, which costs T times as
    many evaluations as there are inputs. If the box forgets, time steps `horizon` apart can move together, and an
    output is taken to depend on the inputs of the last `horizon` time steps only.

    Where the box can start from a state (`BlackBox(state=...)`), evaluations start close to the first time step that
    they move; that saves up to 44 % of the time steps. To know the states there, the forward pass calls the box in
    pieces, eight at most.

    Args:
        horizon: Time steps after which an input is forgotten. None: never. 1: an output depends on its own time step
            only. "auto": measured at the first training step, and again from time to time.
    """

    in_time = True

    def __init__(self, horizon: int | str | None = None) -> None:
        if isinstance(horizon, str) and horizon != "auto":
            raise ValueError(f"horizon must be a number of time steps, None or 'auto', got {horizon!r}")
        self.horizon = horizon if horizon is None or isinstance(horizon, str) else positive_int("horizon", horizon)

    def __repr__(self) -> str:
        return f"Sequence(horizon={self.horizon!r})"

    def starts(self, time: int) -> list[int]:
        """Time steps from which an evaluation had better start, where the box can."""
        return list(range(0, self._reach(time), -(-time // PIECES)))

    def windows(self, in_features: int, out_features: int, time: int, starts: Numbers[int]) -> list[Window]:
        """See `Structure.windows`."""
        key = (in_features, out_features, time, *starts)
        return self._kept(key, lambda: self._make(in_features, out_features, time, starts))

    def _make(self, in_features: int, out_features: int, time: int, starts: Numbers[int]) -> list[Window]:
        reach = self._reach(time)
        used = [start for start in starts if start < reach]
        return [
            Window(start, _groups(in_features, out_features, time - start, reach, stop - start))
            for start, stop in zip(used, [*used[1:], reach], strict=True)
        ]

    def _reach(self, time: int) -> int:
        """Groups of time steps, given that there are `time` of them."""
        return min(self.horizon, time) if isinstance(self.horizon, int) else time


def _groups(in_features: int, out_features: int, time: int, reach: int, phases: int) -> Groups:
    """Every `reach`-th time step moves together, beginning with each of the first `phases`; one input at a time."""
    t = torch.arange(time, device="cpu")
    phase = torch.where(t % reach < phases, t % reach, -1)  # [T]
    colour = phase[:, None] * in_features + torch.arange(in_features, device="cpu")  # [T, d]
    colour = torch.where(phase[:, None] < 0, -1, colour)
    lag = t[:, None] - t  # [T, T] from input to output
    depends = ((lag >= 0) & (lag < reach)).repeat_interleave(in_features, 1)  # [T, T·d]
    return Groups(colour.flatten(), depends, out_features)
