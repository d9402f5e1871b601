"""Whether the answer about a row depends on the other rows of the call."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bondgrad.probing._asker import Asker, LeftOut
from bondgrad.probing._words import percent

ROWS = 4  # that are watched
OTHERS = 12  # in their company
REPEATS = 4  # of a noisy box


@dataclass(frozen=True)
class Company:
    """How the answer about a row changes with its company."""

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


def measure_company(asker: Asker, generator: torch.Generator) -> Company:
    """The same rows among different others: typical ones, and copies of one that lies far out."""
    if asker.most == 1:
        return Company(False, 0.0)
    noisy = bool((asker.noise > 0).any())
    repeats = REPEATS if noisy else 1
    if asker.affordable() < 12 * repeats * (ROWS + OTHERS):
        raise LeftOut
    change, certain = _compare(asker, generator, repeats)
    if noisy and bool((change.abs() > certain).any()):  # so much may come of a few bad answers: look again
        again, _ = _compare(asker, generator, repeats)
        change = torch.where(change.square().sum() < again.square().sum(), change, again)
    relative = float((change / asker.output_spread).square().mean((1, 2)).sqrt().max())
    return Company(bool((change.abs() > certain).any()), relative)


def _compare(asker: Asker, generator: torch.Generator, repeats: int) -> tuple[Tensor, Tensor]:
    """[2, ROWS, d_out] changes of answers with the company of rows and their place, [d_out] and what is no accident."""
    watched, typical = asker.choose(ROWS, generator), asker.choose(OTHERS, generator)
    far = (asker.x[asker.usable] - asker.x.mean(0)).div(asker.spread).square().sum(1).argmax()
    outside = asker.usable[far].expand(OTHERS)
    calls = [torch.cat(rows) for rows in ((watched, typical), (watched, outside), (typical, watched))]
    places = [slice(ROWS), slice(ROWS), slice(-ROWS, None)]
    y = torch.zeros(len(calls), ROWS, asker.y.shape[1], dtype=torch.float64)
    # There and back again: what drifts steadily has drifted equally for each of them.
    for i in [0, 1, 2, 2, 1, 0] * repeats:
        y[i] += asker.ask(asker.x[calls[i]], calls[i])[places[i]] / (2 * repeats)
    return (y[1:] - y[0]).nan_to_num(0), asker.certain(2 * repeats)
