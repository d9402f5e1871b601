"""Looking now and then whether a pattern that was found still holds."""

import math

import torch
from torch import Tensor

from bondgrad.structure.discovery._detect import CERTAIN, FRACTIONS, SCREEN, SQRT2, responses
from bondgrad.structure.discovery._search_batch import SearchBatch, between, deviation

CHECKS = 16  # at a time
PRICE = 3 * CHECKS  # in evaluations
TRIALS = 16  # of a suspicion


def missed(depends: Tensor, batch: SearchBatch, generator: torch.Generator) -> Tensor:
    """Dependencies [d_out, d] that a pattern does not have, as far as a quick look finds any.

    Many inputs are moved at once. By the pattern some outputs depend on none of them; those must stay as they are. So
    a few evaluations look at a good part of the pattern, and not at one input. When an output does change, the inputs
    that were moved are tried one by one.

    Args:
        depends: [d_out, d] the pattern.
        batch: The box.
        generator: For the choice of rows and inputs.
    """
    found = torch.zeros_like(depends)
    open_outputs = (~depends).any(1).nonzero().squeeze(1)
    if len(open_outputs) == 0:
        return found
    rows = batch.choose(CHECKS, generator)
    x, k, device = batch.x[rows], len(rows), batch.x.device
    moving = torch.stack([_moving(depends, open_outputs, i, generator) for i in range(k)])  # [k, d]
    quiet = (depends.float() @ moving.float().T).T == 0  # [k, d_out]
    draw = torch.randint(len(FRACTIONS), (k,), generator=generator, device="cpu").to(device)
    target = between(x, batch.far(rows), batch.x.new_tensor(FRACTIONS)[draw, None])
    moved = torch.where(moving, target, x)

    y = batch.ask(torch.stack((moved, x, x), 1).unsqueeze(1), rows).squeeze(1)  # [k, 3, d_out]
    noise = deviation(y[:, 1] - y[:, 2], (0,)).expand(k, -1)
    noise = torch.maximum(noise, batch.rounding_noise()(y[:, 0], y[:, 1]))  # [k, d_out]
    suspected = ((y[:, 0] - y[:, 1]).abs() > SCREEN * SQRT2 * noise) & quiet
    if not bool(suspected.any()):
        return found

    chosen = torch.ones(k, dtype=torch.bool, device=device) if batch.whole else suspected.any(1)
    rows, x, target, moved, moving = rows[chosen], x[chosen], target[chosen], moved[chosen], moving[chosen]
    noise, suspected = noise[chosen], suspected[chosen]
    pairs = torch.stack((moved, x), 1).unsqueeze(1).expand(-1, TRIALS, -1, -1)
    y = batch.ask(pairs, rows)  # [k, TRIALS, 2, d_out]
    change = y[:, :, 0] - y[:, :, 1]
    noise = torch.maximum(noise, change.std(1).nan_to_num(0) / SQRT2)  # of these rows
    reacting = suspected & (change.nanmean(1).abs() * math.sqrt(TRIALS) > CERTAIN * SQRT2 * noise)
    for j in reacting.any(1).nonzero().squeeze(1).tolist():
        if bool(((found & moving[j]).any(1) | ~reacting[j]).all()):
            continue  # by what is known already
        which = slice(None) if batch.whole else slice(j, j + 1)
        points = torch.where(moving[j], target[which], x[which])
        single = responses(batch, rows[which], points, noise[which], paired=True).largest > CERTAIN
        single &= reacting[j][:, None] & moving[j]
        unexplained = reacting[j] & ~single.any(1)  # only several inputs together move it
        found |= single | (unexplained[:, None] & moving[j])
    return found


def _moving(depends: Tensor, open_outputs: Tensor, i: int, generator: torch.Generator) -> Tensor:
    """Inputs [d] bool to be moved in the i-th check, such that some outputs should not care.

    Every second time all that one output does not depend on; else about half of the inputs, for the sake of many
    outputs at once.
    """
    if i % 2:
        chosen = int(torch.randint(len(open_outputs), (), generator=generator, device="cpu"))
        return ~depends[open_outputs[chosen]]
    d_out = len(depends)
    rank = torch.randperm(d_out, generator=generator, device="cpu").to(depends.device)
    first = torch.where(depends, rank[:, None], d_out).amin(0)  # [d] the first output that needs each input
    return first >= first.sort().values[len(first) // 2]
