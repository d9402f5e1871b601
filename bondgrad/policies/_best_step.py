"""The factor on every step that gives its slope the least error, and how many readings that takes."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bondgrad.policies._trial_sums import SlopeErrors


@dataclass(frozen=True)
class BestStepSettings:
    """What counts as an error. The values were tuned on the boxes of `benchmarks/calibrated.py`."""

    finest: float = 1e-10  # of the squared slopes: less noise than this lengthens no step, less bending shortens none
    most_stretched: float = 0.25  # relative growth of all slopes of an input that is accepted
    most_shrunk: float = 0.3  # relative decrease that is accepted; at a third, longer steps move outputs no farther
    most_saturated: float = 0.1  # the same where the box saturates, and slopes farther out say little of those here
    stretch_harm: float = 0.1  # weight of such a common factor, relative to an error that differs from row to row
    clear: float = 0.01  # part of the squared slopes that may be errors, below which more readings are not worth it


SETTINGS = BestStepSettings()
FACTORS = torch.logspace(-2, 1, 25, base=2, dtype=torch.float32, device="cpu")[:, None]  # [25, 1] changes of a step


def least_readings(errors: SlopeErrors, now: Tensor, most: int, order: int) -> Tensor:
    """The least number of readings, doubled up to `most`, after which the best steps have small errors.

    Args:
        errors: With as many readings as there are now.
        now: This number.
        most: The largest number.
        order: The power of the step with which errors fall.
    """
    readings = 1
    while readings < most:
        noise = errors.noise * now / readings
        error = best_factor(errors._replace(noise=noise), order)[1] / errors.square
        if float(error.nanmedian()) <= SETTINGS.clear:
            break
        readings = min(2 * readings, most)
    return torch.full_like(now, readings)


def best_factor(errors: SlopeErrors, order: int) -> tuple[Tensor, Tensor]:
    """For each input [d] the one of `FACTORS` that gives its step the least error relative to the slope.

    Also the mean square of that error, [d].
    """
    factors = FACTORS.to(errors.noise.device)  # [25, 1]
    floor = SETTINGS.finest * errors.square
    stretched = errors.stretch * factors**order
    error = (errors.noise + floor) / factors.square() + errors.bending * factors ** (2 * order)
    error = (error + (SETTINGS.stretch_harm * stretched).square() * errors.square) / (1 + stretched).square()
    shrunk = torch.where(errors.saturates, SETTINGS.most_saturated, SETTINGS.most_shrunk)
    accepted = (stretched <= SETTINGS.most_stretched) & (stretched >= -shrunk)
    best = torch.where(accepted, error, math.inf).argmin(0)  # the smallest factor, where none is accepted
    factor = torch.where(errors.noise < floor, factors[best, 0].clamp(max=1), factors[best, 0])
    return factor, error.gather(0, best[None])[0]
