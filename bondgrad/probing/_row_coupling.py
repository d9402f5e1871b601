"""Whether the answer about a row depends on the other rows of the call."""

from dataclasses import dataclass

import torch

from bondgrad.measuring._sampler import Sampler
from bondgrad.probing._comparison import compare
from bondgrad.probing._facts import Facts
from bondgrad.probing._number_format import percent


@dataclass(frozen=True)
class RowCouplingSettings:
    """The calls that are compared."""

    rows: int = 4  # whose answers are compared
    others: int = 12  # rows beside them in a call


SETTINGS = RowCouplingSettings()


@dataclass(frozen=True)
class RowCoupling:
    """How the answer about a row changes with the other rows of the call."""

    matters: bool
    change: float  # of the answers, over the spread of the outputs, root mean square

    @property
    def words(self) -> str:
        """What a person wants to know."""
        if not self.matters:
            return "Rows do not influence one another."
        return (
            f"Rows influence one another: other rows in the call change an answer by {percent(self.change)} of the "
            "spread. Differences between perturbed rows then mean little."
        )


def measure_row_coupling(sampler: Sampler, facts: Facts, generator: torch.Generator) -> RowCoupling:
    """The same rows among different others: typical ones, and copies of one that lies far out."""
    if sampler.caller.largest == 1:
        return RowCoupling(False, 0.0)
    count, others = SETTINGS.rows, SETTINGS.others
    watched, typical = facts.choose(count, generator), facts.choose(others, generator)
    distance = (sampler.x[facts.usable] - sampler.x.mean(0)).div(sampler.spread).square().sum(1)
    outside = facts.usable[distance.argmax()].expand(others)
    questions = [
        lambda: sampler.ask_rows(torch.cat((watched, typical)))[:count],
        lambda: sampler.ask_rows(torch.cat((watched, outside)))[:count],
        lambda: sampler.ask_rows(torch.cat((typical, watched)))[-count:],
    ]
    # Noise that goes by place is no influence.
    matters, change = compare(sampler, facts, questions[:2] if facts.noise_by_place else questions, count + others)
    return RowCoupling(matters, max(map(facts.relative, change)))
