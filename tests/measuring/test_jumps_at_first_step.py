"""Whether a box has jumps on the scale of its inputs' spread, as the ladder of the first step shows it."""

import pytest
import torch

from bondgrad.measuring._first_step import climb
from tests.measuring.test_first_step import Asking, start


def staircase(x):
    return torch.round(1.5 * x)


def tree(x):
    return torch.where(x < -0.7, -1.2, torch.where(x < 0.2, -0.2, torch.where(x < 0.9, 0.1, 1.3)))


SMOOTH = {
    "line": lambda x: 2 * x + 1e-9 * x**3,
    "sine": torch.sin,
    "kinks": torch.relu,
    "sharp kinks": lambda x: torch.relu(x) - 2 * torch.relu(x - 0.3) + torch.relu(-x - 0.5),
    "cubes": lambda x: x**3,
    "saturates": lambda x: torch.tanh(5 * x),
    "fine steps": lambda x: torch.sin(x).mul(1e3).round().div(1e3),
    "dead": lambda x: 0 * x,
}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("box", SMOOTH.values(), ids=SMOOTH)
@pytest.mark.parametrize("sigma", [0.0, 1e-6, 1e-2, 1.0])
def test_boxes_without_jumps_have_none(box, sigma, seed):
    assert not climb(Asking(box, rows=8, sigma=sigma, scale=(1.0,) * 4, seed=seed).start()).jumps.any()


@pytest.mark.parametrize("sigma", [0.0, 1e-3])
@pytest.mark.parametrize("box", [staircase, tree])
def test_jumps_of_staircases_and_trees_are_found(box, sigma):
    for seed in range(20):
        assert climb(Asking(box, sigma=sigma, scale=(1.0,) * 16, seed=seed).start()).jumps.all()


def test_jumps_are_not_looked_for_where_rows_are_few():
    for seed in range(10):
        assert not climb(Asking(staircase, rows=3, scale=(1.0,) * 16, seed=seed).start()).jumps.any()


@pytest.mark.parametrize(("levels", "jumps"), [(2, True), (64, False), (1000, False)])
def test_levels_that_are_close_together_are_no_jumps(levels, jumps):
    for seed in range(10):
        box = Asking(lambda x: torch.round(levels * x) / levels, scale=(1.0,) * 16, seed=seed)
        assert (climb(box.start()).jumps == jumps).all()


@pytest.mark.parametrize("size", [1.0, 4.0, 1000.0])
def test_jumps_are_those_on_the_scale_of_the_deviation_however_large_inputs_are(size):
    deviation = (1.0, 1.0)
    assert climb(start(Asking(staircase, scale=deviation), (size, size), deviation=deviation)).jumps.all()
    assert not climb(start(Asking(torch.sin, scale=deviation), (size, size), deviation=deviation)).jumps.any()


@pytest.mark.parametrize(
    ("over_64th", "over_16th", "over_quarter", "over_one", "jumps"),
    [
        (1.0, 3.0, 3.2, 3.1, True),  # (3 - 1)² / (3² + 1²) = 0.4, and next to nothing later
        (3.0, 3.0 * 1.5, 4.6, 4.6, False),  # 0.25 / (1 + 1.5²) = 0.08 are too little
        (1.0, 3.0, 1.0, 0.9, True),  # 0.4 and 0.01
        (1.0, 3.0, 0.82, 0.1, True),  # 2.18² / (3² + 0.82²) = 0.49 is a quarter more at most
        (1.0, 3.0, 0.79, 0.1, False),  # 2.21² / (3² + 0.79²) = 0.51 is more than that, and so is 0.69² / 0.63
        (1.0, -1.0, 1.0, -1.0, False),  # two everywhere: slopes over long steps are not related either
        (1.0, -1.0, 12.0, 0.5, False),  # 13² / 145 and 11.5² / 144.25 = 0.92
        (1.0, -1.0, 12.0, 0.7, True),  # 11.3² / 144.49 = 0.88
        (0.0, 0.0, 1.0, 0.5, True),  # nothing at all changes over short steps
        (0.0, 0.0, 0.0, 0.0, False),
    ],
)
def test_jumps_are_where_short_steps_agree_less_than_long_ones(over_64th, over_16th, over_quarter, over_one, jumps):
    known = {4.0**-3: over_64th, 4.0**-2: over_16th, 0.25: over_quarter, 1.0: over_one}
    point = start(lambda h: torch.full((8, 1), known.get(float(h), 5.0)))
    assert climb(point).jumps == jumps


@pytest.mark.parametrize(("part", "jumps"), [(0.049, True), (0.051, False)])
def test_a_twentieth_of_the_disagreement_over_short_steps_may_be_noise(part, jumps):
    """Slopes 1 and 3 at 1/64 and 1/16: the noise of their difference has the variances noise·64² and noise·16²."""
    known = {4.0**-3: 1.0, 4.0**-2: 3.0, 0.25: 3.2, 1.0: 3.1}
    noise = part * (3 - 1) ** 2 / (64**2 + 16**2)
    assert climb(start(lambda h: torch.full((8, 1), known.get(float(h), 5.0)), noise=noise)).jumps == jumps
