"""Inputs along which a box jumps, or is piecewise constant, on the scale on which they vary."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class JumpSettings:
    """When slopes show a jump. The values were found on trees, staircases and boxes with kinks of many kinds."""

    rows: int = 4  # the least number of rows that say anything
    material: float = 0.1  # part of the squared slopes, above which what falls again counts
    noise_share: float = 0.05  # part of what falls again that may be noise
    kink: float = 0.5  # ratio of changes, the longer step's to the shorter's, below which there is a jump, not a kink
    kink_begins: float = 1.125  # the same where there was no slope over shorter steps
    mostly: float = 2.0  # times what stays, above which what falls again shows a jump
    hardly: float = 0.1  # part of what stays, below which what falls again shows none


SETTINGS = JumpSettings()


def find_jumps(deviation: Tensor, noise: Tensor, steps: Tensor, slopes: Tensor) -> Tensor:
    """The inputs [d] along which the box jumps: where slopes change from one length of steps to the next, and back.

    Slopes over 1/64 of the spread and more are compared with those over less. What a jump adds to a slope falls to a
    quarter when the step is four times as long. What a smooth bend or a kink changes grows, to the slope itself at the
    most; and noise of the slope over the shortest step stays, since all differences have it in common. Where the
    outputs of all rows do not change at all, slopes that begin at a kink grow by a quarter at least, while those over
    many jumps stay.

    Inputs are judged one by one. Those of which the few rows say neither follow the majority of the others.

    Args:
        deviation: [d] of the inputs.
        noise: h² times the variance that noise brings to the slopes.
        steps: [k, d], each four times as long as the one before.
        slopes: [k, r, d] over these steps at some rows; not finite where nothing is known.
    """
    last = int((steps <= 2 * deviation).all(1).sum()) - 1  # the step that is nearest to the spread of the rows
    if last < 4 or slopes.shape[1] < SETTINGS.rows:
        return torch.zeros_like(deviation, dtype=torch.bool)
    slopes = torch.where(torch.isfinite(slopes[: last + 1]).all(0), slopes[: last + 1] * deviation, 0).double()
    shorter = slopes[:-4]  # over less than 1/64 of the spread
    shortest = shorter.gather(0, shorter.abs().argmin(0, keepdim=True))  # next to no row meets a jump over all of them
    near = torch.cat((shortest, slopes[-4:]))  # [5, r, d], also over 1/64, 1/16, 1/4 and all of the spread
    falling, staying = _falling_and_staying(near)
    variance = noise.double() * (deviation / steps[last - 3]).square()  # [d] of slopes over 1/64
    material = falling * SETTINGS.noise_share > variance * slopes.shape[1]
    material &= falling > SETTINGS.material * near[1:-1].square().sum((0, 1))
    jumps, smooth = material & (falling > SETTINGS.mostly * staying), falling < SETTINGS.hardly * staying
    return jumps | ((jumps.sum() > smooth.sum()) & ~smooth)


def _falling_and_staying(near: Tensor) -> tuple[Tensor, Tensor]:
    """The sums [d] of squared changes of slopes: of those that fall when the step is four times as long, and the rest.

    Args:
        near: [5, r, d] slopes, first those with which the others are compared.
    """
    change, flat = near[1:] - near[0], near[:-2] == 0
    flat &= (near[0] == 0).all(0)  # otherwise the box is not piecewise constant along the input
    begins = flat.cumprod(0).bool()  # [3, r, d] whether a slope over the longer step is the first one
    begins[0] = False  # what was between the shorter steps is not known
    falls = change[1:].abs() < torch.where(begins, SETTINGS.kink_begins, SETTINGS.kink) * change[:-1].abs()
    square = change[:-1].square()
    return torch.where(falls, square, 0).sum((0, 1)), torch.where(falls, 0, square).sum((0, 1))
