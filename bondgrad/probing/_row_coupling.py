"""Whether the answer about a row depends on the other rows of the call."""

from dataclasses import dataclass

import torch

from bondgrad.measuring._sampler import Sampler
from bondgrad.probing._facts import Facts
from bondgrad.probing._number_format import percent


@dataclass(frozen=True)
class RowCouplingSettings:
    """The calls that are compared."""

    rows: int = 4  # whose answers are compared
    others: int = 12  # rows beside them in a call
    repeats: int = 4  # of every comparison, for a noisy box


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
    repeats = SETTINGS.repeats if facts.noisy else 1
    sampler.require(12 * repeats * (SETTINGS.rows + SETTINGS.others), calls=6 * repeats)
    return RowCoupling(*facts.confirmed(lambda: _compare(sampler, facts, generator, repeats)))


def _compare(sampler: Sampler, facts: Facts, generator: torch.Generator, repeats: int) -> tuple[bool, float]:
    """Whether the other rows of a call, or the place in it, change answers, and by how much over the spread."""
    count, others = SETTINGS.rows, SETTINGS.others
    watched, typical = facts.choose(count, generator), facts.choose(others, generator)
    distance = (sampler.x[facts.usable] - sampler.x.mean(0)).div(sampler.spread).square().sum(1)
    outside = facts.usable[distance.argmax()].expand(others)
    calls = [torch.cat(rows) for rows in ((watched, typical), (watched, outside), (typical, watched))]
    places = [slice(count), slice(count), slice(-count, None)]
    kinds = 2 if facts.noise_by_place else 3  # noise that goes by place is no influence
    # There and back again: what drifts steadily has drifted equally for each of them.
    order = [*range(kinds), *reversed(range(kinds))] * repeats
    found: list[list[torch.Tensor]] = [[] for _ in range(kinds)]
    for i in order:
        facts.settle(sampler)
        found[i].append(sampler.ask_rows(calls[i])[places[i]])
    answers = torch.stack([torch.stack(y) for y in found])  # [kinds, 2 * repeats, rows, d_out]
    n, mean = answers.shape[1], answers.nanmean(1)
    off = (answers - mean[:, None]).abs().nan_to_num(0)
    # Some rows may be noisier than others, and some answers lie far out.
    own = torch.maximum(6 * off.square().mean((0, 1)).mul(2 / n).sqrt(), 2.5 * off.amax((0, 1)) / n)
    change = (mean[1:] - mean[0]).nan_to_num(0)  # [kinds - 1, rows, d_out]
    return bool((change.abs() > torch.maximum(facts.certain(n), own)).any()), max(map(facts.relative, change))
