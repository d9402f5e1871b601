"""Whether the answer about a row depends on the other rows of the call."""

from dataclasses import dataclass

import torch

from bondgrad.measuring._sampler import Sampler
from bondgrad.probing._facts import Facts
from bondgrad.probing._number_format import percent

COMPARED, OTHERS = 4, 12  # rows whose answers are compared, and rows beside them in a call


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
    watched, typical = facts.choose(COMPARED, generator), facts.choose(OTHERS, generator)
    distance = (sampler.x[facts.usable] - sampler.x.mean(0)).div(sampler.spread).square().sum(1)
    outside = facts.usable[distance.argmax()].expand(OTHERS)
    questions = [
        lambda: sampler.ask_rows(torch.cat((watched, typical)))[:COMPARED],
        lambda: sampler.ask_rows(torch.cat((watched, outside)))[:COMPARED],
        lambda: sampler.ask_rows(torch.cat((typical, watched)))[OTHERS:],
    ]
    if facts.found.randomness is not None and facts.found.randomness.by_place:  # which is no influence
        questions.pop()
    matters, change = facts.compare(sampler, questions, COMPARED + OTHERS)
    return RowCoupling(matters, max(map(facts.relative, change)))
