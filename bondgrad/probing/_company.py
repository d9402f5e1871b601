"""Whether the answer about a row depends on the other rows of the call."""

import math
from dataclasses import dataclass

import torch

from bondgrad.probing._asker import Asker, Spent

ROWS = 4  # that are watched
OTHERS = 12  # in their company
REPEATS = 4  # of a noisy box
CERTAIN = 6.0  # standard deviations


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
            f"Rows influence one another: other rows in the call change an answer by {100 * self.change:.2g} % of the "
            "spread. Differences between perturbed rows then mean little."
        )


def measure_company(asker: Asker, generator: torch.Generator) -> Company:
    """The same rows among different others: typical ones, and copies of one that lies far out."""
    if asker.most == 1:
        return Company(False, 0.0)
    noisy = bool((asker.noise > 0).any())
    repeats = REPEATS if noisy else 1
    if asker.affordable() < 6 * repeats * (ROWS + OTHERS):
        raise Spent
    watched, typical = asker.choose(ROWS, generator), asker.choose(OTHERS, generator)
    far = (asker.x[asker.usable] - asker.x.mean(0)).div(asker.spread).square().sum(1).argmax()
    outside = asker.usable[far].expand(OTHERS)
    calls = [torch.cat(rows) for rows in ((watched, typical), (watched, outside), (typical, watched))]
    places = [slice(ROWS), slice(ROWS), slice(-ROWS, None)]
    y = torch.zeros(len(calls), ROWS, asker.y.shape[1], dtype=torch.float64)
    # There and back again: what drifts steadily has drifted equally for each of them.
    for i in [0, 1, 2, 2, 1, 0] * repeats:
        y[i] += asker.ask(asker.x[calls[i]], calls[i])[places[i]] / (2 * repeats)
    change = (y[1:] - y[0]).nan_to_num(0)  # [2, ROWS, d_out]
    expected = torch.maximum(asker.rounding, CERTAIN * asker.noise / math.sqrt(repeats))
    relative = float((change / asker.output_spread).square().mean((1, 2)).sqrt().max())
    return Company(bool((change.abs() > expected).any()), relative)
