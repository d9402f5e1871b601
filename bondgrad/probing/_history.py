"""Whether answers change in the course of time, or with what was asked before."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bondgrad.measuring._sampler import Sampler
from bondgrad.probing._comparison import confirmed
from bondgrad.probing._facts import SEVERAL_ROWS, Facts
from bondgrad.probing._number_format import percent, sentences


@dataclass(frozen=True)
class HistorySettings:
    """What is asked again, and how much change is believed."""

    rows: int = 4  # that are asked again
    spare_calls: int = 30  # with few rows: where there is time for fewer, drift is not looked at
    comparisons: tuple[int, ...] = (4, 2)  # of answers after other rows with answers after the same, as time allows
    certain: float = 8.0  # standard deviations of a sum of squares: far out, since noise need not be normal


SETTINGS = HistorySettings()


class Memory(NamedTuple):
    """Whether the call before changes an answer."""

    remembers: bool
    change: float  # over the spread of the outputs


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
        drift = f"No drift over {self.looks} looks at the same rows."
        if self.looks < 3:
            drift = "Whether it drifts was not looked at."
        elif self.drifts:
            drift = (
                f"It drifts: by {percent(self.drift)} of the spread over {self.looks} looks at the same rows. Both "
                "ends of a central difference are asked next to each other, so slow drift does little harm."
            )
        remembers = (
            f"It remembers: the question before changes an answer by {percent(self.memory)} of the spread. Give it "
            "state=, or snapshot() and restore()."
        )
        forgets = self.remembers is not None and "No memory of earlier questions."
        return sentences(drift, remembers if self.remembers else forgets)


class DriftMonitor:
    """Asks about the same rows again and again between the measurements.

    Args:
        rows: [r] of the sampler's rows.
    """

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        self._looks: list[tuple[int, Tensor]] = []  # evaluations made before, and answers [r, d_out]

    def look(self, sampler: Sampler, facts: Facts) -> None:
        """Ask once more, if the budget allows."""
        sampler.require(2 * len(self._rows) + SEVERAL_ROWS, SETTINGS.spare_calls)
        facts.settle(sampler)
        self._looks.append((sampler.evaluations, sampler.ask_rows(self._rows)))

    def forget(self) -> None:
        """Begin anew: what was seen until now came after anything, and the box remembers."""
        self._looks.clear()

    def judge(self, facts: Facts, memory: Memory | None) -> History:
        """What the looks say of drift, together with what is known of memory."""
        looks, (remembers, change) = len(self._looks), memory or (None, 0.0)
        if looks < 3:
            return History(False, 0.0, 0.0, looks, remembers, change)
        y = torch.stack([answers for _, answers in self._looks])  # [looks, r, d_out]
        when = torch.tensor([evaluations for evaluations, _ in self._looks], dtype=torch.float64)
        at = (when - when.mean())[:, None, None]
        slope = (at * y).sum(0) / at.square().sum()  # [r, d_out] per evaluation
        left = y - y.mean(0) - at * slope
        scatter = (left.square().sum(0) / (looks - 2)).nanmean(0).sqrt()  # [d_out], with what is rare but large
        noise = torch.maximum(torch.maximum(facts.noise, scatter), facts.rounding)
        drifts = _exceeds_chance(slope / noise * at.square().sum().sqrt(), facts)
        length = float(when[-1] - when[0])
        drift = facts.relative(slope * length)
        return History(drifts, drift, drift / length, looks, remembers, change)


def _exceeds_chance(t: Tensor, facts: Facts) -> bool:
    """Whether the squares of t [r, d_out], NaN where unknown, sum up to more than those of normal numbers do."""
    t = t.nanmean(0) if facts.shared_noise else t  # rows with the same noise count as one
    t = t[torch.isfinite(t)]
    return float(t.square().sum() - t.numel()) > SETTINGS.certain * math.sqrt(2 * t.numel())


def measure_memory(sampler: Sampler, facts: Facts, generator: torch.Generator) -> Memory:
    """Whether rows are answered differently right after others than right after themselves."""
    rows = facts.choose(max(SETTINGS.rows, sampler.caller.smallest), generator)
    times = next((n for n in SETTINGS.comparisons if sampler.affordable_calls >= 15 * n), SETTINGS.comparisons[-1])
    sampler.require(8 * times * len(rows), calls=15 * times)
    # Far from the rows, so that there is something to remember.
    distance = torch.cdist(sampler.x[rows] / sampler.spread, sampler.x[facts.usable] / sampler.spread)
    others = facts.usable[distance.argmax(1)]

    def compared() -> tuple[bool, float]:
        parts = []
        for _ in range(times):
            _, first, second, third = (sampler.ask_rows(asked) for asked in (others, rows, rows, rows))
            parts.append((first - second) - (second - third))  # a steady drift cancels
        changes = torch.stack(parts)  # [times, r, d_out]
        mean = changes.nanmean(0)
        # Noise may be larger at some rows than at others, and some answers lie far out.
        own = (changes - mean).square().nanmean(0).nan_to_num(0).div(times - 1).sqrt()
        sigma = torch.maximum(torch.maximum(facts.noise * math.sqrt(6 / times), facts.rounding), own)
        return _exceeds_chance(mean / sigma, facts), facts.relative(mean)

    return Memory(*confirmed(facts, compared))
