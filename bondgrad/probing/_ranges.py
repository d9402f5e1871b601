"""What happens over the whole range of every input: where the box fails, and where it hardly changes."""

import contextlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bondgrad.probing._asker import Asker, LeftOut
from bondgrad.probing._words import percent

ROWS = 2
POINTS = (17, 9, 5)  # of a sweep, as the budget allows
BEYOND = 0.1  # of the range of x, on both sides, within the limits
SHARE = 0.3  # of what is left
BISECTIONS = 10
HARDLY = 1e-3  # of the largest change
SATURATED = 0.6  # of the range
NUMBERS = 2**21  # in points that exist at a time


@dataclass(frozen=True)
class Failure:
    """A range of an input in which the box fails, the other inputs being typical."""

    input: int
    low: float | None  # None: from the end of what was looked at
    high: float | None
    how: str

    @property
    def words(self) -> str:
        """For the list of failures."""
        if self.low is None and self.high is None:
            return f"input {self.input} anywhere: {self.how}"
        if self.low is None:
            return f"input {self.input} below {self.high:.3g}: {self.how}"
        if self.high is None:
            return f"input {self.input} above {self.low:.3g}: {self.how}"
        return f"input {self.input} from {self.low:.3g} to {self.high:.3g}: {self.how}"


@dataclass(frozen=True)
class Ranges:
    """What sweeps over the inputs have shown."""

    failures: list[Failure]
    failing_rows: float  # fraction of the typical rows
    flat: float  # fraction of the range over which outputs hardly change, median over inputs that matter
    inputs: int  # that were looked at
    moving: list[int]  # those that changed an output

    @property
    def saturated(self) -> bool:
        """Whether most of the range is flat."""
        return self.flat > SATURATED

    @property
    def words(self) -> str:
        """What a person wants to know."""
        parts = []
        if self.failing_rows > 0:
            parts.append(f"It fails at {percent(self.failing_rows)} of the typical rows.")
        if self.failures:
            parts.append(
                f"It fails at {'; '.join(f.words for f in self.failures[:8])}{'; ...' * (len(self.failures) > 8)}."
            )
        elif self.inputs:
            parts.append("It answered over the whole range of the inputs.")
        if self.saturated:
            parts.append(f"Saturated: over {percent(self.flat)} of the range its outputs hardly change.")
        return " ".join(parts)


def measure_ranges(asker: Asker, generator: torch.Generator) -> Ranges:
    """Sweep every input by itself, from a little below to a little above what is typical of it."""
    failing = 1 - len(asker.usable) / max(1, asker.asked)
    d = asker.x.shape[1]
    allowed = int(SHARE * asker.affordable())
    points = next((p for p in POINTS if p * d * ROWS <= allowed), POINTS[-1])
    inputs = torch.randperm(d, generator=generator)[: allowed // (points * ROWS)].sort().values
    if len(inputs) == 0:
        raise LeftOut
    rows = asker.choose(ROWS, generator)
    low, high = _ends(asker)
    noise = torch.maximum(6 * math.sqrt(2) * asker.noise, asker.rounding) / asker.output_spread  # [d_out]
    failures, flat, largest = [], [], []
    for some in torch.split(inputs, max(1, NUMBERS // (ROWS * points * d))):
        values = torch.stack([torch.linspace(low[i], high[i], points, dtype=torch.float64) for i in some.tolist()])
        y = _sweep(asker, rows, some, values)  # [n, ROWS, points, d_out]
        for i, line, found in zip(some.tolist(), values, y, strict=True):
            broken = ~torch.isfinite(found).all(2).all(0)  # [points]
            failures += _intervals(asker, rows, i, line, broken, found) if bool(broken.any()) else []
        change = y.diff(dim=2).abs() / asker.output_spread
        change = torch.where(torch.isfinite(change), change, math.nan)
        # A bad answer makes two large changes.
        ordered = change.nan_to_num(0).flatten(1, 2).sort(1, descending=True).values  # [n, changes, d_out]
        largest.append(ordered[:, 2 if bool((asker.noise > 0).any()) else 0])
        flat.append(_still(change, largest[-1], noise))
    moves = torch.cat(largest) > noise
    return Ranges(
        failures, failing, _flat(torch.cat(flat), torch.cat(largest), noise), len(inputs), inputs[moves.any(1)].tolist()
    )


def _ends(asker: Asker) -> tuple[Tensor, Tensor]:
    """[d] each: where sweeps begin and end."""
    low, high = asker.lowest, asker.highest
    room = torch.where(high > low, BEYOND * (high - low), asker.spread)
    low, high = low - room, high + room
    if asker.low is not None and asker.high is not None:
        low, high = torch.maximum(low, asker.low), torch.minimum(high, asker.high)
    return low, high


def _sweep(asker: Asker, rows: Tensor, inputs: Tensor, values: Tensor) -> Tensor:
    """[n, rows, points, d_out] with each of inputs [n] by itself at each of its values [n, points]."""
    (n, count), d = values.shape, asker.x.shape[1]
    points = asker.x[rows][:, None].repeat(n, 1, count, 1)  # [n, rows, points, d]
    points[torch.arange(n), :, :, inputs] = values[:, None].expand(-1, len(rows), -1)
    y = asker.ask(points.view(-1, d), rows.repeat_interleave(count).repeat(n))
    return y.view(n, len(rows), count, -1)


def _still(change: Tensor, largest: Tensor, noise: Tensor) -> Tensor:
    """[n, d_out] the fraction of changes [n, rows, steps, d_out] that are small beside the largest [n, d_out]."""
    small = (change <= torch.maximum(HARDLY * largest, noise)[:, None, None]).double().sum((1, 2))
    return small / torch.isfinite(change).sum((1, 2)).clamp_min(1)


def _flat(still: Tensor, largest: Tensor, noise: Tensor) -> float:
    """Median over the inputs of the fraction [inputs, d_out], mean over the outputs that each of them moves."""
    matter = (largest > HARDLY * largest.amax(0)) & (largest > 10 * noise)  # among noise, nothing can be said
    moves = matter.any(1)
    if not bool(moves.any()):
        return 0.0
    by_input = (still * matter).sum(1)[moves] / matter.sum(1)[moves]
    return float(by_input.median())


def _intervals(asker: Asker, rows: Tensor, i: int, values: Tensor, broken: Tensor, y: Tensor) -> list[Failure]:
    """The ranges of input i in which it fails, their ends found by halving."""
    found = []
    asker.errors.clear()
    one = torch.tensor([i])
    with contextlib.suppress(LeftOut):  # once more, to hear what it raises
        y = _sweep(asker, rows, one, values[broken][None])
    how = _how(asker, y)
    edges = torch.cat((torch.tensor([False]), broken, torch.tensor([False]))).int().diff()
    firsts, ends = (edges == 1).nonzero().squeeze(1).tolist(), (edges == -1).nonzero().squeeze(1).tolist()
    for first, end in zip(firsts, ends, strict=True):
        low = None if first == 0 else _edge(asker, rows, one, float(values[first - 1]), float(values[first]))
        high = None if end == len(values) else _edge(asker, rows, one, float(values[end]), float(values[end - 1]))
        found.append(Failure(i, low, high, how))
    return found


def _edge(asker: Asker, rows: Tensor, one: Tensor, fine: float, broken: float) -> float:
    """Between a value at which it works and one at which it does not, the border."""
    for _ in range(BISECTIONS if asker.affordable() > 50 * ROWS * BISECTIONS else 0):
        middle = (fine + broken) / 2
        y = _sweep(asker, rows, one, torch.tensor([[middle]], dtype=torch.float64))
        if bool(torch.isfinite(y).all()):
            fine = middle
        else:
            broken = middle
    return (fine + broken) / 2


def _how(asker: Asker, y: Tensor) -> str:
    """In which way it fails, given answers that have failures among them."""
    if asker.errors and bool(torch.isnan(y).all(-1).any()):
        return f"raises {max(asker.errors, key=lambda name: asker.errors[name])}"
    return "NaN" if bool(torch.isnan(y).any()) else "infinite" if math.inf in y.abs() else "not finite"
