"""What changes the outputs of a row beside the row itself: other rows of the call, earlier calls, and time."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bondgrad.measuring._sampler import Sampler
from bondgrad.probing._facts import HARMLESS, NEGLIGIBLE, SEVERAL_ROWS, Facts
from bondgrad.probing._number_format import percent, sentences

COMPARED, OTHERS = 4, 12  # rows whose outputs are compared, and other rows in the same call


@dataclass(frozen=True)
class RowCoupling:
    """How the outputs of a row change with the other rows of the call."""

    matters: bool  # whether they change
    change: float  # root mean square change of the outputs, in units of their spread

    @property
    def words(self) -> str:
        """The finding, in sentences."""
        if not self.matters:
            return f"Rows {'hardly' if self.change > 0 else 'do not'} influence one another."
        change = f"other rows in the call change an answer by {percent(self.change)} of the spread"
        return f"Rows influence one another: {change}. Differences between perturbed rows then mean little."


def measure_row_coupling(sampler: Sampler, facts: Facts, generator: torch.Generator) -> RowCoupling:
    """Compare the outputs of the same rows among different others: typical rows, and copies of an outlying one."""
    if sampler.caller.largest == 1:
        return RowCoupling(False, 0.0)
    watched, typical = facts.choose(COMPARED, generator), facts.choose(OTHERS, generator)
    distance = (sampler.x[facts.usable] - sampler.x.mean(0)).div(sampler.spread).square().sum(1)
    outside = facts.usable[distance.argmax()].expand(OTHERS)
    calls = [(watched, typical), (watched, outside), (typical, watched)]
    if facts.found.randomness is not None and facts.found.randomness.by_place:  # not caused by other rows
        calls.pop()

    def answers_about_watched(call: tuple[Tensor, Tensor]) -> Tensor:
        first = 0 if call[0] is watched else OTHERS
        return sampler.ask_rows(torch.cat(call))[first : first + COMPARED]

    matters, change = facts.compare(sampler, answers_about_watched, calls, COMPARED + OTHERS)
    largest = max(map(facts.relative, change))
    return RowCoupling(matters and largest > NEGLIGIBLE, largest)


@dataclass(frozen=True)
class HistorySettings:
    """The rows that are evaluated repeatedly, and the thresholds of drift."""

    rows: int = 4  # rows that are evaluated repeatedly
    spare_calls: int = 30  # if there is time for fewer calls with few rows, drift is not measured
    certain: float = 6.0  # standard deviations from which on a drift is significant; many, as noise may not be normal


SETTINGS = HistorySettings()


@dataclass(frozen=True)
class History:
    """How time and earlier calls change the outputs."""

    remembers: bool | None = None  # whether outputs depend on the previous call. None: not measured
    memory: float = 0.0  # root mean square change due to the previous call, in units of the output spread
    looks: int = 0  # how often the same rows were evaluated to measure drift
    drifts: bool = False  # whether outputs drift with time
    drift: float = 0.0  # root mean square drift from the first to the last look, in units of the output spread
    per_evaluation: float = 0.0  # drift divided by the number of evaluations between these looks
    rounding: float = 0.0  # largest change due to the previous call, in that unit, if it is so small as to be harmless

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
            self.remembers is False and self.rounding == 0 and "No memory of earlier questions.",
            self.rounding > 0 and f"Its memory is no more than rounding: {changed}, which does no harm.",
        )


class DriftMonitor:
    """Evaluates the same rows repeatedly, between the measurements.

    Args:
        rows: [r] numbers of the sampler's rows.
    """

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        self._looks: list[tuple[bool, int, Tensor]] = []  # whether settled, evaluations so far, outputs [r, d_out]

    def look(self, sampler: Sampler, facts: Facts) -> None:
        """Evaluate the rows once more; raises `BudgetExceeded` if the budget does not suffice."""
        sampler.require(2 * len(self._rows) + SEVERAL_ROWS, SETTINGS.spare_calls)
        facts.settle(sampler)
        self._looks.append((facts.remembers, sampler.evaluations, sampler.ask_rows(self._rows)))

    def measure_drift(self, sampler: Sampler, facts: Facts, generator: torch.Generator) -> History:
        """The finding on memory, with the drift over all looks added."""
        # Before a box was known to have memory, looks came after arbitrary calls, and cannot be compared.
        looks = [(when, y) for settled, when, y in self._looks if settled == facts.remembers]
        found = replace(facts.found.history or History(), looks=len(looks))
        if len(looks) < 3:
            return found
        y = torch.stack([answers for _, answers in looks])  # [looks, r, d_out]
        when = torch.tensor([evaluations for evaluations, _ in looks], dtype=torch.float64)
        at = (when - when.mean())[:, None, None]
        slope = (at * y).sum(0) / at.square().sum()  # [r, d_out] per evaluation
        left = y - y.mean(0) - at * slope
        scatter = (left.square().sum(0) / (len(looks) - 2)).nanmean(0).sqrt()  # [d_out] which includes rare outliers
        noise = torch.maximum(torch.maximum(facts.noise, scatter), facts.tolerance)
        drifts = bool((slope.abs() * at.square().sum().sqrt() > SETTINGS.certain * noise).any())
        length = float(when[-1] - when[0])
        drift = facts.relative(slope * length)
        return replace(found, drifts=drifts, drift=drift, per_evaluation=drift / length)


def measure_memory(sampler: Sampler, facts: Facts, generator: torch.Generator) -> History:
    """Compare the outputs of rows right after a call with other rows and right after a call with the same rows."""
    rows = facts.choose(max(SETTINGS.rows, sampler.caller.smallest), generator)
    # The other rows are far from the rows, so that memory has a large effect.
    distance = torch.cdist(sampler.x[rows] / sampler.spread, sampler.x[facts.usable] / sampler.spread)
    others = facts.usable[distance.argmax(1)]

    def asked_after(before: Tensor) -> Tensor:
        sampler.ask_rows(before)
        return sampler.ask_rows(rows)

    differ, change = facts.compare(sampler, asked_after, [rows, others], 2 * len(rows))
    largest = float((change.abs() / facts.output_spread).max())
    harmless = differ and largest <= HARMLESS
    return History(differ and not harmless, facts.relative(change), rounding=largest if harmless else 0.0)
