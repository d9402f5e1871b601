"""Whether the box is smooth, has kinks, or jumps."""

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bondgrad.probing._asker import Asker, LeftOut
from bondgrad.probing._words import percent

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
            "jumps": f"It jumps, by up to {percent(self.jump)} of the spread: short steps see either nothing or a "
            "cliff.",
            "unclear": "Whether it is smooth drowns in its noise.",
        }[self.kind]


def measure_smoothness(asker: Asker, generator: torch.Generator) -> Smoothness:
    """Lines between typical rows, and on each of them ever closer looks at the place that bends most."""
    lines = min(LINES, asker.affordable() // (2 * (POINTS + 3) * (ZOOMS + 1)))
    if len(asker.usable) < 2:
        raise LeftOut("there is one row at which it works, and lines go from one to another")
    if lines < 1:
        raise LeftOut
    rows = asker.choose(2 * lines, generator)
    near, far = asker.x[rows[:lines]], asker.x[rows[lines:]]
    middle, half = torch.full((lines,), 0.5, dtype=torch.float64), 0.5
    bends, least = [], []  # for each zoom [lines]: the largest second difference, and what may look like one
    for _ in range(ZOOMS + 1):
        t = middle[:, None] + half * torch.linspace(-1, 1, POINTS, dtype=torch.float64)  # [lines, POINTS]
        y = _along(asker, near, far, t, rows[:lines])
        worst, where = y.diff(2, dim=1).abs().nan_to_num(0).amax(2).max(1)  # [lines]
        if bool((asker.noise > 0).any()):  # the largest of many may be the noisiest: is it there again?
            around = t.gather(1, where[:, None] + torch.arange(3))
            worst = torch.minimum(
                worst, _along(asker, near, far, around, rows[:lines]).diff(2, dim=1).abs().amax((1, 2))
            )
        bends.append(worst.nan_to_num(0))
        # Points are rounded, too, which shows where they are close together and the box is steep.
        wrong = torch.finfo(asker.dtype).eps * (torch.maximum(near.abs(), far.abs()) / asker.spread).norm(dim=1)
        spacing = 2 * half / (POINTS - 1) * ((far - near) / asker.spread).norm(dim=1).clamp_min(1e-300)
        steepest = y.diff(dim=1).abs().nan_to_num(0).amax((1, 2))
        least.append(torch.maximum(16 * wrong / spacing * steepest, _floor(asker)))
        half /= FACTOR
        middle = t[torch.arange(lines), where + 1].clamp(half, 1 - half)
    return judge_bends(torch.stack(bends), torch.stack(least))


def _along(asker: Asker, near: Tensor, far: Tensor, t: Tensor, rows: Tensor) -> Tensor:
    """[lines, points, d_out] at parts t [lines, points] of the way from near to far [lines, d], over their spread."""
    points = torch.lerp(near[:, None], far[:, None], t[:, :, None])
    y = asker.ask(points.flatten(0, 1), rows.repeat_interleave(t.shape[1]))
    return y.view(*t.shape, -1) / asker.output_spread


def _floor(asker: Asker) -> Tensor:
    """Second differences, over the spread of the outputs, that noise and rounding make."""
    # Along any line it rounds more than along those on which the floor was measured.
    rounding = torch.maximum(2 * asker.rounding, 64 * asker.eps * asker.scale)
    return (torch.maximum(5 * math.sqrt(6) * asker.noise, rounding) / asker.output_spread).max()


def judge_bends(bends: Tensor, least: Tensor) -> Smoothness:
    """What the largest second differences [zooms, lines] say; those below `least` [zooms, lines] say nothing."""
    orders, jumps = [], [0.0]
    for line, floor in zip(bends.T.tolist(), least.T.tolist(), strict=True):
        order = None
        for i, (wide, close) in enumerate(itertools.pairwise(line)):
            if wide <= floor[i]:
                break
            now = math.log(wide / max(close, floor[i + 1], 1e-300)) / math.log(FACTOR)
            if close > floor[i + 1] or now >= SMOOTH:  # else it may have fallen farther than can be seen
                order = now
        if order is not None:
            orders.append(order)
            if order < KINKED:
                jumps.append(line[-1])
    lines = bends.shape[1]
    if not orders:
        drowned = bool((least[0] > 0.02).any())  # of the spread: bends that matter would not show
        return Smoothness("unclear" if drowned else "smooth", None, 0.0, lines)
    roughest = min(orders)
    kind = "smooth" if roughest >= SMOOTH else "kinks" if roughest >= KINKED else "jumps"
    return Smoothness(kind, roughest, max(jumps), lines)
