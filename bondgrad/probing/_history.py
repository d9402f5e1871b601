"""Whether answers change in the course of time, or with what was asked before."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bondgrad.probing._asker import COMPANY, Asker, LeftOut
from bondgrad.probing._words import percent

ROWS = 4
ENOUGH = 30  # calls that must be left for other things
TIMES = (4, 2)  # that a row is asked right after others, and right after itself, as time allows
CERTAIN = 8.0  # standard deviations of the sum of squares


@dataclass(frozen=True)
class History:
    """What time and earlier questions do to the answers."""

    drifts: bool
    drift: float  # from the first to the last look, over the spread of the outputs, root mean square
    per_evaluation: float  # of that
    looks: int  # at the same rows
    remembers: bool | None  # None: not tried
    memory: float  # change of an answer by the question before, over the spread of the outputs

    @property
    def words(self) -> str:
        """What a person wants to know."""
        parts = []
        if self.looks < 3:
            parts.append("Whether it drifts was not looked at.")
        elif self.drifts:
            parts.append(
                f"It drifts: by {percent(self.drift)} of the spread over {self.looks} looks at the same rows. Both "
                "ends of a central difference are asked next to each other, so slow drift does little harm."
            )
        else:
            parts.append(f"No drift over {self.looks} looks at the same rows.")
        if self.remembers:
            parts.append(
                f"It remembers: the question before changes an answer by {percent(self.memory)} of the spread. Give "
                "it state=, or snapshot() and restore()."
            )
        elif self.remembers is not None:
            parts.append("No memory of earlier questions.")
        return " ".join(parts)


class Looks:
    """Looks at the same rows, again and again between the measurements."""

    def __init__(self, asker: Asker, generator: torch.Generator) -> None:
        self._asker = asker
        self._rows = asker.choose(max(ROWS, asker.least), generator)
        self._when: list[float] = []  # evaluations made before each look
        self._answers: list[Tensor] = []  # [r, d_out] each

    def look(self) -> None:
        """Once more, if the budget allows."""
        if self._asker.affordable() >= 2 * len(self._rows) + COMPANY and self._asker.affordable_calls() >= ENOUGH:
            self._asker.settle()
            self._when.append(float(self._asker.function.evaluations))
            self._answers.append(self._asker.ask(self._asker.x[self._rows], self._rows))

    def judge(self, memory: tuple[bool, float] | None) -> History:
        """What the looks say. `memory` is what `measure_memory` said."""
        remembers, change = (None, 0.0) if memory is None else memory
        if len(self._when) < 3:
            return History(False, 0.0, 0.0, len(self._when), remembers, change)
        y, when = torch.stack(self._answers), torch.tensor(self._when, dtype=torch.float64)
        at = when - when.mean()
        slope = (at[:, None, None] * y).sum(0) / at.square().sum()  # [r, d_out] per evaluation
        left = y - y.mean(0) - at[:, None, None] * slope
        scatter = (left.square().sum(0) / (len(at) - 2)).nanmean(0).sqrt()  # [d_out], with what is rare but large
        noise = torch.maximum(torch.maximum(self._asker.noise, scatter), self._asker.rounding)
        sigma = noise / at.square().sum().sqrt()
        drifts = excess(slope / sigma, self._asker.shared) > CERTAIN
        moved = (slope * (when[-1] - when[0]) / self._asker.output_spread).square().nanmean().sqrt()
        drift = float(moved.nan_to_num(0))
        return History(drifts, drift, drift / float(when[-1] - when[0]), len(when), remembers, change)


def excess(t: Tensor, shared: bool) -> float:
    """By how many of its standard deviations the sum of squares of t [r, d_out] exceeds that of normal numbers.

    Where rows share their noise, they count as one.
    """
    t = t.nanmean(0) if shared else t
    t = t[torch.isfinite(t)]
    return float((t.square().sum() - t.numel()) / math.sqrt(2 * max(1, t.numel()))) if t.numel() else 0.0


def measure_memory(asker: Asker, generator: torch.Generator) -> tuple[bool, float]:
    """B, A, A, A, B, A, A, A, ...: is A answered differently right after B than right after A?"""
    rows = asker.choose(2 * max(ROWS, asker.least), generator)
    a = rows[: len(rows) // 2]
    times = next((n for n in TIMES if asker.affordable_calls() >= 15 * n), TIMES[-1])
    asker.require_calls(15 * times)
    if asker.affordable() < 8 * times * len(a):
        raise LeftOut
    # Far from A, so that there is something to remember.
    distance = torch.cdist(asker.x[a] / asker.spread, asker.x[asker.usable] / asker.spread)
    b = asker.usable[distance.argmax(1)]
    found, change = _compare(asker, a, b, times)
    if found and bool((asker.noise > 0).any()):  # so much may come of a few bad answers: look again
        found, change = _compare(asker, a, b, times)
    return found, change


def _compare(asker: Asker, a: Tensor, b: Tensor, times: int) -> tuple[bool, float]:
    """Whether rows a [r] are answered differently right after b [r], and by how much, over the spread."""
    parts = []
    for _ in range(times):
        asker.ask(asker.x[b], b)
        after_b, second, third = (asker.ask(asker.x[a], a) for _ in range(3))
        parts.append((after_b - second) - (second - third))  # a steady drift cancels
    changes = torch.stack(parts)  # [times, r, d_out]
    mean = changes.nanmean(0)
    # Noise may be larger at some rows than at others, and some answers lie far out.
    own = (changes - mean).square().nanmean(0).nan_to_num(0).div(times - 1).sqrt()
    sigma = torch.maximum(torch.maximum(asker.noise * math.sqrt(6 / times), asker.rounding), own)
    change = float((mean / asker.output_spread).square().nanmean().sqrt().nan_to_num(0))
    return excess(mean / sigma, asker.shared) > CERTAIN, change
