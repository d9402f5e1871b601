"""How finely the box computes: its noise floor, the precision that this indicates, and answers on a lattice.

The floor is found as in ECNoise: along a line of equally spaced points, high differences of a smooth function vanish,
and what is left is noise.

References:
    J. Moré and S. Wild, "Estimating computational noise", SIAM Journal on Scientific Computing, 2011.
"""

import bisect
import contextlib
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bondgrad.measuring._noise import noise_from_repeats
from bondgrad.measuring._sampler import BudgetExceeded, Sampler
from bondgrad.probing._facts import SEVERAL_ROWS, Facts


@dataclass(frozen=True)
class RoundingSettings:
    """The lines along which rounding is looked at, and what is concluded from it."""

    lines: int = 6
    points: int = 16  # of a line
    orders: tuple[int, ...] = (5, 6, 7)  # of the differences: smooth functions vanish from them, and some points remain
    spacings: tuple[int, ...] = (-20, -16, -12, -8)  # of the points, powers of two: from near a unit of float32 upwards
    fine_spacings: tuple[int, ...] = (-48, -40, -32, -24)  # which float64 has room for, too
    agreement: float = 4.0  # the factor within which estimates of the floor must agree: ECNoise's own
    still: float = 0.2  # this share of neighbours on a short line has the same answer, where arithmetic is coarse
    off_the_sample: int = 32  # points between typical rows, to see whether a lattice is only that of the rows
    lattice_values: int = 4  # different values that a lattice must have
    type_values: int = 24  # different values, other than zero, that tell which type holds them
    coarse: float = 32.0  # a floor of more rounding units of the answers' type has another cause than that type


SETTINGS = RoundingSettings()
TYPE_NAMES = ("float64", "float32", "float16", "bfloat16")
FLOAT_TYPES = tuple(getattr(torch, name) for name in TYPE_NAMES)
LARGEST_FLOORS = (3e-12, 2e-5, 7e-4, 2e-2)  # the largest that each of these types leaves in a network
PRECISION_NAMES = ("float64", "float32", "TF32 or float16", "bfloat16", "coarser than bfloat16")  # above which floors


@dataclass(frozen=True)
class Rounding:
    """How finely the box computes, and whether its answers lie on a lattice."""

    floor: float  # standard deviation of the rounding, over the size of the outputs
    precision: str  # what that looks like
    rough: bool  # whether the floor is not that of coarse arithmetic
    returned: str  # the type of the answers
    quantum: list[float | None]  # of every output: its answers are multiples of this apart. None: no lattice
    half_width: float  # of what rounds the answers more than their type does; zero: nothing does
    largest_quantum: float  # over the outputs; zero: there is no lattice
    shortcut: float | None = None  # floor with autocast and TF32 as set around the probe, where that is another
    shortcut_change: float = 0.0  # what those settings change in the answers, over their size

    @property
    def quantised(self) -> bool:
        """Whether most outputs lie on a lattice."""
        return sum(q is not None for q in self.quantum) > len(self.quantum) / 2

    @property
    def words(self) -> str:
        """The finding, in sentences."""
        text = f"No rounding to be seen: {self.precision}."
        if self.quantised:
            power = math.log10(self.largest_quantum)
            kind = "rounded to decimals" if abs(power - round(power)) < 1e-3 else "quantised"
            text = f"Answers come in steps of {self.largest_quantum:.3g} ({kind})."
        elif self.rough:
            text = f"Rough: at close points answers differ by about {self.floor:.1g} of their size, and not by steps."
        elif self.floor > 0:
            text = f"Rounding is about {self.floor:.1g} of the answers: {self.precision} inside."
        if self.shortcut is None:
            return text
        change = f"answers change by {self.shortcut_change:.1g} and rounding is about {self.shortcut:.1g}"
        text += f" As things are set here (autocast, TF32), {change}: {precision_of(self.shortcut)}."
        return f"{text} BlackBox switches that off, unless full_precision=False."


def measure_rounding(sampler: Sampler, facts: Facts, generator: torch.Generator) -> Rounding:
    """The floor, for a box without other noise; lattices, for any; and what the settings around the probe change."""
    between = torch.rand(SETTINGS.off_the_sample, 1, dtype=torch.float64, generator=generator)
    one, other = (facts.choose(SETTINGS.off_the_sample, generator) for _ in range(2))
    seen = torch.cat((facts.y, sampler.ask(torch.lerp(sampler.x[one], sampler.x[other], between), one)))  # [n, d_out]
    unit = 4 * facts.unit * facts.scale
    quantum = [_lattice(y, u) for y, u in zip(seen.T, unit.tolist(), strict=True)]
    # A floor cannot be seen below noise, nor between the steps of a lattice.
    hidden = facts.noisy or any(q is not None for q in quantum)
    floor, rough = (0.0, False) if hidden else _noise_floor(sampler, facts, generator)
    returned = bisect.bisect_left([torch.finfo(dtype).eps for dtype in FLOAT_TYPES], facts.unit)
    coarsest = max(returned, _coarsest_type(seen))
    precision = TYPE_NAMES[returned] if rough else precision_of(floor, coarsest)
    step = max((q for q in quantum if q is not None), default=0.0)
    coarse = floor > SETTINGS.coarse * max(facts.unit, torch.finfo(torch.float32).eps)
    half_width = 2 * floor * float(facts.scale.square().mean().sqrt()) if coarse else step / 2
    found = Rounding(floor, precision, rough, TYPE_NAMES[returned], quantum, half_width, step)
    with contextlib.suppress(BudgetExceeded):
        found = found if facts.noisy else _with_shortcut(sampler, facts, found, generator)
    return found


def _with_shortcut(sampler: Sampler, facts: Facts, found: Rounding, generator: torch.Generator) -> Rounding:
    """What was found, and what changes with autocast and TF32 as they are set around the probe."""
    facts = facts.with_finding("rounding", found)
    rows = facts.usable[: max(SEVERAL_ROWS, sampler.caller.smallest)]

    def ask(full_precision: bool) -> Tensor:
        sampler.full_precision = full_precision
        return sampler.ask_rows(rows)

    try:
        differ, change = facts.compare(sampler, ask, [True, False], len(rows))
        if not differ:
            return found
        sampler.full_precision = False
        size = float((change / facts.positive_scale).square().mean().sqrt())
        return replace(found, shortcut=_noise_floor(sampler, facts, generator)[0], shortcut_change=size)
    finally:
        sampler.full_precision = True


def _noise_floor(sampler: Sampler, facts: Facts, generator: torch.Generator) -> tuple[float, bool]:
    """The standard deviation of the box's rounding, over the size of its outputs; zero: none is seen.

    Also returns whether it is roughness of another kind. Coarse arithmetic often gives the same answer at points that
    are much closer together than it can tell apart.
    """
    powers = (*(SETTINGS.fine_spacings if sampler.dtype == torch.float64 else ()), *SETTINGS.spacings)
    rows = facts.choose(sampler.affordable_count(SETTINGS.lines, len(powers) * SETTINGS.points, 1 / 3), generator)
    points = _lines(sampler, sampler.x[rows], powers, generator)  # [lines, spacings, points, d]
    points = points[:, (sampler.realise(points) == points).all(3).all(2).all(0)]  # with room within the limits
    if points.shape[1] < 2:  # one spacing alone could not be told from a bend
        return 0.0, False
    y = sampler.ask(points, rows) / facts.positive_scale
    orders = torch.stack([noise_from_repeats(y, 2, n, (2, 3)).median(0).values for n in SETTINGS.orders])
    flat = orders.amax(0) <= SETTINGS.agreement * orders.amin(0)  # [spacings]
    # Rounding is the same whatever the spacing, kinks and bends are not. Coarse arithmetic shows at wide spacings only:
    # between two of its steps nothing changes at all.
    estimates = orders[1]
    pairs = estimates.unfold(0, 2, 1)  # [spacings - 1, 2]
    agreed = (pairs[:, 0] > 0) & (pairs.amax(1) <= SETTINGS.agreement * pairs.amin(1)) & flat[:-1] & flat[1:]
    floors = pairs[agreed].amax(1).sort(descending=True).values if bool(agreed.any()) else estimates[estimates > 0]
    floor = float(floors[0]) if len(floors) else 0.0
    length = ((points[:, :, -1] - points[:, :, 0]).abs() / sampler.spread).amax((0, 2))  # [spacings]
    still = (y.diff(dim=2) == 0).double().mean((0, 2, 3))[8 * length < floor]
    return floor, floor > 2 * SETTINGS.coarse * facts.unit and len(still) > 0 and float(still.max()) < SETTINGS.still


def _lines(sampler: Sampler, start: Tensor, powers: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """[lines, spacings, points, d] from near start [lines, d], exactly equally spaced even after rounding."""
    n, start = SETTINGS.points, start[:, None]
    size = torch.maximum(start.abs(), sampler.spread).log2().ceil().exp2()
    step = size * start.new_tensor(powers).exp2()[:, None]  # [lines, spacings, d]: coordinates are multiples of them
    up = torch.randint(2, step.shape, generator=generator).bool()
    first, last = start - (n - 1) / 2 * step, start + (n - 1) / 2 * step
    first = first + (sampler.low + step - first).clamp_min(0) - (last + step - sampler.high).clamp_min(0)
    k = torch.arange(n, dtype=start.dtype)[:, None]
    return ((first / step).round() * step)[:, :, None] + torch.where(up[:, :, None], k, n - 1 - k) * step[:, :, None]


def precision_of(floor: float, coarsest: int = 0) -> str:
    """The arithmetic that leaves such a floor, in answers that fit into the type of that number."""
    return PRECISION_NAMES[max(coarsest, bisect.bisect_left(LARGEST_FLOORS, floor))]


def _coarsest_type(y: Tensor) -> int:
    """The number of the coarsest floating-point type that holds all of y [n, d_out] exactly; zero: too few to tell."""
    y = y[torch.isfinite(y) & (y != 0)]
    holds = [n for n, dtype in enumerate(FLOAT_TYPES) if bool((y.to(dtype).double() == y).all())]
    return holds[-1] if len(torch.unique(y)) >= SETTINGS.type_values else 0


def _lattice(y: Tensor, rounding: float) -> float | None:
    """The quantum of which all differences between values y [n] are multiples, if there is one that shows."""
    y, tiny = y[torch.isfinite(y)].sort().values, max(rounding, 1e-300)
    gaps = y.diff()[y.diff() > tiny]
    values = len(gaps) + 1  # that are different
    if values < SETTINGS.lattice_values or len(y) < 4 * SETTINGS.lattice_values:
        return None
    for part in (1, 2, 3):  # two neighbours of the lattice may be missing
        quantum = float(gaps.min()) / part
        for _ in range(3):  # refined by the gaps that are small enough to be counted, then by all
            counts = (gaps / quantum).round()
            quantum = float((gaps * counts).sum() / counts.square().sum())
        place = (y - y[0]) / quantum
        # Values that happen to be close together make a fine lattice on which anything lies.
        crowded = float(place[-1]) <= 64 * values
        if crowded and quantum > 5 * tiny and bool(((place - place.round()).abs() < 0.05 + rounding / quantum).all()):
            return quantum
    return None
