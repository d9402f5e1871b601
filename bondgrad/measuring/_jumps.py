"""Inputs along which a box jumps, or is piecewise constant, on the scale on which they vary."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class JumpSettings:
    """When slopes show a jump. The values were found on trees, staircases and boxes with kinks of many kinds."""

    rows: int = 2  # the least number of rows that say anything
    material: float = 0.2  # part of the squared slopes, above which what falls again counts
    noise_share: float = 0.05  # part of what falls again that may be noise
    kink: float = 0.5  # ratio of changes, the longer step's to the shorter's, below which there is a jump, not a kink
    kink_begins: float = 1.125  # the same where there was no slope over shorter steps
    # What falls again shows a jump where it is more than `mostly` + `by_chance` / rows times what stays: the fewer rows
    # there are, the more of it may be there by chance.
    mostly: float = 1.0
    by_chance: float = 8.0
    hardly: float = 0.1  # part of what stays, below which what falls again shows none
    others: float = 2.0  # weight of an input with jumps, against one without, for inputs of which little is known
    hit: float = 4.0  # times a row's other slopes, above which that over the shortest step has met a jump itself


SETTINGS = JumpSettings()
PARTS = (1 / 1024, 1 / 64, 1 / 16, 1 / 4, 1.0)  # of the spread of an input: steps with which jumps are looked for


class JumpEvidence(NamedTuple):
    """What slopes over short and long steps say of jumps, for each input [d]: sums over looks, in numbers of rows.

    Slopes over 1/64 of the spread and more are compared with those over less. What a jump adds to a slope falls to a
    quarter when the step is four times as long. What a smooth bend or a kink changes grows, to the slope itself at the
    most; and noise of the slope over the shortest step stays, since all differences have it in common. Where the
    outputs of all rows do not change at all, slopes that begin at a kink grow by a quarter at least, while those over
    many jumps stay.
    """

    rows: Tensor  # number of rows, of looks at which anything changed
    falling: Tensor  # squared changes of slopes that fall again with a longer step, as part of the squared slopes
    staying: Tensor  # other changes likewise
    noise: Tensor  # the part that is noise

    @staticmethod
    def of(shorter: Tensor, longer: Tensor, variance: Tensor) -> "JumpEvidence":
        """The evidence of one look.

        Args:
            shorter: [k, r, d] slopes at some rows over less than 1/64 of the spread.
            longer: [4, r, d] over 1/64, 1/16, 1/4 and all of the spread.
            variance: [d] that noise brings to slopes over 1/64 of the spread.
        """
        slopes = torch.cat((shorter, longer)).double()
        largest = slopes.abs().nan_to_num(math.inf, math.inf).amax(0)  # [r, d]
        unit = torch.where(largest < math.inf, largest, 0).amax(0)  # [d], so that squares do not overflow
        slopes = torch.where(largest < math.inf, slopes, 0) / torch.where(unit > 0, unit, 1)
        shorter, longer = slopes[:-4], slopes[-4:]
        shortest = shorter.gather(0, shorter.abs().argmin(0, keepdim=True))  # next to no row meets a jump over all
        near = torch.cat((shortest, longer))  # [5, r, d]
        # A row with a jump within the shortest step says nothing: all its changes are as large as that one slope.
        hit = near[0].abs() > SETTINGS.hit * near[1:].abs().amax(0)  # [r, d]
        near = torch.where(hit, 0, near)
        squares, r = near[:-1].square().sum((0, 1)), near.shape[1]
        noise = (variance / unit.square()).nan_to_num(0, 0, 0)
        parts = torch.stack((squares, *_falling_and_staying(near), noise * r))
        return JumpEvidence(*torch.where(squares > 0, r * parts / squares, 0).to(variance.dtype))

    @staticmethod
    def on_ladder(deviation: Tensor, noise: Tensor, steps: Tensor, slopes: Tensor) -> "JumpEvidence":
        """The evidence of slopes over a ladder of steps, each four times as long as the one before.

        Args:
            deviation: [d] of the inputs.
            noise: h² times the variance that noise brings to slopes over steps h.
            steps: [k, d], of which those up to twice the deviation count.
            slopes: [k, r, d] over these steps at some rows; not finite where nothing is known.
        """
        last = int((steps <= 2 * deviation).all(1).sum()) - 1  # the step that is nearest to the spread of the rows
        if last < 4:
            return JumpEvidence(*torch.zeros(len(JumpEvidence._fields), len(deviation), device=deviation.device))
        shorter, longer = slopes[: last - 3], slopes[last - 3 : last + 1]
        return JumpEvidence.of(shorter, longer, noise / steps[last - 3].square())

    def jumps(self) -> Tensor:
        """The inputs [d] along which the box jumps: where changes of slopes fall again, and are not noise.

        Inputs are judged one by one. An input of which the rows say neither counts as one with jumps, unless inputs
        without jumps are twice as many as those with jumps, or more.
        """
        falling, staying, rows = self.falling, self.staying, self.rows
        material = (falling * SETTINGS.noise_share > self.noise) & (falling > SETTINGS.material * rows)
        mostly = SETTINGS.mostly + SETTINGS.by_chance / rows.clamp_min(1)
        jumps = (falling > mostly * staying) & material & (rows >= SETTINGS.rows)
        smooth = (falling <= SETTINGS.hardly * staying) & (rows > 0)
        return jumps | ((SETTINGS.others * jumps.sum() > smooth.sum()) & ~smooth)


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
