"""How much inputs matter, and which are called dead."""

import math

import pytest
import torch

from bondgrad import probe
from bondgrad.probing._dependence import Dependence
from bondgrad.probing._ranges import Ranges
from bondgrad.probing._rounding import Rounding
from bondgrad.probing._sensitivity import dead_inputs
from bondgrad.probing._smoothness import Smoothness
from tests.helpers import noisy
from tests.probing.test_facts import facts
from tests.probing.test_probe import rows


def test_change_by_a_move_of_one_spread():
    """The spread of the output is that of all inputs together: 3, 4 and 12 make 13."""
    report = probe(lambda x: x @ torch.tensor([[3.0], [4.0], [12.0], [0.0]]), rows(2000))
    assert report.sensitivity.change == pytest.approx([3 / 13, 4 / 13, 12 / 13, 0], rel=0.1)
    assert report.sensitivity.dead == [3]


def test_what_limits_cut_off_a_move_is_made_up_for():
    x = torch.rand(500, 2)
    report = probe(lambda x: 1.0 * x, x, limits=(0.45, 0.55))
    assert report.sensitivity.change == pytest.approx([1 / math.sqrt(2)] * 2, rel=0.1)


def test_noise_is_no_change():
    found = probe(noisy(lambda x: 1.0 * x[:, :1], 0.05), rows(2000)).sensitivity
    assert found.change[0] == pytest.approx(1, abs=0.15)
    assert max(found.change[1:]) < 0.12


@pytest.mark.parametrize(("sigma", "told"), [(0.008, True), (0.016, False)])
def test_nothing_is_called_dead_that_may_move_by_a_tenth_of_the_spread(sigma, told):
    """A change of six deviations of a difference is seen, and of two and a half times the largest deviation."""
    assert (probe(noisy(lambda x: 1.0 * x, sigma), rows()).sensitivity.dead is not None) == told


@pytest.mark.parametrize(
    ("found", "dead"),
    [
        ({}, [1, 2, 3]),
        ({"ranges": Ranges([], 0.0, 0.0, 4, [0, 1])}, [2, 3]),
        ({"dependence": Dependence(4, 4, 1.0, None, [1, 3])}, [1, 3]),
        ({"dependence": Dependence(4, 4, 1.0, None, [1, 3]), "ranges": Ranges([], 0.0, 0.0, 4, [0, 1])}, [3]),
        ({"ranges": Ranges([], 0.0, 0.7, 4, [])}, None),
        ({"smoothness": Smoothness("jumps", 0.0, 1.0)}, None),
        ({"smoothness": Smoothness("kinks", 1.0, 0.0)}, [1, 2, 3]),
        ({"rounding": Rounding(0.0, "", False, "", [0.5], 0.0, 0.5)}, None),
        ({"rounding": Rounding(0.0, "", False, "", [None], 0.0, 0.0)}, [1, 2, 3]),
    ],
)
def test_inputs_are_dead_that_nothing_calls_alive(found, dead):
    assert dead_inputs(facts([1.0], **found), [1, 2, 3]) == dead
    assert dead_inputs(facts([1.0], **found), []) == []
