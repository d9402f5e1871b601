"""Whether the box is smooth, has kinks, or jumps."""

import itertools
import math
from dataclasses import dataclass

import torch

from bondgrad.probing._asker import Asker, Spent

LINES, POINTS = 6, 17
ZOOMS = 4
FACTOR = (POINTS - 1) / 2  # of a zoom
SMOOTH, KINKED = 1.5, 0.4  # orders from which on: a smooth function has 2, one with kinks 1, one that jumps 0


@dataclass(frozen=True)
class Smoothness:
    """How second differences fall where they are largest."""

    kind: str  # "smooth", "kinks", "jumps", "unclear"
    order: float | None  # power of the step with which they fall, of the roughest line; None: they drown in noise
    jump: float  # the largest seen, over the spread of the outputs
    lines: int

    @property
    def words(self) -> str:
        """What a person wants to know."""
        return {
            "smooth": "Smooth, as far as one can look into it.",
            "kinks": "It has kinks, like ReLU: slopes change at once in some places. Long steps reach across them.",
            "jumps": f"It jumps, by up to {100 * self.jump:.2g} % of the spread: short steps see either nothing or a "
            "cliff.",
            "unclear": "Whether it is smooth drowns in its noise.",
        }[self.kind]


def measure_smoothness(asker: Asker, generator: torch.Generator) -> Smoothness:
    """Lines between typical rows, and on each of them ever closer looks at the place that bends most."""
    lines = min(LINES, asker.affordable() // (3 * POINTS * (ZOOMS + 1)))
    if lines < 1 or len(asker.usable) < 2:
        raise Spent
    rows = asker.choose(2 * lines, generator)
    near, far = asker.x[rows[:lines]], asker.x[rows[lines:]]
    middle, half = torch.full((lines,), 0.5, dtype=torch.float64), 0.5
    spread = asker.output_spread
    least = float((torch.maximum(5 * math.sqrt(6) * asker.noise, asker.rounding) / spread).max())
    bends: list[list[float]] = []  # for each zoom, the largest second difference of every line
    for _ in range(ZOOMS + 1):
        t = middle[:, None] + half * torch.linspace(-1, 1, POINTS, dtype=torch.float64)  # [lines, POINTS]
        points = torch.lerp(near[:, None], far[:, None], t[:, :, None])
        y = asker.ask(points.flatten(0, 1), rows[:lines].repeat_interleave(POINTS)).view(lines, POINTS, -1)
        second = (y / spread).diff(2, dim=1).abs().nan_to_num(0).amax(2)  # [lines, POINTS - 2]
        worst, where = second.max(1)
        bends.append(worst.tolist())
        half /= FACTOR
        middle = t[torch.arange(lines), where + 1].clamp(half, 1 - half)
    return judge_bends(bends, least)


def judge_bends(bends: list[list[float]], least: float) -> Smoothness:
    """What the largest second differences, by zoom and line, say; those below `least` say nothing."""
    orders, jumps = [], [0.0]
    for line in zip(*bends, strict=True):
        order = None
        for wide, close in itertools.pairwise(line):
            if wide <= least:
                break
            now = math.log(wide / max(close, least, 1e-300)) / math.log(FACTOR)
            if close > least or now >= SMOOTH or order is None:  # else it may have fallen farther
                order = now if close > least or now >= SMOOTH else None
        if order is not None:
            orders.append(order)
            if order < KINKED:
                jumps.append(line[-1])
    lines = len(bends[0])
    if not orders:
        drowned = least > 0.02  # of the spread: bends that matter would not show
        return Smoothness("unclear" if drowned else "smooth", None, 0.0, lines)
    roughest = min(orders)
    kind = "smooth" if roughest >= SMOOTH else "kinks" if roughest >= KINKED else "jumps"
    return Smoothness(kind, roughest, max(jumps), lines)
