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
    assert not climb(Asking(box, rows=8, sigma=sigma, scale=(1.0,) * 4, seed=seed).start()).jumps


@pytest.mark.parametrize("sigma", [0.0, 1e-3])
@pytest.mark.parametrize("box", [staircase, tree])
def test_jumps_of_staircases_and_trees_are_found(box, sigma):
    for seed in range(20):
        assert climb(Asking(box, sigma=sigma, scale=(1.0,) * 16, seed=seed).start()).jumps


def test_jumps_are_not_looked_for_where_rows_are_few():
    assert not any(climb(Asking(staircase, rows=3, scale=(1.0,) * 16, seed=seed).start()).jumps for seed in range(10))


@pytest.mark.parametrize(("levels", "jumps"), [(2, True), (64, False), (1000, False)])
def test_levels_that_are_close_together_are_no_jumps(levels, jumps):
    for seed in range(10):
        box = Asking(lambda x: torch.round(levels * x) / levels, scale=(1.0,) * 16, seed=seed)
        assert climb(box.start()).jumps == jumps


@pytest.mark.parametrize("size", [1.0, 4.0, 1000.0])
def test_jumps_are_those_on_the_scale_of_the_deviation_however_large_inputs_are(size):
    deviation = (1.0, 1.0)
    assert climb(start(Asking(staircase, scale=deviation), (size, size), deviation=deviation)).jumps
    assert not climb(start(Asking(torch.sin, scale=deviation), (size, size), deviation=deviation)).jumps
