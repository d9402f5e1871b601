"""Over which steps differences say what the slope is."""

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bondgrad.probing._asker import Asker, LeftOut
from bondgrad.probing._words import percent

PROBES = 32  # rows and inputs at which slopes are taken
PER_DECADE = 2
INSIDE = 0.3  # of its spread, an input is kept away from its limits
NUMBERS = 2**21  # in points that exist at a time
LONGEST = 1.0  # of the spread of an input
SHORTEST = {torch.float32: -6, torch.float64: -12}  # powers of ten


@dataclass(frozen=True)
class Steps:
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
        if self.low_5 is None or self.high_5 is None:
            return f"No plateau: slopes agree to {percent(self.error)} at best; {at}."
        text = f"Slopes agree to 5 % for steps from {self.low_5:.0e} to {self.high_5:.0e} of the spread"
        if self.low_1 is not None and self.high_1 is not None:
            text += f", to 1 % from {self.low_1:.0e} to {self.high_1:.0e}"
        return f"{text}; {at}."


def measure_steps(asker: Asker, generator: torch.Generator) -> Steps:
    """Slopes of random combinations of the outputs, by single inputs, over many decades of steps."""
    shortest = SHORTEST[asker.dtype]
    count = round((math.log10(LONGEST) - shortest) * PER_DECADE) + 1
    ladder = torch.logspace(shortest, math.log10(LONGEST), count, dtype=torch.float64)
    probes = min(PROBES, asker.affordable() // (3 * 2 * count))
    if probes < 1:
        raise LeftOut
    rows = asker.choose(probes, generator)
    d = asker.x.shape[1]
    inputs = torch.randperm(max(d, probes), generator=generator)[:probes] % d
    x = asker.x[rows]
    if asker.low is not None and asker.high is not None:  # from a limit, there is nowhere to go on one side
        room = torch.minimum(INSIDE * asker.spread, (asker.high - asker.low) / 4)
        inner = torch.minimum(torch.maximum(x, asker.low + room), asker.high - room)
        x[torch.arange(probes), inputs] = inner[torch.arange(probes), inputs]
    at_once = max(1, NUMBERS // (2 * probes * d))
    slopes = torch.cat([_slopes(asker, x, rows, inputs, h) for h in torch.split(ladder, at_once)])
    if bool(torch.isnan(slopes).all()):
        raise LeftOut("limits or failures are in the way everywhere")
    gy = torch.randn(probes, slopes.shape[2], dtype=torch.float64, generator=generator)
    gy = gy / gy.norm(dim=1, keepdim=True) / asker.output_spread
    along = (slopes * gy).sum(2) * asker.spread[inputs]  # [rungs, probes]
    return judge(ladder, along, float(asker.spread.median()))


def _slopes(asker: Asker, x: Tensor, rows: Tensor, inputs: Tensor, steps: Tensor) -> Tensor:
    """Central differences [steps, probes, d_out] at x [probes, d] by one input each, over parts of its spread.

    NaN where limits are in the way.
    """
    (probes, d), n = x.shape, len(steps)
    at = torch.arange(probes)
    ends = x[None, :, None].repeat(n, 1, 2, 1)  # [steps, probes, 2, d]
    step = steps[:, None] * asker.spread[inputs]
    ends[:, at, 0, inputs] += step
    ends[:, at, 1, inputs] -= step
    made = asker.realise(ends)
    span = made[:, at, 0, inputs] - made[:, at, 1, inputs]  # what rounding and limits have left of it
    y = asker.ask(made.view(-1, d), rows.repeat_interleave(2).repeat(n)).view(n, probes, 2, -1)
    whole = span > 0
    if asker.low is not None and asker.high is not None:
        far = ends[:, at, :, inputs].transpose(0, 1)  # [steps, probes, 2]
        whole &= (far >= asker.low[inputs, None]).all(2) & (far <= asker.high[inputs, None]).all(2)
    return ((y[:, :, 0] - y[:, :, 1]) / span[:, :, None]).where(whole[:, :, None], math.nan)


def judge(ladder: Tensor, slopes: Tensor, spread: float) -> Steps:
    """Where slopes [rungs, probes] taken over one step agree with those over the next."""
    disagreement: list[float | None] = []
    for one, other in itertools.pairwise(slopes):
        heard = torch.isfinite(one) & torch.isfinite(other)
        size = float(torch.maximum(one[heard].norm(), other[heard].norm()))
        zero = min(float(one[heard].norm()), float(other[heard].norm())) == 0
        # Steps too short to change anything agree on a slope of zero, which is none.
        disagreement.append(None if size == 0 or zero else float((one - other)[heard].norm()) / size)
    changes = bool((slopes.nan_to_num(0) != 0).any())
    heights = [math.inf if e is None else e for e in disagreement]
    errors = [
        max(heights[max(0, i - 1)], heights[min(i, len(heights) - 1)]) for i in range(len(ladder))
    ]  # of every rung with both of its neighbours
    i = min(range(1, len(errors) - 1), key=errors.__getitem__)  # the first and the last have one neighbour only
    found = math.isfinite(errors[i]) and errors[i] < 0.5
    low_5, high_5 = plateau(ladder, heights, 0.05)
    low_1, high_1 = plateau(ladder, heights, 0.01)
    return Steps(
        ladder=ladder.tolist(),
        disagreement=disagreement,
        low_5=low_5,
        high_5=high_5,
        low_1=low_1,
        high_1=high_1,
        best=float(ladder[i]) if found else None,
        error=errors[i] if found else None,
        spread=spread,
        changes=changes,
    )


def plateau(ladder: Tensor, heights: list[float], tolerance: float) -> tuple[float | None, float | None]:
    """First and last step of the longest run of neighbours that agree."""
    best = (0, 0)  # length, first
    length = 0
    for i, height in enumerate([*heights, math.inf]):
        if height <= tolerance:
            length += 1
            continue
        best = max(best, (length, i - length))
        length = 0
    length, first = best
    return (float(ladder[first]), float(ladder[first + length])) if length else (None, None)
