"""How finely the box computes: its noise floor, the precision that this speaks of, and answers on a lattice.

The floor is found as in ECNoise (Moré and Wild, "Estimating Computational Noise", 2011): along a line of equally spaced
points, high differences of a smooth function vanish, and what is left is noise.
"""

import itertools
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bondgrad.probing._asker import Asker, LeftOut

POINTS = 16  # of a line
LINES = 6
ORDERS = (5, 6, 7)  # of the differences
SPACINGS = {torch.float32: (-20, -16, -12, -8), torch.float64: (-48, -40, -32, -24, -16, -12, -8)}  # powers of two
FLAT = 4.0  # the factor within which estimates must agree
EDGES = (("float64", 3e-12), ("float32", 2e-5), ("float16", 1.5e-3), ("bfloat16", 2e-2))  # largest floors
ORDER = (*(name for name, _ in EDGES), "coarser than bfloat16")
NAMED = {"float16": "TF32 or float16"}  # as coarse as each other
DISTINCT = 4  # values that a lattice must have
SEVERAL = 24  # values, other than zero, that tell which type holds them
STILL = 0.2  # of neighbours on a short line have the same answer, where arithmetic is coarse
OFF_THE_SAMPLE = 32  # points that show whether a lattice is that of the typical rows
COARSE = 64  # times the rounding of its answers' type: then it is more than that
NAMES = ((2.0**-52, "float64"), (2.0**-23, "float32"), (2.0**-10, "float16"))  # and what a unit is there


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
    shortcut: float | None  # floor with autocast and TF32 as they are set around the probe, where that is another
    shortcut_change: float  # what those settings change in the answers, over their size

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
        if self.quantised:
            text = f"Answers come in steps of {self.largest_quantum:.3g}"
            text += " (rounded to decimals)." if _is_decimal(self.largest_quantum) else " (quantised)."
        elif self.rough:
            text = f"Rough: at close points answers differ by about {self.floor:.1g} of their size, and not by steps."
        elif self.floor > 0:
            text = f"Rounding is about {self.floor:.1g} of the answers: {self.precision} inside."
        else:
            text = f"No rounding to be seen: {self.precision}."
        if self.shortcut is not None:
            text += (
                f" As things are set here (autocast, TF32), answers change by {self.shortcut_change:.1g} and rounding "
                f"is about {self.shortcut:.1g}: {precision_of(self.shortcut)}. BlackBox switches that off, unless "
                "full_precision=False."
            )
        return text


def measure_rounding(asker: Asker, generator: torch.Generator) -> Rounding:
    """The floor, for a box without other noise; lattices, for any.

    Args:
        asker: The box.
        generator: Of the choice of lines.
    """
    seen = torch.cat((asker.y, _off_the_sample(asker, generator)))  # [n, d_out]
    unit = 4 * asker.eps * asker.scale
    quantum = [_lattice(seen[:, o], float(unit[o])) for o in range(seen.shape[1])]
    asker.quantum = torch.tensor([q or 0.0 for q in quantum], dtype=torch.float64)
    returned = next((name for eps, name in NAMES if asker.eps <= eps), "bfloat16")
    answers = _holds(seen) or returned
    size = float(asker.scale.square().mean().sqrt())
    # A floor cannot be seen below noise, nor between the steps of a lattice.
    seen_noise, lattice = bool((asker.noise > 0).any()), any(q is not None for q in quantum)
    floor, rough = (0.0, False) if seen_noise or lattice else noise_floor(asker, generator)
    holds = returned if rough else max(answers, _arithmetic(floor), key=ORDER.index)  # the coarser
    asker.floor = floor
    return Rounding(floor, NAMED.get(holds, holds), rough, returned, answers, size, quantum, None, 0.0)


def _off_the_sample(asker: Asker, generator: torch.Generator) -> Tensor:
    """[OFF_THE_SAMPLE, d_out] answers between typical rows."""
    one, other = asker.choose(OFF_THE_SAMPLE, generator), asker.choose(OFF_THE_SAMPLE, generator)
    way = torch.rand(OFF_THE_SAMPLE, 1, dtype=torch.float64, generator=generator)
    return asker.ask(torch.lerp(asker.x[one], asker.x[other], way), one)


def compare_surroundings(
    asker: Asker, found: Rounding, full: AbstractContextManager[Any], generator: torch.Generator
) -> Rounding:
    """What else there is to say under the settings around the probe, autocast and TF32, which must be in force here.

    Args:
        asker: The box.
        found: What was found in full precision.
        full: Full precision, to be entered.
        generator: Of the choice of lines.
    """
    rows = asker.usable[: max(8, asker.least)]
    if bool((asker.noise > 0).any()):
        return found
    with full:
        asker.settle()
        before = asker.ask(asker.x[rows], rows)
    asker.settle()
    change = (asker.ask(asker.x[rows], rows) - before).nan_to_num(0)
    asker.settle()
    again = (asker.ask(asker.x[rows], rows) - before).nan_to_num(0)
    # A drifting box changes its answers from one call to the next, whatever the settings.
    if bool((change.abs() <= asker.rounding + 2 * (again - change).abs()).all()):
        return found
    typical = float((change / torch.where(asker.scale > 0, asker.scale, 1.0)).square().mean().sqrt())
    return replace(found, shortcut=noise_floor(asker, generator)[0], shortcut_change=typical)


def noise_floor(asker: Asker, generator: torch.Generator) -> tuple[float, bool]:
    """The standard deviation of the box's rounding, over the size of its outputs; zero: none is seen.

    Also returns whether it is roughness of another kind. Coarse arithmetic often gives the same answer at points that
    are much closer together than it can tell apart.
    """
    powers = SPACINGS[asker.dtype]
    lines = min(LINES, asker.affordable() // (3 * len(powers) * POINTS))
    if lines < 1:
        raise LeftOut
    rows = asker.choose(lines, generator)
    scale = torch.where(asker.scale > 0, asker.scale, 1.0)
    estimates: list[tuple[float, bool]] = []  # for each spacing, and whether differences of all orders agree on it
    close: list[tuple[float, float]] = []  # for each, the length of the lines, in spreads, and how much stood still
    for power in powers:
        points = _line(asker, asker.x[rows], power, generator)  # [lines, POINTS, d]
        if not torch.equal(asker.realise(points), points):  # no room within the limits
            continue
        y = asker.ask(points.flatten(0, 1), rows.repeat_interleave(POINTS)).view(lines, POINTS, -1) / scale
        orders = []
        for k in ORDERS:
            gamma = math.factorial(k) ** 2 / math.factorial(2 * k)
            by_line = y.diff(k, dim=1).square().mul(gamma).nanmean((1, 2)).sqrt()
            orders.append(float(by_line.nanmedian().nan_to_num(0)))
        estimates.append((orders[1], max(orders) <= FLAT * min(orders)))
        length = float(((points[:, -1] - points[:, 0]).abs() / asker.spread).amax())
        close.append((length, float((y.diff(dim=1) == 0).double().mean())))
    # Rounding is the same whatever the spacing, kinks and bends are not. Coarse arithmetic shows at wide spacings only:
    # between two of its steps nothing changes at all.
    agreed = [
        max(a, b)
        for (a, fa), (b, fb) in itertools.pairwise(estimates)
        if fa and fb and a > 0 and max(a, b) <= FLAT * min(a, b)
    ]
    floor = max(agreed) if agreed else next((a for a, _ in estimates if a > 0), 0.0)
    near = [still for length, still in close if 8 * length < floor]
    return floor, floor > COARSE * asker.eps and bool(near) and max(near) < STILL


def _line(asker: Asker, start: Tensor, power: int, generator: torch.Generator) -> Tensor:
    """[lines, POINTS, d] points from near start [lines, d], exactly equally spaced even after rounding."""
    size = torch.maximum(start.abs(), asker.spread).log2().ceil().exp2()
    step = size * 2.0**power  # [lines, d] powers of two, and coordinates are multiples of them
    sign = torch.randint(2, step.shape, generator=generator) * 2.0 - 1
    length = (POINTS - 1) * step
    first, last = start - length / 2, start + length / 2
    if asker.low is not None and asker.high is not None:
        shift = (asker.low + step - first).clamp_min(0) - (last + step - asker.high).clamp_min(0)
        first = first + shift
    first = (first / step).round() * step
    k = torch.arange(POINTS, dtype=start.dtype)[:, None]
    way = torch.where(sign[:, None] > 0, k, POINTS - 1 - k)  # [lines, POINTS, d]
    return first[:, None] + way * step[:, None]


def precision_of(floor: float) -> str:
    """The arithmetic that leaves such a floor."""
    return NAMED.get(_arithmetic(floor), _arithmetic(floor))


def _arithmetic(floor: float) -> str:
    return next((name for name, edge in EDGES if floor <= edge), "coarser than bfloat16")


def _holds(y: Tensor) -> str | None:
    """The coarsest floating-point type that holds all of y [n, d_out] exactly; None: too few values to tell."""
    y = y[torch.isfinite(y) & (y != 0)]
    if len(torch.unique(y)) < SEVERAL:
        return None
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16), ("float32", torch.float32)):
        if bool((y.to(dtype).double() == y).all()):
            return name
    return "float64"


def _lattice(y: Tensor, rounding: float) -> float | None:
    """The quantum of which all differences between values y [n] are multiples, if there is one that shows."""
    y = y[torch.isfinite(y)].sort().values
    gaps = y.diff()
    tiny = max(rounding, 1e-300)
    distinct = gaps > tiny
    values = torch.cat((y[:1], y[1:][distinct]))
    gaps = gaps[distinct]
    if len(values) < DISTINCT or len(y) < 4 * DISTINCT:
        return None
    smallest = float(gaps.min())
    for part in (1, 2, 3):  # two neighbours of the lattice may be missing
        quantum = smallest / part
        for _ in range(3):  # refined by the gaps that are small enough to be counted, then by all
            counts = (gaps / quantum).round()
            quantum = float((gaps * counts).sum() / counts.square().sum())
        off = ((values - values[0]) / quantum - ((values - values[0]) / quantum).round()).abs()
        # Values that happen to be close together make a fine lattice on which anything lies.
        crowded = float(values[-1] - values[0]) / quantum <= 64 * len(values)
        if crowded and quantum > 5 * tiny and bool((off < 0.05 + rounding / quantum).all()):
            return quantum
    return None


def _is_decimal(quantum: float) -> bool:
    """Whether it is a power of ten."""
    power = math.log10(quantum)
    return abs(power - round(power)) < 1e-3
