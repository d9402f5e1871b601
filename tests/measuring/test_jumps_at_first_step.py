"""Whether a box has jumps on the scale of its inputs' spread, as the ladder of the first step shows it."""

import numpy as np
import pytest
import torch

from bondgrad import BlackBox
from bondgrad.measuring._first_step import climb
from tests.helpers import gradient
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
        (3.0, 1.0, 0.9, 0.9, True),  # (3 - 1)² / (3² + 1²) = 0.4, and next to nothing later
        (3.0, 2.0, 1.9, 1.9, False),  # 1 / (3² + 2²) = 0.08 are too little
        (9.0, 3.0, 0.82, 0.1, True),  # 0.4, and 2.18² / (3² + 0.82²) = 0.49 is a quarter more at most
        (9.0, 3.0, 0.79, 0.1, False),  # 2.21² / (3² + 0.79²) = 0.51 is more than that, and so is 0.69² / 0.63
        (1.0, -1.0, 1.0, -1.0, False),  # two everywhere: slopes over long steps are not related either
        (1.0, -1.0, 12.0, 0.5, False),  # 13² / 145 and 11.5² / 144.25 = 0.92
        (1.0, -1.0, 12.0, 0.7, True),  # 11.3² / 144.49 = 0.88
        (0.0, 0.0, 1.0, 0.4, True),  # nothing at all changes over short steps
        (0.0, 0.0, 0.0, 0.0, False),
        (0.0, 0.0, 1.0, 1.1, True),
        (0.0, 0.0, 1.0, 1.2, False),  # a kink: where slopes begin, they grow
        (0.0, 1.0, 0.9, 0.9, True),  # likewise: what begins at 1/16, and does not grow, is a jump
        (0.0, 1.0, 1.2, 1.1, False),
        (1.0, 3.0, 3.2, 3.1, False),  # what was there before falls to half at the least
        (3.0, 1.0, 2.5, 2.5, True),  # it falls by more than half from 3, which is more than 1 and 2.5 where it does not
        (3.0, 1.0, 3.0, 3.0, False),  # and here is less: 3² against 1² + 3²
    ],
)
def test_jumps_are_where_short_steps_agree_less_than_long_ones(over_64th, over_16th, over_quarter, over_one, jumps):
    known = {4.0**-3: over_64th, 4.0**-2: over_16th, 0.25: over_quarter, 1.0: over_one}
    point = start(lambda h: torch.full((8, 1), known.get(float(h), 5.0)))
    assert climb(point).jumps == jumps


@pytest.mark.parametrize(("part", "jumps"), [(0.049, True), (0.051, False)])
def test_a_twentieth_of_the_disagreement_over_short_steps_may_be_noise(part, jumps):
    """Slopes 3 and 1 at 1/64 and 1/16: the noise of their difference has the variances noise·64² and noise·16²."""
    known = {4.0**-3: 3.0, 4.0**-2: 1.0, 0.25: 0.9, 1.0: 0.9}
    noise = part * (3 - 1) ** 2 / (64**2 + 16**2)
    assert climb(start(lambda h: torch.full((8, 1), known.get(float(h), 5.0)), noise=noise)).jumps == jumps


JUMPS, SMOOTHLY, KINK = (3.0, 1.0, 0.9, 0.9), (1.0, 1.0001, 1.001, 1.01), (0.1, 0.4, 0.7, 0.9)


@pytest.mark.parametrize(
    ("inputs", "jumps"),
    [
        ((KINK, KINK), (False, False)),
        ((JUMPS, KINK), (True, True)),
        ((JUMPS, KINK, SMOOTHLY), (True, False, False)),  # no majority
        ((JUMPS, KINK, SMOOTHLY, JUMPS), (True, True, False, True)),
        ((JUMPS, (0.0,) * 4, (0.0,) * 4), (True, True, True)),  # along which nothing changes
        ((SMOOTHLY, (0.0,) * 4), (False, False)),
    ],
)
def test_inputs_of_which_little_is_known_follow_the_others(inputs, jumps):
    columns = torch.tensor(inputs).T  # [4, d], over 1/64, 1/16, 1/4 and all of the spread
    known = {4.0 ** (k - 3): columns[k] for k in range(4)}
    point = start(lambda h: known.get(float(h[0]), columns[0]).expand(8, -1), (1.0,) * len(inputs))
    assert climb(point).jumps.tolist() == list(jumps)


def rounded_beside_smooth(x):
    return torch.cat((torch.round(2 * x[:, :1]), torch.sin(x[:, 1:])), 1)


def test_an_input_that_is_rounded_is_found_beside_smooth_ones():
    """Its levels are half a deviation apart: nothing moves over 1/16, and over 1/4 slopes are those over one."""
    found = [climb(Asking(rounded_beside_smooth, scale=(1.0,) * 3, seed=seed).start()).jumps for seed in range(20)]
    assert not any(bool(jumps[1:].any()) for jumps in found)
    assert sum(bool(jumps[0]) for jumps in found) >= 18


KINKED = {
    "clipped": lambda x: x.clamp(-0.5, 0.5),
    "seldom": lambda x: torch.relu(x - 0.5),
    "sum of clipped": lambda x: (3 * x).clamp(-1, 1).sum(1, keepdim=True),
    "sorted": lambda x: x.sort(1).values,
}


@pytest.mark.parametrize("inputs", [1, 4, 8])
@pytest.mark.parametrize("box", KINKED.values(), ids=KINKED)
def test_kinks_are_no_jumps(box, inputs):
    for seed in range(20):
        assert not climb(Asking(box, scale=(1.0,) * inputs, seed=seed).start()).jumps.any()


@pytest.mark.parametrize("leaves", [4, 16, 256])
def test_jumps_of_trees_of_a_library_are_found_along_all_their_inputs(leaves):
    pytest.importorskip("sklearn")
    from sklearn.tree import DecisionTreeRegressor

    rows, found = np.random.default_rng(0).normal(size=(2000, 4)), 0
    for seed in range(10):
        weights = np.random.default_rng(seed).normal(size=(4, 3))
        model = DecisionTreeRegressor(max_leaf_nodes=leaves, random_state=0).fit(rows, np.tanh(rows @ weights))
        layer = BlackBox(model.predict, 4, seed=seed)
        data = torch.Generator().manual_seed(seed)
        gradient(layer, torch.randn(32, 4, generator=data), torch.randn(32, 3, generator=data))
        found += int((layer.policy_state.read(torch.device("cpu"))["jumps"] > 0).all())
    assert found >= 9
