"""What every input does: over its range, to which outputs, how much, and which are called dead."""

import math

import numpy as np
import pytest
import torch

from bondgrad import probe
from bondgrad.probing import Session
from bondgrad.probing._differences import Smoothness
from bondgrad.probing._inputs import Dependence, Ranges, dead_inputs
from bondgrad.probing._rounding import Rounding
from bondgrad.testing.boxes import Sparse
from tests.helpers import noisy
from tests.patterns import blocks
from tests.probing.test_facts import facts
from tests.probing.test_probe import rows


def unit_rows(d=2):
    """Rows in [0, 1], with both ends among them."""
    x = torch.rand(100, d, generator=torch.Generator().manual_seed(0))
    x[0], x[1] = 0, 1
    return x


@pytest.mark.parametrize(("limits", "ends"), [(None, (-0.1, 1.1)), ((0, 2), (0, 1.1)), ((-1, 1), (-0.1, 1))])
def test_they_go_a_tenth_beyond_what_is_typical_within_the_limits(limits, ends):
    asked = []

    def fn(x):
        asked.append(x.clone())
        return torch.sin(x)

    session = Session(fn, unit_rows(), limits=limits)
    for name in session.run():
        if name == "Ranges":
            asked.clear()
        if name == "Structure":
            break
    swept = torch.cat(asked[1:])  # after the look
    assert (float(swept.min()), float(swept.max())) == pytest.approx(ends)
    assert len(set(swept[:, 0].tolist())) == pytest.approx(17 + 2, abs=1)  # and the values of the rows


def test_where_it_begins_to_fail_is_halved_ten_times():
    def fn(x):
        return torch.where((x > 0.3) & (x < 0.7), math.nan, x)

    gap = 1.2 / 16
    for found in probe(fn, unit_rows()).ranges.failures:
        assert found.low == pytest.approx(0.3, abs=gap / 1024)
        assert found.high == pytest.approx(0.7, abs=gap / 1024)
        assert found.how == "NaN"


def test_without_evaluations_to_spare_it_is_known_to_half_a_gap():
    def fn(x):
        return torch.where(x > 0.7, math.nan, x)

    found = probe(fn, unit_rows(), budget=1900).ranges.failures[0]
    assert found.low == pytest.approx(0.7, abs=1.2 / 4 / 2)
    assert found.low != pytest.approx(0.7, abs=0.005)
    assert found.high is None


def test_failures_are_said_of_the_values_that_were_tried():
    """It fails and works in turns, between values that are tried."""

    def fn(x: np.ndarray):
        y = np.sin(x)
        y[np.sin(40 * x.sum(1)) > 0.3] = np.nan
        return y

    x = unit_rows()
    for budget, values in ((20_000, 17), (600, 9)):
        words = probe(fn, x, budget=budget).ranges.words
        assert f"Of {values} values tried of each input, it fails at those of input 0" in words
        assert words.endswith("Between them it was not tried.")


def test_inputs_that_cannot_be_moved_far_are_not_called_still():
    """It works where the second input is near 1/2, as it is at all rows but two, whatever they move."""

    def fn(x):
        return torch.where((x[:, 1:] - 0.5).abs() < 0.01, torch.sin(x), math.nan)

    x = unit_rows()
    x[2:, 1] = 0.5
    report = probe(fn, x)
    assert report.sensitivity.change[0] > 0.1
    assert "The box failed wherever 1 input moved by so much." in report.words["Inputs"]
    assert math.isnan(report.sensitivity.change[1])
    assert 1 not in report.sensitivity.dead
    assert report.gradients is not None
    assert report.as_dict()["sensitivity"]["change"][1] is None


def test_the_share_of_the_range_without_change():
    """Of sixteen gaps from -0.1 to 1.1, four lie between 0 and 0.35."""
    found = probe(lambda x: x.clamp(-0.025, 0.275), unit_rows()).ranges
    assert found.flat == pytest.approx(1 - 5 / 16, abs=0.07)
    assert found.saturated
    assert probe(torch.sin, unit_rows()).ranges.flat == 0


@pytest.mark.parametrize(("slope", "flat"), [(5e-4, True), (2e-3, False)])
def test_a_thousandth_of_the_largest_change_is_hardly_any(slope, flat):
    found = probe(lambda x: x.clamp(-0.025, 0.275) + slope * x, unit_rows()).ranges
    assert found.saturated == flat


def test_inputs_that_change_nothing_do_not_move():
    found = probe(lambda x: x[:, :2] * 1.0, unit_rows(4)).ranges
    assert (found.moving, found.inputs) == ([0, 1], 4)


def identity(x):
    return x * 1.0


@pytest.mark.parametrize(("sigma", "hidden"), [(0.02, False), (0.045, True)])
def test_noise_hides_dependencies(sigma, hidden):
    """From three hundredths of the spread of the outputs on, which is one."""
    report = probe(noisy(identity, sigma), rows())
    assert (report.dependence is None) == hidden
    assert any("noise of 4" in text and "would hide it" in text for text in report.left_out) == hidden


@pytest.mark.parametrize(("quantum", "hidden"), [(0.3, False), (0.55, True)])
def test_steps_hide_dependencies(quantum, hidden):
    """From four tenths of the spread on."""
    report = probe(lambda x: (x / quantum).round() * quantum, rows())
    assert (report.dependence is None) == hidden
    assert any(text.startswith("Structure: steps of") for text in report.left_out) == hidden


@pytest.mark.parametrize(
    ("count", "inputs", "outputs", "found"),
    [(4, 3, 2, (3, 2)), (6, 1, 1, (1, 1)), (2, 3, 1, (3, 1)), (1, 4, 4, None)],
)
def test_blocks(count, inputs, outputs, found):
    dependence = probe(Sparse(blocks(count, inputs, outputs)), rows(d=count * inputs)).dependence
    assert dependence.blocks == found
    assert (dependence.groups, dependence.inputs) == (inputs, count * inputs)
    assert dependence.filled == pytest.approx(1 / count)
    assert dependence.idle == []


def test_a_pattern_that_is_no_blocks():
    """Every output depends on two neighbours in a ring of six: two groups, but no two blocks of three."""
    found = probe(lambda x: torch.sin(x) + torch.cos(x.roll(1, 1)), rows(d=6)).dependence
    assert (found.groups, found.blocks) == (2, None)
    assert found.filled == pytest.approx(1 / 3)


def test_inputs_without_outputs_are_idle():
    found = probe(lambda x: torch.sin(x[:, 1:3]), rows(d=4)).dependence
    assert found.idle == [0, 3]


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
