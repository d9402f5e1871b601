"""What changes an answer beside the row itself: other rows of the call, calls before it, and time."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bondgrad.measuring._sampler import Sampler
from bondgrad.probing._facts import SEVERAL_ROWS, Facts
from bondgrad.probing._number_format import percent, sentences

COMPARED, OTHERS = 4, 12  # rows whose answers are compared, and rows beside them in a call


@dataclass(frozen=True)
class RowCoupling:
    """How the answer about a row changes with the other rows of the call."""

    matters: bool
    change: float  # of the answers, over the spread of the outputs, root mean square

    @property
    def words(self) -> str:
        """The finding, in sentences."""
        if not self.matters:
            return "Rows do not influence one another."
        change = f"other rows in the call change an answer by {percent(self.change)} of the spread"
        return f"Rows influence one another: {change}. Differences between perturbed rows then mean little."


def measure_row_coupling(sampler: Sampler, facts: Facts, generator: torch.Generator) -> RowCoupling:
    """The same rows among different others: typical ones, and copies of one that lies far out."""
    if sampler.caller.largest == 1:
        return RowCoupling(False, 0.0)
    watched, typical = facts.choose(COMPARED, generator), facts.choose(OTHERS, generator)
    distance = (sampler.x[facts.usable] - sampler.x.mean(0)).div(sampler.spread).square().sum(1)
    outside = facts.usable[distance.argmax()].expand(OTHERS)
    calls = [(watched, typical), (watched, outside), (typical, watched)]
    if facts.found.randomness is not None and facts.found.randomness.by_place:  # which is no influence
        calls.pop()

    def answers_about_watched(call: tuple[Tensor, Tensor]) -> Tensor:
        first = 0 if call[0] is watched else OTHERS
        return sampler.ask_rows(torch.cat(call))[first : first + COMPARED]

    matters, change = facts.compare(sampler, answers_about_watched, calls, COMPARED + OTHERS)
    return RowCoupling(matters, max(map(facts.relative, change)))


@dataclass(frozen=True)
class HistorySettings:
    """What is asked again, and how much change is believed."""

    rows: int = 4  # that are asked again
    spare_calls: int = 30  # with few rows: where there is time for fewer, drift is not looked at
    certain: float = 6.0  # standard deviations of a slope: far out, since noise need not be normal


SETTINGS = HistorySettings()


@dataclass(frozen=True)
class History:
    """What time and earlier questions do to the answers."""

    remembers: bool | None = None  # None: not tried
    memory: float = 0.0  # change of an answer by the question before, over the spread of the outputs
    looks: int = 0  # at the same rows
    drifts: bool = False
    drift: float = 0.0  # from the first to the last look, over the spread of the outputs, root mean square
    per_evaluation: float = 0.0  # of that

    @property
    def words(self) -> str:
        """The finding, in sentences."""
        looks = f"{self.looks} looks at the same rows"
        harm = "Both ends of a central difference are asked next to each other, so slow drift does little harm."
        changed = f"the question before changes an answer by {percent(self.memory)} of the spread"
        return sentences(
            self.looks < 3 and "Whether it drifts was not looked at.",
            self.looks >= 3 and not self.drifts and f"No drift over {looks}.",
            self.drifts and f"It drifts: by {percent(self.drift)} of the spread over {looks}. {harm}",
            self.remembers and f"It remembers: {changed}. Give it state=, or snapshot() and restore().",
            self.remembers is False and "No memory of earlier questions.",
        )


class DriftMonitor:
    """Asks about the same rows again and again between the measurements.

    Args:
        rows: [r] of the sampler's rows.
    """

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        self._looks: list[tuple[bool, int, Tensor]] = []  # whether settled, evaluations until then, answers [r, d_out]

    def look(self, sampler: Sampler, facts: Facts) -> None:
        """Ask once more, if the budget allows."""
        sampler.require(2 * len(self._rows) + SEVERAL_ROWS, SETTINGS.spare_calls)
        facts.settle(sampler)
        self._looks.append((facts.remembers, sampler.evaluations, sampler.ask_rows(self._rows)))

    def measure_drift(self, sampler: Sampler, facts: Facts, generator: torch.Generator) -> History:
        """What the looks say of drift, beside what is known of memory."""
        # Until a box was known to remember, it was looked at after anything.
        looks = [(when, y) for settled, when, y in self._looks if settled == facts.remembers]
        found = replace(facts.found.history or History(), looks=len(looks))
        if len(looks) < 3:
            return found
        y = torch.stack([answers for _, answers in looks])  # [looks, r, d_out]
        when = torch.tensor([evaluations for evaluations, _ in looks], dtype=torch.float64)
        at = (when - when.mean())[:, None, None]
        slope = (at * y).sum(0) / at.square().sum()  # [r, d_out] per evaluation
        left = y - y.mean(0) - at * slope
        scatter = (left.square().sum(0) / (len(looks) - 2)).nanmean(0).sqrt()  # [d_out], with what is rare but large
        noise = torch.maximum(torch.maximum(facts.noise, scatter), facts.tolerance)
        drifts = bool((slope.abs() * at.square().sum().sqrt() > SETTINGS.certain * noise).any())
        length = float(when[-1] - when[0])
        drift = facts.relative(slope * length)
        return replace(found, drifts=drifts, drift=drift, per_evaluation=drift / length)


def measure_memory(sampler: Sampler, facts: Facts, generator: torch.Generator) -> History:
    """Whether rows are answered differently right after others than right after themselves."""
    rows = facts.choose(max(SETTINGS.rows, sampler.caller.smallest), generator)
    # Far from the rows, so that there is something to remember.
    distance = torch.cdist(sampler.x[rows] / sampler.spread, sampler.x[facts.usable] / sampler.spread)
    others = facts.usable[distance.argmax(1)]

    def asked_after(before: Tensor) -> Tensor:
        sampler.ask_rows(before)
        return sampler.ask_rows(rows)

    remembers, change = facts.compare(sampler, asked_after, [rows, others], 2 * len(rows))
    return History(remembers, facts.relative(change))
