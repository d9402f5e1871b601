"""How finely the box computes: its noise floor, the precision that this indicates, and answers on a lattice.

The floor is found as in ECNoise: along a line of equally spaced points, high differences of a smooth function vanish,
and what is left is noise.

References:
    J. Moré and S. Wild, "Estimating computational noise", SIAM Journal on Scientific Computing, 2011.
"""

import bisect
import contextlib
import itertools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bondgrad.measuring._noise import noise_from_repeats
from bondgrad.measuring._sampler import BudgetExceeded, Sampler
from bondgrad.probing._comparison import compare
from bondgrad.probing._facts import SEVERAL_ROWS, Facts
from bondgrad.probing._number_format import sentences


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
    coarse: float = 64.0  # a floor of more rounding units of the answers' type has another cause than that type


SETTINGS = RoundingSettings()
FLOAT_TYPES = ("float64", "float32", "float16", "bfloat16")
ROUNDING_UNITS = (2.0**-52, 2.0**-23, 2.0**-10, 2.0**-7)  # of these types: from one to the next larger number
LARGEST_FLOORS = (3e-12, 2e-5, 1.5e-3, 2e-2)  # the largest that each of these types leaves in a network
PRECISION_NAMES = ("float64", "float32", "TF32 or float16", "bfloat16", "coarser than bfloat16")  # above which floors


@dataclass(frozen=True)
class Rounding:
    """How finely it computes."""

    floor: float  # standard deviation of the rounding, over the size of the outputs
    precision: str  # what that looks like
    rough: bool  # whether the floor is not that of coarse arithmetic
    returned: str  # the type of the answers
    answers: str  # the coarsest type that holds all of them
    size: float  # of the outputs, root mean square
    quantum: list[float | None]  # of every output: its answers are multiples of this apart. None: no lattice
    shortcut: float | None = None  # floor with autocast and TF32 as set around the probe, where that is another
    shortcut_change: float = 0.0  # what those settings change in the answers, over their size

    @property
    def quantised(self) -> bool:
        """Whether most outputs lie on a lattice."""
        return sum(q is not None for q in self.quantum) > len(self.quantum) / 2

    @property
    def largest_quantum(self) -> float:
        """Over the outputs; zero: there is no lattice."""
        return max((q for q in self.quantum if q is not None), default=0.0)

    @property
    def words(self) -> str:
        """What a person wants to know."""
        text = f"No rounding to be seen: {self.precision}."
        if self.quantised:
            power = math.log10(self.largest_quantum)
            kind = "rounded to decimals" if abs(power - round(power)) < 1e-3 else "quantised"
            text = f"Answers come in steps of {self.largest_quantum:.3g} ({kind})."
        elif self.rough:
            text = f"Rough: at close points answers differ by about {self.floor:.1g} of their size, and not by steps."
        elif self.floor > 0:
            text = f"Rounding is about {self.floor:.1g} of the answers: {self.precision} inside."
        return sentences(
            text,
            self.shortcut is not None
            and f"As things are set here (autocast, TF32), answers change by {self.shortcut_change:.1g} and rounding "
            f"is about {self.shortcut:.1g}: {precision_of(self.shortcut)}. BlackBox switches that off, unless "
            "full_precision=False.",
        )


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
    returned = FLOAT_TYPES[bisect.bisect_left(ROUNDING_UNITS, facts.unit)]
    answers = _coarsest_type(seen) or returned
    coarser = max(FLOAT_TYPES.index(answers), bisect.bisect_left(LARGEST_FLOORS, floor))
    precision = PRECISION_NAMES[FLOAT_TYPES.index(returned) if rough else coarser]
    size = float(facts.scale.square().mean().sqrt())
    found = Rounding(floor, precision, rough, returned, answers, size, quantum)
    with contextlib.suppress(BudgetExceeded):
        return found if facts.noisy else _with_shortcut(sampler, facts.with_rounding(found), found, generator)
    return found


def _with_shortcut(sampler: Sampler, facts: Facts, found: Rounding, generator: torch.Generator) -> Rounding:
    """What was found, and what changes with autocast and TF32 as they are set around the probe."""
    rows = facts.usable[: max(SEVERAL_ROWS, sampler.caller.smallest)]

    def ask(full_precision: bool) -> Tensor:
        sampler.full_precision = full_precision
        return sampler.ask_rows(rows)

    try:
        differ, change = compare(sampler, facts, [lambda: ask(True), lambda: ask(False)], len(rows))
        if not differ:
            return found
        size = float((change / torch.where(facts.scale > 0, facts.scale, 1.0)).square().mean().sqrt())
        ask(False)
        return replace(found, shortcut=_noise_floor(sampler, facts, generator)[0], shortcut_change=size)
    finally:
        sampler.full_precision = True


def _noise_floor(sampler: Sampler, facts: Facts, generator: torch.Generator) -> tuple[float, bool]:
    """The standard deviation of the box's rounding, over the size of its outputs; zero: none is seen.

    Also returns whether it is roughness of another kind. Coarse arithmetic often gives the same answer at points that
    are much closer together than it can tell apart.
    """
    powers = (*(SETTINGS.fine_spacings if sampler.dtype == torch.float64 else ()), *SETTINGS.spacings)
    lines = sampler.affordable_count(SETTINGS.lines, len(powers) * SETTINGS.points, share=1 / 3)
    rows = facts.choose(lines, generator)
    scale = torch.where(facts.scale > 0, facts.scale, 1.0)
    estimates: list[tuple[float, bool]] = []  # for each spacing, and whether differences of all orders agree on it
    close: list[tuple[float, float]] = []  # for each, the length of the lines, in spreads, and how much stood still
    for power in powers:
        points = _line(sampler, sampler.x[rows], power, generator)  # [lines, points, d]
        if not torch.equal(sampler.realise(points), points):  # no room within the limits
            continue
        y = sampler.ask(points, rows) / scale
        orders = [float(noise_from_repeats(y, 1, order, (1, 2)).median()) for order in SETTINGS.orders]
        estimates.append((orders[1], max(orders) <= SETTINGS.agreement * min(orders)))
        length = float(((points[:, -1] - points[:, 0]).abs() / sampler.spread).amax())
        close.append((length, float((y.diff(dim=1) == 0).double().mean())))
    # Rounding is the same whatever the spacing, kinks and bends are not. Coarse arithmetic shows at wide spacings only:
    # between two of its steps nothing changes at all.
    agreed = [
        max(a, b)
        for (a, flat_a), (b, flat_b) in itertools.pairwise(estimates)
        if flat_a and flat_b and a > 0 and max(a, b) <= SETTINGS.agreement * min(a, b)
    ]
    floor = max(agreed) if agreed else next((a for a, _ in estimates if a > 0), 0.0)
    near = [still for length, still in close if 8 * length < floor]
    return floor, floor > SETTINGS.coarse * facts.unit and bool(near) and max(near) < SETTINGS.still


def _line(sampler: Sampler, start: Tensor, power: int, generator: torch.Generator) -> Tensor:
    """[lines, points, d] points from near start [lines, d], exactly equally spaced even after rounding."""
    n = SETTINGS.points
    size = torch.maximum(start.abs(), sampler.spread).log2().ceil().exp2()
    step = size * 2.0**power  # [lines, d] powers of two, and coordinates are multiples of them
    up = torch.randint(2, step.shape, generator=generator).bool()
    first, last = start - (n - 1) / 2 * step, start + (n - 1) / 2 * step
    first = first + (sampler.low + step - first).clamp_min(0) - (last + step - sampler.high).clamp_min(0)
    k = torch.arange(n, dtype=start.dtype)[:, None]
    return (first / step).round().mul(step)[:, None] + torch.where(up[:, None], k, n - 1 - k) * step[:, None]


def precision_of(floor: float) -> str:
    """The arithmetic that leaves such a floor."""
    return PRECISION_NAMES[bisect.bisect_left(LARGEST_FLOORS, floor)]


def _coarsest_type(y: Tensor) -> str | None:
    """The coarsest floating-point type that holds all of y [n, d_out] exactly; None: too few values to tell."""
    y = y[torch.isfinite(y) & (y != 0)]
    if len(torch.unique(y)) < SETTINGS.type_values:
        return None
    return next(name for name in reversed(FLOAT_TYPES) if bool((y.to(getattr(torch, name)).double() == y).all()))


def _lattice(y: Tensor, rounding: float) -> float | None:
    """The quantum of which all differences between values y [n] are multiples, if there is one that shows."""
    y = y[torch.isfinite(y)].sort().values
    gaps = y.diff()
    tiny = max(rounding, 1e-300)
    distinct = gaps > tiny
    values, gaps = torch.cat((y[:1], y[1:][distinct])), gaps[distinct]
    if len(values) < SETTINGS.lattice_values or len(y) < 4 * SETTINGS.lattice_values:
        return None
    for part in (1, 2, 3):  # two neighbours of the lattice may be missing
        quantum = float(gaps.min()) / part
        for _ in range(3):  # refined by the gaps that are small enough to be counted, then by all
            counts = (gaps / quantum).round()
            quantum = float((gaps * counts).sum() / counts.square().sum())
        place = (values - values[0]) / quantum
        # Values that happen to be close together make a fine lattice on which anything lies.
        crowded = float(place[-1]) <= 64 * len(values)
        if crowded and quantum > 5 * tiny and bool(((place - place.round()).abs() < 0.05 + rounding / quantum).all()):
            return quantum
    return None
