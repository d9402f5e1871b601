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
    asker.require_calls(6 * repeats)
    if asker.affordable() < 12 * repeats * (ROWS + OTHERS):
        raise LeftOut
    change, certain = _compare(asker, generator, repeats)
    matters = bool((change.abs() > certain).any())
    if noisy and matters:  # so much may come of a few bad answers: look again
        change, certain = _compare(asker, generator, repeats)
        matters = bool((change.abs() > certain).any())
    relative = float((change / asker.output_spread).square().mean((1, 2)).sqrt().max())
    return Company(matters, relative)


def _compare(asker: Asker, generator: torch.Generator, repeats: int) -> tuple[Tensor, Tensor]:
    """[2, ROWS, d_out] changes of answers with company and place of rows; [ROWS, d_out] what is more than chance."""
    watched, typical = asker.choose(ROWS, generator), asker.choose(OTHERS, generator)
    far = (asker.x[asker.usable] - asker.x.mean(0)).div(asker.spread).square().sum(1).argmax()
    outside = asker.usable[far].expand(OTHERS)
    calls = [torch.cat(rows) for rows in ((watched, typical), (watched, outside), (typical, watched))]
    places = [slice(ROWS), slice(ROWS), slice(-ROWS, None)]
    if asker.by_place:  # noise that goes by place is no influence
        calls, places = calls[:2], places[:2]
    answers: list[list[Tensor]] = [[] for _ in calls]
    # There and back again: what drifts steadily has drifted equally for each of them.
    order = [*range(len(calls)), *reversed(range(len(calls)))]
    for i in order * repeats:
        asker.settle()
        answers[i].append(asker.ask(asker.x[calls[i]], calls[i])[places[i]])
    y = torch.stack([torch.stack(found) for found in answers])  # [calls, 2 * repeats, ROWS, d_out]
    n, mean = y.shape[1], y.nanmean(1)
    off = (y - mean[:, None]).abs().nan_to_num(0)
    # Some rows may be noisier than others, and some answers lie far out.
    own = torch.maximum(6 * off.square().mean((0, 1)).mul(2 / n).sqrt(), 2.5 * off.amax((0, 1)) / n)
    return (mean[1:] - mean[0]).nan_to_num(0), torch.maximum(asker.certain(n), own)
