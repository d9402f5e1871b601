"""Whether a box has jumps on the scale of its inputs' spread, as the ladder of the first step shows it."""

import math

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
    found = [climb(Asking(box, sigma=sigma, scale=(1.0,) * 16, seed=seed).start()).jumps for seed in range(20)]
    assert torch.stack(found).float().mean() > (0.95 if sigma else 0.99)


def test_jumps_are_not_looked_for_where_rows_are_few():
    for seed in range(10):
        assert not climb(Asking(staircase, rows=1, scale=(1.0,) * 16, seed=seed).start()).jumps.any()


@pytest.mark.parametrize(("levels", "jumps"), [(2, True), (64, False), (1000, False)])
def test_levels_that_are_close_together_are_no_jumps(levels, jumps):
    for seed in range(10):
        box = Asking(lambda x: torch.round(levels * x) / levels, scale=(1.0,) * 16, seed=seed)
        assert (climb(box.start()).jumps == jumps).all()


@pytest.mark.parametrize("size", [1.0, 4.0, 1000.0])
def test_jumps_are_those_on_the_scale_of_the_deviation_however_large_inputs_are(size):
    def found(box):
        boxes = [Asking(box, scale=(1.0, 1.0), seed=seed) for seed in range(20)]
        starts = [start(asking, (size, size), deviation=(1.0, 1.0)) for asking in boxes]
        return torch.stack([climb(at).jumps for at in starts]).float().mean()

    assert found(staircase) > 0.7  # over half a deviation its slopes are the same as over two
    assert found(torch.sin) == 0


def judged(*inputs, noise=0.0):
    """What is found where slopes over less than 1/64 of the spread, 1/64, 1/16, 1/4 and all of it are these."""
    columns = torch.tensor(inputs).T  # [5, d]
    known = {4.0 ** (k - 4): columns[k] for k in range(1, 5)}
    slopes = lambda h: known.get(float(h[0]), columns[0]).expand(8, -1)  # noqa: E731
    return climb(start(slopes, (1.0,) * len(inputs), noise=noise)).jumps.tolist()


@pytest.mark.parametrize(
    ("shorter", "over_64th", "over_16th", "over_quarter", "over_one", "jumps"),
    [
        (1.0, 3.0, 1.5, 1.1, 1.0, True),  # 2, 0.5, 0.1 are added to the slope of 1: it falls to less than half
        (1.0, 1.01, 1.1, 1.5, 2.0, False),  # what is added grows
        (1.0, 1.2, 0.5, 0.1, 0.0, False),  # here, too, to the slope itself
        (1.0, 2.0, 1.6, 1.2, 1.0, False),  # 0.6² + 0.2² falls, 1² does not, since 0.6 is more than half of it
        (1.0, 3.0, 1.98, 1.98, 1.98, True),  # of eight rows: 2² is more than twice 2 * 0.98²
        (1.0, 3.0, 1.98, 2.05, 2.05, False),  # and less than twice 0.98² + 1.05²
        (1.0, 2.5, 1.2, 1.0, 1.0, True),  # 1.5² + 0.2² is more than a fifth of 1² + 2.5² + 1.2² + 1²
        (1.0, 2.2, 1.1, 1.0, 1.0, False),  # 1.2² + 0.1² is less than a fifth of 1² + 2.2² + 1.1² + 1²
        (-1.0, 1.0, -0.5, -0.9, -1.0, True),
        (0.0, 0.0, 0.0, 1.0, 0.4, True),  # nothing at all changes over short steps
        (0.0, 0.0, 0.0, 0.0, 0.0, False),
        (0.0, 0.0, 0.0, 1.0, 1.1, True),  # where slopes begin, those over many jumps stay
        (0.0, 0.0, 0.0, 1.0, 1.2, False),  # while that at a kink grows
        (0.0, 0.0, 1.0, 0.6, 0.4, True),
        (0.0, 0.0, 1.0, 1.2, 1.1, False),
        (0.0, 1.0, 0.9, 0.9, 0.9, False),  # what was over less than 1/64 is not known
    ],
)
def test_jumps_are_where_slopes_change_with_the_step_and_back(
    shorter, over_64th, over_16th, over_quarter, over_one, jumps
):
    assert judged((shorter, over_64th, over_16th, over_quarter, over_one)) == [jumps]


@pytest.mark.parametrize(("part", "jumps"), [(0.049, True), (0.051, False)])
def test_a_twentieth_of_what_falls_may_be_noise(part, jumps):
    """2² + 0.5² + 0.1² fall; the noise of a slope over 1/64 has the variance noise·64²."""
    noise = part * (2**2 + 0.5**2 + 0.1**2) / 64**2
    assert judged((1.0, 3.0, 1.5, 1.1, 1.0), noise=noise) == [jumps]


@pytest.mark.parametrize("rung", [1e-4, 1.0])
def test_rows_of_which_a_slope_is_not_known_say_nothing(rung):
    known = {4.0**-3: 3.0, 4.0**-2: 1.5, 0.25: 1.1}

    def slopes(h):
        found = torch.ones(8, 1)
        found[:4] = known.get(float(h), 1.0)
        found[:4][: lost[0]] = math.nan if float(h) >= rung else 1.0
        return found

    lost = [0]
    assert climb(start(slopes)).jumps.tolist() == [True]
    lost[0] = 4
    assert climb(start(slopes)).jumps.tolist() == [False]


JUMPS, SMOOTHLY = (1.0, 3.0, 1.5, 1.1, 1.0), (1.0, 1.0001, 1.001, 1.01, 1.1)
UNDECIDED, NOTHING = (1.0, 2.0, 1.6, 1.2, 1.0), (0.0,) * 5


@pytest.mark.parametrize(
    ("inputs", "jumps"),
    [
        ((UNDECIDED, UNDECIDED), [False, False]),
        ((JUMPS, UNDECIDED), [True, True]),
        ((JUMPS, UNDECIDED, SMOOTHLY), [True, True, False]),
        ((JUMPS, UNDECIDED, SMOOTHLY, SMOOTHLY), [True, False, False, False]),  # too few jumps
        ((JUMPS, UNDECIDED, SMOOTHLY, JUMPS), [True, True, False, True]),
        ((JUMPS, NOTHING, NOTHING), [True, True, True]),
        ((SMOOTHLY, NOTHING), [False, False]),
    ],
)
def test_inputs_of_which_little_is_known_follow_the_others(inputs, jumps):
    assert judged(*inputs) == jumps


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
    "a triangle wave": lambda x: (torch.remainder(x, 1) - 0.5).abs(),
    "steep at zero": lambda x: x.abs().sqrt(),
    "a fast sine": lambda x: torch.sin(20 * x),
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


def switch(x):
    return torch.sin(x) + torch.sign(x)


def test_a_single_jump_is_found_beside_smooth_slopes():
    """Of 16 rows, two in three find one within a quarter of the deviation, on average."""
    found = [climb(Asking(switch, scale=(1.0,) * 4, seed=seed).start()).jumps.float().mean() for seed in range(20)]
    assert sum(found) / 20 > 0.9
