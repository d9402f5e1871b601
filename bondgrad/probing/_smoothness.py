"""Whether the box is smooth, has kinks, or jumps."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bondgrad.measuring._sampler import MeasurementSkipped, Sampler
from bondgrad.probing._facts import Facts
from bondgrad.probing._number_format import percent


@dataclass(frozen=True)
class SmoothnessSettings:
    """The lines that are looked at, and what is concluded from their bends."""

    lines: int = 6
    points: int = 17  # of a line
    zooms: int = 4  # into the place that bends most; with the factor below, down to 1/4096 of a line
    factor: float = 8.0  # of a zoom: two neighbouring gaps become the whole line
    smooth: float = 1.5  # order of the bends from which on: a smooth function has 2, one with kinks 1
    kinked: float = 0.4  # order from which on: one with kinks has 1, one that jumps 0
    visible: float = 0.02  # of the spread: where smaller bends are hidden by noise, nothing is said


SETTINGS = SmoothnessSettings()


@dataclass(frozen=True)
class Smoothness:
    """How second differences fall where they are largest."""

    kind: str  # "smooth", "kinks", "jumps", "unclear"
    order: float | None  # power of the step with which they fall, of the roughest line; None: they drown in noise
    jump: float  # the largest seen, over the spread of the outputs

    @property
    def words(self) -> str:
        """What a person wants to know."""
        return {
            "smooth": "Smooth, as far as one can look into it.",
            "kinks": "It has kinks, like ReLU: slopes change at once in some places. Long steps reach across them.",
            "jumps": f"It jumps, by up to {percent(self.jump)} of the spread: short steps see nothing, or a cliff.",
            "unclear": "Whether it is smooth drowns in its noise.",
        }[self.kind]


def measure_smoothness(sampler: Sampler, facts: Facts, generator: torch.Generator) -> Smoothness:
    """Lines between typical rows, and on each of them ever closer looks at the place that bends most."""
    if len(facts.usable) < 2:
        raise MeasurementSkipped("there is one row at which it works, and lines go from one to another")
    n = SETTINGS.points
    lines = sampler.affordable_count(SETTINGS.lines, (n + 3) * (SETTINGS.zooms + 1), share=1 / 2)
    rows = facts.choose(2 * lines, generator)
    near, far = sampler.x[rows].chunk(2)  # [lines, d]

    def along(t: Tensor) -> Tensor:
        """[lines, points, d_out] at parts t [lines, points] of the way, over the spread of the outputs."""
        return sampler.ask(torch.lerp(near[:, None], far[:, None], t[:, :, None]), rows[:lines]) / facts.output_spread

    # Second differences that noise and rounding make. Along any line it rounds more than where the floor was measured.
    least_bend = torch.maximum(1.5 * facts.certain(1), 64 * facts.unit * facts.scale).div(facts.output_spread).max()
    # Points are rounded, too, which shows where they are close together and the box is steep.
    rounded = torch.finfo(sampler.dtype).eps * (torch.maximum(near.abs(), far.abs()) / sampler.spread).norm(dim=1)
    length = ((far - near) / sampler.spread).norm(dim=1).clamp_min(1e-300)
    middle, half = torch.full((lines,), 0.5, dtype=torch.float64), 0.5
    bends, least = [], []  # for each zoom [lines]: the largest second difference, and what may look like one
    for _ in range(SETTINGS.zooms + 1):
        t = middle[:, None] + half * torch.linspace(-1, 1, n, dtype=torch.float64)  # [lines, points]
        y = along(t)
        worst, where = y.diff(2, dim=1).abs().nan_to_num(0).amax(2).max(1)  # [lines]
        if facts.noisy:  # the largest of many may be the noisiest: is it there again?
            around = along(t.gather(1, where[:, None] + torch.arange(3)))
            worst = torch.minimum(worst, around.diff(2, dim=1).abs().amax((1, 2)))
        bends.append(worst.nan_to_num(0))
        steepest = y.diff(dim=1).abs().nan_to_num(0).amax((1, 2))
        least.append(torch.maximum(8 * (n - 1) / half * rounded / length * steepest, least_bend))
        half /= SETTINGS.factor
        middle = t[torch.arange(lines), where + 1].clamp(half, 1 - half)
    return judge_bends(torch.stack(bends), torch.stack(least))


def judge_bends(bends: Tensor, least: Tensor) -> Smoothness:
    """What the largest second differences [zooms, lines] say; those below `least` [zooms, lines] say nothing."""
    floor, wide, close = least[1:], bends[:-1], bends[1:]
    orders = (wide / torch.maximum(close, floor).clamp_min(1e-300)).log() / math.log(SETTINGS.factor)  # [zooms, lines]
    # Where a bend is no longer seen, it may have fallen farther than can be seen.
    told = ((close > floor) | (orders >= SETTINGS.smooth)) & (wide > least[:-1]).cumprod(0).bool()
    last = {n: float(orders[told[:, n], n][-1]) for n in range(bends.shape[1]) if bool(told[:, n].any())}  # by line
    if not last:
        return Smoothness("unclear" if bool((least[0] > SETTINGS.visible).any()) else "smooth", None, 0.0)
    roughest = min(last.values())
    kind = "smooth" if roughest >= SETTINGS.smooth else "kinks" if roughest >= SETTINGS.kinked else "jumps"
    jumps = [float(bends[-1, n]) for n, order in last.items() if order < SETTINGS.kinked]
    return Smoothness(kind, roughest, max(jumps, default=0.0))
