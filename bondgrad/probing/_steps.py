"""Over which steps differences say what the slope is."""

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bondgrad.measuring._sampler import MeasurementSkipped, Sampler
from bondgrad.probing._facts import Facts
from bondgrad.probing._number_format import percent, runs


@dataclass(frozen=True)
class StepSettings:
    """The ladder of steps, and where it is climbed."""

    slopes: int = 32  # rows and inputs at which slopes are taken, each a random pair
    per_decade: int = 2  # steps in a factor of ten
    decades: int = 6  # below an input's spread, in single precision; twice as many in double precision
    agreement: float = 0.5  # the relative difference of slopes below which they are slopes, and not noise


SETTINGS = StepSettings()


@dataclass(frozen=True)
class StepLadder:
    """Slopes by central differences, for a ladder of steps."""

    ladder: list[float]  # steps, in units of each input's spread, ascending
    disagreement: list[float | None]  # of the slopes at each step with those at the next, relative. None: no slopes
    low_5: float | None  # from this step
    high_5: float | None  # to this the slopes agree to within 5 %
    low_1: float | None
    high_1: float | None  # the same for 1 %
    best: float | None  # where neighbours agree best
    error: float | None  # by how much they differ there
    spread: float  # median spread of the inputs, to turn relative steps into steps
    changes: bool  # whether the outputs changed at all

    @property
    def words(self) -> str:
        """What a person wants to know."""
        if not self.changes:
            return "No slope anywhere: the outputs did not change at any step."
        if self.best is None or self.error is None:
            return "Noise or roughness drowns the slopes: no two steps agree on them to better than 50 %."
        at = f"the best step is about {self.best:.1g} of an input's spread ({self.best * self.spread:.1g})"
        if self.low_5 is None:
            return f"No plateau: slopes agree to {percent(self.error)} at best; {at}."
        text = f"Slopes agree to 5 % for steps from {self.low_5:.0e} to {self.high_5:.0e} of the spread"
        finer = "" if self.low_1 is None else f", to 1 % from {self.low_1:.0e} to {self.high_1:.0e}"
        return f"{text}{finer}; {at}."


def measure_steps(sampler: Sampler, facts: Facts, generator: torch.Generator) -> StepLadder:
    """Slopes of random combinations of the outputs, by single inputs, over many decades of steps."""
    decades = SETTINGS.decades * (2 if sampler.dtype == torch.float64 else 1)
    ladder = torch.logspace(-decades, 0, decades * SETTINGS.per_decade + 1, dtype=torch.float64)
    count, d = sampler.affordable_count(SETTINGS.slopes, 2 * len(ladder), share=1 / 3), sampler.x.shape[1]
    rows, inputs = facts.choose(count, generator), torch.randperm(max(d, count), generator=generator)[:count] % d
    spread = sampler.spread[inputs, None]
    ends, whole = sampler.either_side(rows, inputs, ladder * spread)  # [slopes, steps, 2], [slopes, steps]
    span = ends.diff(dim=2)  # [slopes, steps, 1] what rounding has left of it
    change = sampler.ask_moved(rows, inputs, ends).diff(dim=2).squeeze(2)
    slopes = (change / span).where(whole[:, :, None] & (span > 0), math.nan)  # [slopes, steps, d_out]
    if bool(torch.isnan(slopes).all()):
        raise MeasurementSkipped("limits or failures are in the way everywhere")
    gy = torch.randn(count, 1, slopes.shape[2], dtype=torch.float64, generator=generator)
    gy = gy / gy.norm(dim=2, keepdim=True) / facts.output_spread
    return judge_slopes(ladder, ((slopes * gy).sum(2) * spread).T, float(sampler.spread.median()))


def judge_slopes(ladder: Tensor, slopes: Tensor, spread: float) -> StepLadder:
    """Where slopes [steps, n] taken over one step agree with those over the next."""
    pairs = slopes.unfold(0, 2, 1)  # [steps - 1, n, 2]
    pairs = pairs.where(torch.isfinite(pairs).all(2, keepdim=True), 0)
    sizes = pairs.norm(dim=1)  # [steps - 1, 2]
    # Steps too short to change anything agree on a slope of zero, which is none.
    heights = (pairs.diff(dim=2).norm(dim=1).squeeze(1) / sizes.amax(1)).where(sizes.amin(1) > 0, math.inf).tolist()
    # Every step but the first and the last has two neighbours.
    error, i = min((max(pair), i) for i, pair in enumerate(itertools.pairwise(heights), 1))
    best, least = (float(ladder[i]), error) if error < SETTINGS.agreement else (None, None)
    disagreement = [None if math.isinf(height) else height for height in heights]
    changes = bool((slopes.nan_to_num(0) != 0).any())
    (low_5, high_5), (low_1, high_1) = (_plateau(ladder, heights, tolerance) for tolerance in (0.05, 0.01))
    return StepLadder(ladder.tolist(), disagreement, low_5, high_5, low_1, high_1, best, least, spread, changes)


def _plateau(ladder: Tensor, heights: list[float], tolerance: float) -> tuple[float | None, float | None]:
    """First and last step of the longest run of neighbours that agree."""
    agreeing = runs([height <= tolerance for height in heights])
    if not agreeing:
        return None, None
    first, last = max(agreeing, key=lambda run: run[1] - run[0])
    return float(ladder[first]), float(ladder[last + 1])
