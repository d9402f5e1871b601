"""Sweeps over the range of every input: how far they go, where the box fails, where it hardly changes."""

import math

import pytest
import torch

from bondgrad import probe
from bondgrad.probing import Session


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
