"""The search for dependencies, and the check whether a pattern that was found is still complete.

Inputs are moved, and outputs that change by more than noise are noted.
"""

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
EVALUATIONS_OF_A_CHECK = 3 * SETTINGS.watched_rows  # if it finds nothing: each row is moved once and repeated twice


@dataclass(frozen=True, eq=False)
class Dependencies:
    """Which outputs depend on which inputs, and how certain that is."""

    depends: Tensor  # [d_out, d] bool
    noise: Tensor  # [d_out] standard deviation of the outputs, at least that of their rounding
    unseen: float  # estimated number of dependencies that showed at none of the rows (Chao 1984)
    answered: float  # fraction of the pattern for which at least one comparison did not fail


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
    return Dependencies((depends | unanswered).cpu(), pooled.cpu(), seen.unseen(), answered)


def measure_noise(batch: SearchBatch, rows: Tensor) -> tuple[Tensor, bool]:
    """The standard deviation [r, d_out] of the outputs at rows [r], from repeated evaluations.

    Also returns whether the box is deterministic: whether all outputs equal those of the forward pass up to rounding,
    which may depend on the position of a row in a request.
    """
    x, y = batch.x[rows], batch.y[rows]
    repeats = batch.ask(x[:, None, None].expand(-1, SETTINGS.repeats, 1, -1), rows).squeeze(2)  # [r, repeats, d_out]
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


def responses(batch: SearchBatch, rows: Tensor, targets: Tensor, noise: Tensor, paired: bool) -> Responses:
    """The changes of the outputs when inputs are moved one by one.

    Args:
        batch: The box.
        rows: [r] the numbers of the rows.
        targets: [r, d] the value that each input is moved to.
        noise: [r, d_out] standard deviation of the outputs.
        paired: Whether the row itself is evaluated beside every moved one, so that drift does no harm. If not, moved
            rows are compared with `batch.y`.
    """
    x, base = batch.x[rows], torch.where(torch.isfinite(batch.y[rows]), batch.y[rows], math.nan)
    ends = torch.stack((targets, x) if paired else (targets,), 1)  # [r, ends, d]
    at_once, parts = max(1, batch.max_points // ends[:, :, 0].numel()), []
    for first in range(0, x.shape[1], at_once):
        inputs = slice(first, first + at_once)
        y = batch.ask(one_input_moved(x, inputs, ends[:, :, inputs]), rows)  # [r, inputs, ends, d_out]
        moved, unmoved = y[:, :, 0], y[:, :, 1] if paired else base[:, None]
        deviation = torch.maximum(noise[:, None], batch.rounding_noise.between(moved, unmoved))
        change = (moved - unmoved).abs() / (SQRT2 * deviation)
        change.nan_to_num_(0, math.inf)  # NaN: a failed evaluation, or an output that is always zero
        certain, answered = (change > SETTINGS.certainty).sum(0), torch.isfinite(moved - unmoved).sum(0)
        parts.append((*change.max(0), certain, answered))  # [inputs, d_out] each
    return Responses(rows, targets, noise, *(torch.cat(part).T for part in zip(*parts, strict=True)))


def mean_change(batch: SearchBatch, rows: Tensor, moved: Tensor, noise: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The mean change of the outputs over n pairs of evaluations, in its standard deviations: [r, d_out].

    Args:
        batch: The box.
        rows: [r] the numbers of the rows.
        moved: [r, d] the point that each row is compared with.
        noise: [r, d_out] standard deviation of the outputs, as far as it is known.
        n: The number of pairs.

    Returns:
        Also the noise [r, d_out], at least as large as that of these evaluations: rare jumps may show here only.
    """
    pairs = torch.stack((moved, batch.x[rows]), 1)[:, None].expand(-1, n, -1, -1)  # [r, n, 2, d]
    y = batch.ask(pairs, rows)
    change = y[:, :, 0] - y[:, :, 1]  # [r, n, d_out]
    noise = torch.maximum(noise, change.std(1).nan_to_num(0) / SQRT2)
    return change.nanmean(1).abs() * math.sqrt(n) / (SQRT2 * noise), noise


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
        changes.append(mean_change(batch, rows, moved, seen.noise[at], SETTINGS.confirmations)[0])
    result = torch.zeros_like(doubtful)
    result[o, i] = torch.cat(changes)[move_of, o] > normal_quantile(1 - SETTINGS.false_alarm / (2 * len(o)))
    return result


def missing_dependencies(depends: Tensor, batch: SearchBatch, generator: torch.Generator) -> Tensor:
    """Dependencies [d_out, d] that a pattern lacks, as far as a few evaluations show.

    Many inputs are moved at once. Outputs that by the pattern depend on none of them must not change, so that a few
    evaluations check a large part of the pattern. When such an output does change, and does so again, the inputs that
    were moved are tried one by one.

    Args:
        depends: [d_out, d] bool, the pattern.
        batch: The box.
        generator: For the choice of rows and inputs.
    """
    found = torch.zeros_like(depends)
    incomplete = (~depends).any(1).nonzero().squeeze(1)  # outputs that do not depend on all inputs
    if len(incomplete) == 0:
        return found
    rows = batch.choose_rows(SETTINGS.watched_rows, generator)
    x, k = batch.x[rows], len(rows)
    moving = torch.stack([_inputs_to_move(depends, incomplete, i, generator) for i in range(k)])  # [k, d]
    unaffected = (depends.float() @ moving.float().T).T == 0  # [k, d_out] by the pattern
    turns = torch.randint(len(SETTINGS.fractions), (k,), generator=generator, device="cpu").to(x.device)
    moved = torch.where(moving, batch.targets(rows, turns), x)

    y = batch.ask(torch.stack((moved, x, x), 1).unsqueeze(1), rows).squeeze(1)  # [k, 3, d_out]
    noise = noise_from_repeats(y[:, 1:], dim=1, order=1, over=(0, 1))  # [d_out]
    noise = torch.maximum(noise, batch.rounding_noise.between(y[:, 0], y[:, 1]))  # [k, d_out]
    suspected = ((y[:, 0] - y[:, 1]).abs() > SETTINGS.suspicion * SQRT2 * noise) & unaffected
    if not bool(suspected.any()):
        return found

    chosen = suspected.any(1)
    rows, moved, moving, noise = (t[chosen] for t in (rows, moved, moving, noise))
    change, noise = mean_change(batch, rows, moved, noise, SETTINGS.watch_confirmations)  # [k, d_out] each
    changing = suspected[chosen] & (change > SETTINGS.certainty)
    for j in changing.any(1).nonzero().squeeze(1).tolist():
        if bool(((found & moving[j]).any(1) | ~changing[j]).all()):
            continue  # dependencies that were found at other rows explain every change
        this = slice(j, j + 1)
        single = responses(batch, rows[this], moved[this], noise[this], paired=True).largest > SETTINGS.certainty
        single &= changing[j][:, None] & moving[j]
        unexplained = changing[j] & ~single.any(1)  # outputs that change only if several inputs move together
        found |= single | (unexplained[:, None] & moving[j])
    return found


def _inputs_to_move(depends: Tensor, incomplete: Tensor, i: int, generator: torch.Generator) -> Tensor:
    """Inputs [d] bool to move in the i-th row, such that by the pattern some outputs do not change.

    Every second time these are all inputs that one output does not depend on; otherwise about half of the inputs, such
    that many outputs are checked at once.
    """
    if i % 2:
        chosen = int(torch.randint(len(incomplete), (), generator=generator, device="cpu"))
        return ~depends[incomplete[chosen]]
    d_out = len(depends)
    rank = torch.randperm(d_out, generator=generator, device="cpu").to(depends.device)
    first = torch.where(depends, rank[:, None], d_out).amin(0)  # [d] the lowest rank of an output that depends on it
    return first >= first.sort().values[len(first) // 2]
