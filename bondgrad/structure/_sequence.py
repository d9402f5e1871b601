"""Boxes of sequences: outputs depend on the inputs of their own time step and of earlier ones."""

from collections.abc import Sequence as Numbers

import torch

from bondgrad.errors import positive_int
from bondgrad.structure._groups import Groups
from bondgrad.structure._structure import Structure, Window

MOST_PIECES = 8  # of a sequence in the forward pass: n pieces save (n - 1) / 2n of the time steps, at most one half


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

    def windows(self, in_features: int, out_features: int, time: int, starts: Numbers[int]) -> list[Window]:
        """See `Structure.windows`."""
        key = (in_features, out_features, time, *starts)
        return self.cached(key, lambda: self._make(in_features, out_features, time, starts))

    def _make(self, in_features: int, out_features: int, time: int, starts: Numbers[int]) -> list[Window]:
        period = self._period(time)
        used = [start for start in starts if start < period]
        return [
            Window(start, _groups(in_features, out_features, time - start, period, stop - start))
            for start, stop in zip(used, [*used[1:], period], strict=True)
        ]

    def _period(self, time: int) -> int:
        """The distance of time steps that move together: the horizon, or the whole length of the sequence."""
        return min(self.horizon, time) if isinstance(self.horizon, int) else time


def _groups(in_features: int, out_features: int, time: int, period: int, phases: int) -> Groups:
    """Groups in which one input moves at every `period`-th time step.

    The first time step of a group is one of the first `phases`; time steps that belong to no group never move.
    """
    t = torch.arange(time, device="cpu")
    phase = (t % period)[:, None]  # [T, 1]
    colour = torch.where(phase < phases, phase * in_features + torch.arange(in_features, device="cpu"), -1)  # [T, d]
    lag = t[:, None] - t  # [T, T] from input to output
    depends = ((lag >= 0) & (lag < period)).repeat_interleave(in_features, 1)  # [T, T·d]
    return Groups(colour.flatten(), depends, out_features)
