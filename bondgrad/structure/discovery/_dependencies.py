"""The search for dependencies: inputs are moved, and outputs that change by more than noise are noted."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bondgrad.measuring._moves import one_input_moved
from bondgrad.measuring._noise import noise_from_repeats
from bondgrad.measuring._statistics import normal_quantile
from bondgrad.structure.discovery._search_batch import SETTINGS, SearchBatch

SQRT2 = math.sqrt(2)  # the standard deviation of the difference of two outputs, over that of one


@dataclass(frozen=True, eq=False)
class Dependencies:
    """Which outputs depend on which inputs, and how certain that is."""

    depends: Tensor  # [d_out, d] bool
    noise: Tensor  # [d_out] standard deviation of the outputs, at least that of their rounding
    unseen: float  # estimated number of dependencies that showed at none of the rows (Chao 1984)
    answered: float  # fraction of the pattern for which at least one comparison did not fail
    deterministic: bool  # whether equal rows had equal outputs, but for rounding


def find_dependencies(batch: SearchBatch, generator: torch.Generator) -> Dependencies:
    """Find which outputs depend on which inputs. Where every comparison failed, they are taken to depend."""
    seen: Responses | None = None
    paired = False
    for _ in range(SETTINGS.rounds):
        rows = batch.choose_rows(SETTINGS.rows, generator)
        noise, deterministic = measure_noise(batch, rows)
        paired |= not deterministic
        targets = batch.targets(rows, torch.arange(len(rows), device=rows.device))
        more = responses(batch, rows, targets, noise, paired)
        seen = more if seen is None else seen.joined(more)
        if seen.unseen() <= SETTINGS.unseen * float((seen.certain > 0).sum()):
            break
    assert seen is not None
    depends = seen.largest > SETTINGS.suspicion
    doubtful = depends & (seen.certain < 2)
    if paired and bool(doubtful.any()):
        depends = (depends & ~doubtful) | confirmed(batch, seen, doubtful)
    unanswered = seen.answered == 0
    pooled = seen.noise.square().mean(0).sqrt()  # [d_out]
    answered = 1 - float(unanswered.double().mean())
    return Dependencies((depends | unanswered).cpu(), pooled.cpu(), seen.unseen(), answered, not paired)


def measure_noise(batch: SearchBatch, rows: Tensor) -> tuple[Tensor, bool]:
    """The standard deviation [r, d_out] of the outputs at rows [r], from repeated evaluations.

    Also returns whether the box is deterministic: whether all outputs equal those of the forward pass up to rounding,
    which may depend on the position of a row in a request. Of a box that takes a seed it is the noise that is left
    where the seed is the same, as it is at both ends of a move.
    """
    x, y = batch.x[rows], batch.y[rows]
    repeated = x[:, None, None].expand(-1, SETTINGS.repeats, 1, -1)
    repeats = batch.ask(repeated.transpose(1, 2) if batch.seeded else repeated, rows).flatten(
        1, 2
    )  # [r, repeats, d_out]
    own = noise_from_repeats(repeats, dim=1, order=1, over=(1,))  # [r, d_out], since some rows may be noisier
    pooled = own.square().mean(0).sqrt()  # [d_out]
    rounding = batch.rounding_noise.between(y, y)  # [r, d_out]
    differences = (repeats - y[:, None]).abs().nan_to_num(0)
    deterministic = not bool((differences > SETTINGS.suspicion * rounding[:, None]).any())
    return torch.maximum(torch.maximum(own, pooled), rounding), deterministic


class Responses(NamedTuple):
    """How the outputs changed when inputs were moved one by one, at r rows."""

    rows: Tensor  # [r] the numbers of the rows in the batch
    targets: Tensor  # [r, d] the values that their inputs were moved to
    noise: Tensor  # [r, d_out] standard deviation of the outputs there
    largest: Tensor  # [d_out, d] the largest change over the rows, in standard deviations
    where: Tensor  # [d_out, d] the row of the largest change, as a position in `rows`
    certain: Tensor  # [d_out, d] the number of rows with a change above `SearchSettings.certainty`
    answered: Tensor  # [d_out, d] the number of rows at which neither evaluation failed

    def joined(self, more: "Responses") -> "Responses":
        """The responses at the rows of both."""
        rows, targets, noise = (torch.cat(both) for both in zip(self[:3], more[:3], strict=True))
        largest = torch.maximum(self.largest, more.largest)
        where = torch.where(more.largest > self.largest, more.where + len(self.rows), self.where)
        certain, answered = self.certain + more.certain, self.answered + more.answered
        return Responses(rows, targets, noise, largest, where, certain, answered)

    def unseen(self) -> float:
        """The estimated number of dependencies that showed at none of the rows.

        This is Chao's lower bound for a number of unseen classes, in its bias-corrected form f₁ (f₁ - 1) / 2 (f₂ + 1),
        where f₁ and f₂ are the numbers of dependencies that showed at exactly one and at exactly two rows.

        References:
            A. Chao, "Nonparametric estimation of the number of classes in a population", Scandinavian Journal of
            Statistics, 1984.
        """
        once, twice = (int((self.certain == n).sum()) for n in (1, 2))
        return once * (once - 1) / (2 * (twice + 1))


def responses(
    batch: SearchBatch, rows: Tensor, targets: Tensor, noise: Tensor, paired: bool, inputs: Tensor | None = None
) -> Responses:
    """The changes of the outputs when inputs are moved one by one.

    Args:
        batch: The box.
        rows: [r] the numbers of the rows.
        targets: [r, d] the value that each input is moved to.
        noise: [r, d_out] standard deviation of the outputs.
        paired: Whether the row itself is evaluated beside every moved one, so that drift does no harm. If not, moved
            rows are compared with `batch.y`.
        inputs: [n] the inputs that are moved; None: all. The responses then have n columns.
    """
    x, base = batch.x[rows], torch.where(torch.isfinite(batch.y[rows]), batch.y[rows], math.nan)
    inputs = torch.arange(x.shape[1], device=x.device) if inputs is None else inputs
    targets = targets[:, inputs]  # [r, n]
    ends = torch.stack((targets, x[:, inputs]) if paired else (targets,), 1)  # [r, ends, n]
    at_once, parts = max(1, batch.max_points // ends[:, :, 0].numel()), []
    for some, values in zip(torch.split(inputs, at_once), torch.split(ends, at_once, 2), strict=True):
        y = batch.ask(one_input_moved(x, some, values), rows)  # [r, inputs, ends, d_out]
        moved, unmoved = y[:, :, 0], y[:, :, 1] if paired else base[:, None]
        deviation = torch.maximum(noise[:, None], batch.rounding_noise.between(moved, unmoved))
        change = (moved - unmoved).abs() / (SQRT2 * deviation)
        change.nan_to_num_(0, math.inf)  # NaN: a failed evaluation, or an output that is always zero
        certain, answered = (change > SETTINGS.certainty).sum(0), torch.isfinite(moved - unmoved).sum(0)
        parts.append((*change.max(0), certain, answered))  # [inputs, d_out] each
    return Responses(rows, targets, noise, *(torch.cat(part).T for part in zip(*parts, strict=True)))


def mean_change(batch: SearchBatch, rows: Tensor, moved: Tensor, noise: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The mean change of the outputs over n pairs of evaluations, in its standard deviations: [r, m, d_out].

    Args:
        batch: The box.
        rows: [r] the numbers of the rows.
        moved: [r, m, d] the points that each row is compared with.
        noise: [r, d_out] standard deviation of the outputs, as far as it is known.
        n: The number of pairs.

    Returns:
        Also the noise [r, m, d_out], at least as large as that of these evaluations: rare jumps may show here only.
    """
    pairs = torch.stack((moved, batch.x[rows, None].expand_as(moved)), 2)  # [r, m, 2, d]
    y = batch.ask(pairs.repeat_interleave(n, 1), rows)  # [r, m·n, 2, d_out]
    change = (y[:, :, 0] - y[:, :, 1]).view(len(rows), -1, n, y.shape[3])  # [r, m, n, d_out]
    answered = torch.isfinite(change).sum(2)  # [r, m, d_out]
    mean = change.nanmean(2)
    square = (change - mean[:, :, None]).square().nansum(2) / (answered - 1).clamp_min(1)
    noise = torch.maximum(noise[:, None], (square / 2).sqrt())
    return mean.abs() * answered.sqrt() / (SQRT2 * noise), noise


def confirmed(batch: SearchBatch, seen: Responses, doubtful: Tensor) -> Tensor:
    """Which of the doubtful dependencies [d_out, d] show again, at the row where each had its largest change.

    The false-alarm probability is that of the whole pattern: it is divided by the number of doubtful dependencies
    (Bonferroni), and among the two signs of a change.
    """
    o, i = doubtful.nonzero().unbind(1)
    d = doubtful.shape[1]
    # Outputs that are doubtful for the same input at the same row share their evaluations: k moves for all of them.
    moves, move_of = torch.unique(seen.where[o, i] * d + i, return_inverse=True)  # [k], [doubtful]
    changes = []
    for some in torch.split(moves, 1 if batch.whole else len(moves)):  # with a memory, the rows of `ask` must differ
        at, inputs = some // d, some % d
        rows, targets = seen.rows[at], seen.targets[at]
        moved = torch.where(inputs[:, None] == torch.arange(d, device=o.device), targets, batch.x[rows])
        changes.append(mean_change(batch, rows, moved[:, None], seen.noise[at], SETTINGS.confirmations)[0][:, 0])
    result = torch.zeros_like(doubtful)
    result[o, i] = torch.cat(changes)[move_of, o] > normal_quantile(1 - SETTINGS.false_alarm / (2 * len(o)))
    return result
