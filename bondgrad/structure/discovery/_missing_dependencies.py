"""The check whether a known pattern is complete, and the search for what it lacks."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from bondgrad.structure.discovery._dependencies import SQRT2, mean_change, responses
from bondgrad.structure.discovery._search_batch import SETTINGS, SearchBatch


class Check(NamedTuple):
    """What a check of a pattern has found."""

    missing: Tensor  # [d_out, d] bool, dependencies that the pattern lacks
    noise: Tensor  # [d_out] standard deviation of the outputs, as far as it is known; zero: no more than rounding


class Suspicion(NamedTuple):
    """Outputs that changed at one row although by the pattern they depend on none of the inputs that were moved."""

    row: Tensor  # [1] the number of the row
    moved: Tensor  # [1, d] the point that it was moved to
    moving: Tensor  # [d] bool, the inputs that are different there
    outputs: Tensor  # [d_out] bool
    change: Tensor  # [d_out]
    noise: Tensor  # [1, d_out] standard deviation of the outputs there


def check_pattern(
    depends: Tensor, noise: Tensor, batch: SearchBatch, budget: float, generator: torch.Generator
) -> Check:
    """Look for dependencies that a pattern lacks, with a few evaluations.

    At each of some rows many inputs are moved at once. Outputs that by the pattern depend on none of them must not
    change, whatever the curvature of the box. If some do, and do so again in repeated pairs of evaluations, the inputs
    that they react to are found by halving, and moved at further rows, where all outputs are looked at.

    A deterministic box is evaluated once for every row, and compared with the forward pass. Where there is noise, two
    moves of a row are compared with another evaluation of the row itself, which also tells how noisy the box is now. A
    change that does not repeat counts as noise from then on.

    Args:
        depends: [d_out, d] bool, the pattern.
        noise: [d_out] standard deviation of the outputs, as far as it is known; zero: no more than rounding.
        batch: The box.
        budget: The evaluations that a check may cost, about, if it suspects nothing.
        generator: For the choice of rows and inputs.
    """
    missing = torch.zeros_like(depends)
    incomplete = (~depends).any(1).nonzero().squeeze(1)  # outputs that do not depend on all inputs
    if len(incomplete) == 0:
        return Check(missing, noise)
    suspicion, noise = _suspicion(depends, incomplete, noise, batch, budget, generator)
    if suspicion is None:
        return Check(missing, noise)
    change, pooled = mean_change(
        batch, suspicion.row, suspicion.moved[:, None], suspicion.noise, SETTINGS.watch_confirmations
    )
    certain = suspicion.outputs & (change[0, 0] > SETTINGS.certainty)
    if not bool(certain.any()):
        explained = suspicion.change / (SQRT2 * SETTINGS.suspicion)  # noise of which it would be no surprise
        return Check(missing, torch.where(suspicion.outputs, torch.maximum(noise, explained), noise))
    # As many pairs as it takes for the least of these changes, a mean over pairs, to be twice as large as it must be.
    least = float(change[0, 0][certain].min()) / math.sqrt(SETTINGS.watch_confirmations)
    pairs = min(SETTINGS.watch_confirmations, math.ceil((2 * SETTINGS.certainty / least) ** 2) or 1)
    suspicion = suspicion._replace(outputs=certain, noise=pooled[0])
    missing = _inputs_that_explain(suspicion, batch, pairs)
    inputs = missing.any(0).nonzero().squeeze(1)
    missing[:, inputs] |= _reactions(inputs, suspicion, batch, generator)
    return Check(missing & ~depends, noise)


def _suspicion(
    depends: Tensor,
    incomplete: Tensor,
    noise: Tensor,
    batch: SearchBatch,
    budget: float,
    generator: torch.Generator,
) -> tuple[Suspicion | None, Tensor]:
    """The largest change that the pattern does not explain, and what is known of the noise [d_out] afterwards."""
    noisy = batch.seeded or bool((noise > 0).any())  # a seed makes the forward pass differ by other random numbers
    moves = SETTINGS.moves if noisy else 1
    unmoved = noisy + batch.seeded
    most = SETTINGS.most_moves // moves
    count = most if budget >= most * (moves + unmoved) else math.ceil(budget / (moves + unmoved))
    rows = batch.choose_rows(max(1, count), generator)
    k, d = len(rows), depends.shape[1]
    x, at = batch.x[rows, None], rows.repeat_interleave(moves)
    moving = torch.stack([_inputs_to_move(depends, incomplete, generator) for _ in range(len(at))])  # [k·moves, d]
    nearer = torch.rand(len(at), generator=generator, device="cpu") >= SETTINGS.far
    turns = torch.randint(len(SETTINGS.fractions), (len(at),), generator=generator, device="cpu") * nearer
    moved = torch.where(moving, batch.targets(at, turns.to(x.device)), batch.x[at])  # [k·moves, d]

    ends = torch.cat((moved.view(k, moves, d), x.expand(k, unmoved, d)), 1)
    y = batch.ask(ends.unsqueeze(1), rows).squeeze(1)  # [k, ends, d_out]
    forward = torch.where(torch.isfinite(batch.y[rows]), batch.y[rows], math.nan)
    base = y[:, moves] if noisy else forward
    rounding = batch.rounding_noise.between(y[:, :moves], base[:, None])  # [k, moves, d_out]
    if noisy:
        noise = _updated(noise, base - (y[:, -1] if batch.seeded else forward), rounding)
    deviation = torch.maximum(noise, rounding)
    unaffected = (depends.float() @ moving.float().T).T.view(k, moves, -1) == 0  # by the pattern
    change = torch.where(unaffected, (y[:, :moves] - base[:, None]).abs(), 0).nan_to_num_(0)  # NaN: a failed evaluation
    ratio = (change / (SQRT2 * deviation)).nan_to_num_(0, math.inf)
    if not bool((ratio > SETTINGS.certainty).any()):
        return None, noise
    worst = ratio.amax(2).argmax()  # of all moves
    move = worst.unsqueeze(0)
    change, ratio, deviation = (t.flatten(0, 1)[move] for t in (change, ratio, deviation))  # [1, d_out] each
    suspected = ratio[0] > SETTINGS.certainty
    return Suspicion(at[move], moved[move], moving[worst], suspected, change[0], deviation), noise


def _updated(noise: Tensor, difference: Tensor, rounding: Tensor) -> Tensor:
    """What is known of the noise [d_out] after repeated evaluations whose outputs differ by so much [k, d_out].

    It is a mean over this check and those before, and zero where it is no more than the rounding [k, moves, d_out].
    """
    now = (difference.square() / 2).nanmean(0)
    weight = torch.where(torch.isfinite(now), SETTINGS.noise_weight, 0.0)
    noise = ((1 - weight) * noise.square() + weight * now.nan_to_num(0, 0, 0)).sqrt()
    return torch.where(noise > rounding.mean((0, 1)), noise, 0)


def _inputs_to_move(depends: Tensor, incomplete: Tensor, generator: torch.Generator) -> Tensor:
    """Inputs [d] bool to move, such that by the pattern some outputs do not change.

    The outputs have random ranks. The inputs are about that half of all that only outputs of high ranks depend on, so
    that many outputs of low ranks are checked at once; or fewer, such that the first output does not depend on them.
    """
    d_out = len(depends)
    rank = torch.randperm(d_out, generator=generator, device="cpu").to(depends.device)
    first = incomplete[torch.randint(len(incomplete), (), generator=generator, device="cpu")]
    rank[first] = -1
    lowest = torch.where(depends, rank[:, None], d_out).amin(0)  # [d] the lowest rank of an output that depends on it
    return lowest >= lowest.sort().values[len(lowest) // 2].clamp_min(0)


def _inputs_that_explain(suspicion: Suspicion, batch: SearchBatch, n: int) -> Tensor:
    """The dependencies [d_out, d] that explain a suspicion: the inputs that were moved are halved, and halved again.

    Each half is tried with n pairs of evaluations.
    Outputs that change with neither half may depend on any input of both: on several that must move together, perhaps.
    """
    x, (outputs, d) = batch.x[suspicion.row], (len(suspicion.outputs), suspicion.moving.numel())
    found = torch.zeros(outputs, d, dtype=torch.bool, device=x.device)
    parts = [(suspicion.moving.nonzero().squeeze(1), suspicion.outputs)]  # inputs, and the outputs that they change
    while parts:
        for inputs, changing in parts:
            if len(inputs) == 1:
                found[changing, inputs] = True
        parts = [part for part in parts if len(part[0]) > 1]
        if not parts:
            break
        halves = [half for inputs, _ in parts for half in inputs.chunk(2)]
        points = x.repeat(len(halves), 1)  # [m, d]
        for point, half in zip(points, halves, strict=True):
            point[half] = suspicion.moved[0, half]
        change, _ = mean_change(batch, suspicion.row, points[None], suspicion.noise, n)
        seen = (change[0] > SETTINGS.certainty).view(len(parts), 2, outputs)  # [parts, 2, d_out]
        smaller = []
        for (inputs, changing), both in zip(parts, seen, strict=True):
            found[(changing & ~both.any(0))[:, None] & _members(inputs, d)] = True
            pairs = zip(inputs.chunk(2), both & changing, strict=True)
            smaller += [(half, some) for half, some in pairs if bool(some.any())]
        parts = smaller
    return found


def _members(inputs: Tensor, d: int) -> Tensor:
    """The inputs [n] as a mask [d]."""
    return torch.zeros(d, dtype=torch.bool, device=inputs.device).index_fill_(0, inputs, True)


def _reactions(inputs: Tensor, suspicion: Suspicion, batch: SearchBatch, generator: torch.Generator) -> Tensor:
    """Which outputs react to these inputs [n], each moved by itself, there and at further rows: [d_out, n]."""
    rows = batch.choose_rows(SETTINGS.rows, generator)
    targets = batch.targets(rows, torch.arange(len(rows), device=rows.device))
    if batch.whole:  # all rows are there already, each once
        targets[suspicion.row] = suspicion.moved
    else:
        rows, targets = torch.cat((suspicion.row, rows)), torch.cat((suspicion.moved, targets))
    noise = suspicion.noise.expand(len(rows), -1)
    return responses(batch, rows, targets, noise, paired=True, inputs=inputs).largest > SETTINGS.certainty
