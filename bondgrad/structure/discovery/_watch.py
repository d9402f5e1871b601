"""Checking from time to time whether a pattern that was found is still complete."""

import torch
from torch import Tensor

from bondgrad.measuring._noise import noise_from_repeats
from bondgrad.structure.discovery._dependencies import SQRT2, mean_change, responses
from bondgrad.structure.discovery._search_batch import SearchBatch
from bondgrad.structure.discovery._settings import SETTINGS

EVALUATIONS_OF_A_CHECK = 3 * SETTINGS.watched_rows  # if it finds nothing: each row once moved and twice as it is


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
