"""Making sure of an accusation, by slopes that were measured once more and otherwise."""

from typing import NamedTuple

import torch
from torch import Tensor

from bondgrad.checking._judge import AMPLIFIED, Evidence, Measured, judge, kinks
from bondgrad.measuring._statistics import mean

SHORTER = 1 / 2, 1 / 8  # steps, for the second measurement: at most and at least
SHOWN = 8.0  # standard deviations of which the error of a single entry is to be in the second, if possible
APART = 4.0  # standard deviations between slopes of which one has to be mistaken
KINKED = 3.0  # standard deviations from which a kink that would explain the error is believed
CERTAIN = 1.5  # times its doubts is an error that the second measurement would not miss


class Confirmed(NamedTuple):
    """What is left of an accusation of k inputs."""

    wrong: Tensor  # [k + 1] bool: all the same
    denied: Tensor  # [k] bool: the second measurement would have seen the error, and has not
    unseen: Tensor  # [k] bool: noise would have hidden it from the second
    aside: Tensor  # [r, k] bool: where slopes are not to be believed


def confirm(first: Measured, second: Measured, tolerance: float, kinky: bool) -> Confirmed:
    """Compare the measurement that an accusation comes from with a second one, of shorter steps.

    Entries at which the two disagree are set aside, and the rest is judged again, by both. Where noise hides from the
    second what the first has seen, the first is believed if it saw the same factor at all rows: what differs from row
    to row may be due to the function's own roughness. In a function that has kinks (`kinky`), so may anything be.
    """
    aside = first.aside | _apart(first, second, tolerance) | _kinked(first, tolerance) | _kinked(second, tolerance)
    one, two = (judge(measured._replace(aside=aside), tolerance) for measured in (first, second))
    unseen = ~two.wrong[:-1] & _unseen(one, two, tolerance)
    denied = ~two.wrong[:-1] & ~unseen
    doubtful = denied | (unseen & (~one.by_factor[:-1] | kinky))
    # That all inputs together are wrong is always a matter of one factor.
    return Confirmed(
        one.wrong & ~torch.cat((doubtful, (doubtful if kinky else denied).all(0, keepdim=True))), denied, unseen, aside
    )


def shorter_steps(first: Measured, copies: int, kinky: bool) -> Tensor:
    """Steps [r, k] for a second measurement of so many copies: as short as noise and rounding let the error be seen.

    In a function that has kinks they are much shorter in any case, to meet fewer of them.
    """
    (g, _, _), (s, var_s, _) = mean(first.g), mean(first.slopes[0])
    noise = torch.maximum(var_s, var_s.nanmean(0)) * first.slopes.shape[1] / copies
    noise = noise + (AMPLIFIED * first.rounding / first.longest).square()
    least = min(SHORTER)
    most = least if kinky else max(SHORTER)
    return first.longest * (SHOWN * noise.sqrt() / (g - s).abs()).nan_to_num(most).clamp(least, most)


def _unseen(one: Evidence, two: Evidence, tolerance: float) -> Tensor:
    """Whether noise would hide from the second, bool [k], what the first has seen."""
    return (one.error < tolerance + CERTAIN * (two.visible - tolerance)) & ~two.bending


def _apart(first: Measured, second: Measured, tolerance: float) -> Tensor:
    """Where slopes of different steps disagree, bool [r, k]: the function is not as smooth there as it has to be."""
    (s, var_s, _), (also, var_also, _) = mean(first.slopes[0]), mean(second.slopes[0])
    rounding = sum(((AMPLIFIED * m.rounding / m.longest).square() for m in (first, second)), 0 * s)
    noise = torch.maximum(var_s, var_s.nanmean(0)) + torch.maximum(var_also, var_also.nanmean(0)) + rounding
    size = torch.minimum(s.abs(), also.abs())
    return (s - also).abs() > torch.maximum(APART * noise.sqrt(), tolerance * size)


def _kinked(measured: Measured, tolerance: float) -> Tensor:
    """Where a kink may explain the difference, bool [r, k]: one of its sides has the slope of the gradient."""
    (g, _, _), (s, _, _), (kink, variance) = mean(measured.g), mean(measured.slopes[0]), kinks(measured)
    seen = kink.abs() > KINKED * variance.sqrt()
    off = (g - s).abs()
    return seen & (off <= 0.6 * kink.abs()) & (off > tolerance * s.abs())
