"""The precision of a box: the floor of its rounding, the arithmetic that this indicates, and outputs on a lattice.

The floor is found as in ECNoise: along a line of equally spaced points, differences of high order vanish for a smooth
function, and what is left is noise.

References:
    J. Moré and S. Wild, "Estimating computational noise", SIAM Journal on Scientific Computing, 2011.
"""

import contextlib
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bondgrad.measuring._noise import noise_from_repeats
from bondgrad.measuring._sampler import BudgetExceeded, Sampler
from bondgrad.probing._facts import SEVERAL_ROWS, Facts
from bondgrad.probing._float_types import TYPE_NAMES, arithmetic_of, coarsest_type, precision_of, type_of


@dataclass(frozen=True)
class RoundingSettings:
    """The lines along which rounding is measured, and the thresholds of the findings."""

    lines: int = 6  # most lines, each near a typical row
    points: int = 16  # points of a line
    orders: tuple[int, ...] = (5, 6, 7)  # orders of the differences: high enough for smooth functions to vanish
    spacings: tuple[int, ...] = (-20, -16, -12, -8)  # spacings of points, as powers of two of the size of the inputs
    fine_spacings: tuple[int, ...] = (-48, -40, -32, -24)  # further spacings if inputs are float64
    agreement: float = 4.0  # factor within which estimates of the floor must agree, as in ECNoise
    still: float = 0.2  # least share of neighbours with equal outputs, on a short line, if arithmetic is coarse
    off_the_sample: int = 32  # points between typical rows, where outputs must lie on the same lattice
    lattice_values: int = 4  # least number of different values of a lattice
    coarse: float = 32.0  # a floor of more rounding units of the outputs' type has another cause than that type


SETTINGS = RoundingSettings()


@dataclass(frozen=True)
class Rounding:
    """The precision with which the box computes, and whether its outputs lie on a lattice."""

    floor: float  # standard deviation of the rounding, relative to the size of the outputs
    precision: str  # type of the outputs, or one that holds them exactly; if it is finer than the floor, good digits
    rough: bool  # whether the floor is roughness of the function, and not due to coarse arithmetic
    returned: str  # type of the outputs
    quantum: list[float | None]  # by output: its values differ by multiples of this. None: no lattice
    half_width: float  # half-width of rounding that is coarser than that of the outputs' type; zero: there is none
    largest_quantum: float  # largest quantum of any output; zero: there is no lattice
    shortcut: float | None = None  # floor with autocast and TF32 as set around the probe. None: no change found
    shortcut_change: float = 0.0  # root mean square change of the outputs by those settings, relative to their size

    @property
    def quantised(self) -> bool:
        """Whether most outputs lie on a lattice."""
        return sum(q is not None for q in self.quantum) > len(self.quantum) / 2

    @property
    def named(self) -> bool:
        """Whether the arithmetic is known by name, and not only by the digits that are good."""
        return self.precision in TYPE_NAMES

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
            other = f"by the tolerance of a solver, printed digits, or arithmetic in {arithmetic_of(self.floor)}"
            cause = f"{self.precision} inside" if self.named else f"they are {self.precision}, {other}"
            text = f"Rounding is about {self.floor:.1g} of the answers: {cause}."
        if self.shortcut is None:
            return text
        change = f"answers change by {self.shortcut_change:.1g} and rounding is about {self.shortcut:.1g}"
        text += f" As things are set here (autocast, TF32), {change}: {arithmetic_of(self.shortcut)}."
        return f"{text} BlackBox switches that off, unless full_precision=False."


def measure_rounding(sampler: Sampler, facts: Facts, generator: torch.Generator) -> Rounding:
    """Measure lattices; for a box without noise, also the floor, and the effect of the settings around the probe."""
    between = torch.rand(SETTINGS.off_the_sample, 1, dtype=torch.float64, generator=generator)
    one, other = (facts.choose(SETTINGS.off_the_sample, generator) for _ in range(2))
    seen = torch.cat((facts.y, sampler.ask(torch.lerp(sampler.x[one], sampler.x[other], between), one)))  # [n, d_out]
    unit = 4 * facts.unit * facts.scale
    quantum = [_lattice(y, u) for y, u in zip(seen.T, unit.tolist(), strict=True)]
    # Noise and lattices hide the floor, and the jumps of a piecewise constant function look like one.
    constant = facts.found.steps is not None and facts.found.steps.constant
    hidden = facts.noisy or constant or any(q is not None for q in quantum)
    floor, rough = (0.0, False) if hidden else _noise_floor(sampler, facts, generator)
    returned = type_of(facts.unit)
    # A solver's tolerance looks like coarse arithmetic: only the values themselves tell the type that holds them.
    precision = TYPE_NAMES[returned] if rough else precision_of(floor, max(returned, coarsest_type(seen)))
    step = max((q for q in quantum if q is not None), default=0.0)
    coarse = floor > SETTINGS.coarse * max(facts.unit, torch.finfo(torch.float32).eps)
    half_width = 2 * floor * float(facts.scale.square().mean().sqrt()) if coarse else step / 2
    found = Rounding(floor, precision, rough, TYPE_NAMES[returned], quantum, half_width, step)
    with contextlib.suppress(BudgetExceeded):
        found = found if facts.noisy else _with_shortcut(sampler, facts, found, generator)
    return found


def _with_shortcut(sampler: Sampler, facts: Facts, found: Rounding, generator: torch.Generator) -> Rounding:
    """The finding, with the effect of autocast and TF32 as they are set around the probe added."""
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
    """The standard deviation of rounding, relative to the size of the outputs, and whether it is roughness instead.

    It is zero if there is no sign of rounding. Coarse arithmetic often gives equal outputs at points that are closer
    together than its resolution; roughness does not.
    """
    powers = (*(SETTINGS.fine_spacings if sampler.dtype == torch.float64 else ()), *SETTINGS.spacings)
    rows = facts.choose(sampler.affordable_count(SETTINGS.lines, len(powers) * SETTINGS.points, 1 / 3), generator)
    points = _lines(sampler, sampler.x[rows], powers, generator)  # [lines, spacings, points, d]
    points = points[:, (sampler.realise(points) == points).all((0, 2, 3))]  # spacings within the limits
    if points.shape[1] < 2:  # with one spacing, curvature looks like noise
        return 0.0, False
    y = sampler.ask(points, rows) / facts.positive_scale
    orders = torch.stack([noise_from_repeats(y, 2, n, (2, 3)).median(0).values for n in SETTINGS.orders])
    flat = orders.amax(0) <= SETTINGS.agreement * orders.amin(0)  # [spacings]
    # Rounding does not depend on the spacing; the effect of kinks and curvature does. Coarse arithmetic shows at wide
    # spacings only: points closer than its resolution have equal outputs.
    estimates = orders[1]
    pairs = estimates.unfold(0, 2, 1)  # [spacings - 1, 2]
    agreed = (pairs[:, 0] > 0) & (pairs.amax(1) <= SETTINGS.agreement * pairs.amin(1)) & flat[:-1] & flat[1:]
    floors = pairs[agreed].amax().view(1) if bool(agreed.any()) else estimates[estimates > 0]
    floor = float(floors[0]) if len(floors) else 0.0
    length = ((points[:, :, -1] - points[:, :, 0]).abs() / sampler.spread).amax((0, 2))  # [spacings]
    still = (y.diff(dim=2) == 0).double().mean((0, 2, 3))[8 * length < floor]
    return floor, floor > 2 * SETTINGS.coarse * facts.unit and len(still) > 0 and float(still.max()) < SETTINGS.still


def _lines(sampler: Sampler, start: Tensor, powers: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Points [lines, spacings, points, d] on lines near start [lines, d], exactly equally spaced after rounding."""
    n, start = SETTINGS.points, start[:, None]
    size = torch.maximum(start.abs(), sampler.spread).log2().ceil().exp2()
    step = size * start.new_tensor(powers).exp2()[:, None]  # [lines, spacings, d] points are multiples of these
    up = torch.randint(2, step.shape, generator=generator).bool()
    first, last = start - (n - 1) / 2 * step, start + (n - 1) / 2 * step
    first = first + (sampler.low + step - first).clamp_min(0) - (last + step - sampler.high).clamp_min(0)
    k = torch.arange(n, dtype=start.dtype)[:, None]
    return ((first / step).round() * step)[:, :, None] + torch.where(up[:, :, None], k, n - 1 - k) * step[:, :, None]


def _lattice(y: Tensor, rounding: float) -> float | None:
    """The quantum of which all differences between values y [n] are multiples; None: no clear lattice."""
    y, tiny = y[torch.isfinite(y)].sort().values, max(rounding, 1e-300)
    gaps = y.diff()[y.diff() > tiny]
    values = len(gaps) + 1  # number of different values
    if values < SETTINGS.lattice_values or len(y) < 4 * SETTINGS.lattice_values:
        return None
    for part in (1, 2, 3):  # up to two values may be missing between neighbours
        quantum = float(gaps.min()) / part
        for _ in range(3):  # least squares, repeated as counts of large gaps become exact
            counts = (gaps / quantum).round()
            quantum = float((gaps * counts).sum() / counts.square().sum())
        place = (y - y[0]) / quantum
        # Two values that are close by chance give a quantum so fine that any values seem to be multiples.
        crowded = float(place[-1]) <= 64 * values
        if crowded and quantum > 5 * tiny and bool(((place - place.round()).abs() < 0.05 + rounding / quantum).all()):
            return quantum
    return None
