"""The errors of slopes that follow from sums over the rows of trials."""

import math

import pytest
import torch

from bondgrad.policies import Differences
from bondgrad.policies._trial_sums import SlopeErrors, TrialSums
from tests.policies.test_trial_sums import CENTRAL, FORWARD, NO_JUMPS, each_kind, moments


def drawn(differences, stretch=0.0, bent=0.0, variance=0.0, rows=40_000):
    """The errors of D(h) = 1 + (stretch + t)·hᵖ + noise at h = 1, with t different in every row."""
    random = torch.Generator().manual_seed(0)
    h = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)[:, None, None]
    ends = torch.randn(4, rows, 1, generator=random, dtype=torch.float64)
    noise = (ends[:3] - ends[3]) / math.sqrt(2) / h if differences.shared_base else ends[:3] / h
    t = math.sqrt(bent) * torch.randn(rows, 1, generator=random, dtype=torch.float64)
    slopes = 1 + (stretch + t) * h**differences.order + math.sqrt(variance) * noise
    half, one, two = slopes
    change, half_change = two - one, half - one
    rough = (half_change**2, change**2, 0 * one)  # as if all moves were one
    sums = (one**2, change * one, change**2, half_change * one, *rough)
    number = torch.full((1,), float(rows))
    parts = (number, *(part.sum(0) for part in sums), number, number, noise[1])
    found = SlopeErrors.of(TrialSums(*parts), torch.tensor([variance]), differences, NO_JUMPS)
    return {name: float(value) for name, value in found._asdict().items()}


@each_kind
def test_at_the_best_step_all_errors_are_recovered(differences):
    """There noise is `order` times the bending, and it does not matter that twice as much of it is subtracted."""
    bent = 1e-3
    found = drawn(differences, bent=bent, variance=differences.order * bent)
    assert found["bending"] == pytest.approx(bent, rel=0.1)
    assert found["square"] == pytest.approx(1 + bent, rel=0.01)
    assert found["noise"] == pytest.approx(differences.order * bent)
    assert found["stretch"] == pytest.approx(0, abs=0.01)
    assert not found["saturates"]
    stretched = drawn(differences, stretch=0.05, variance=1e-3)
    assert stretched["stretch"] == pytest.approx(0.05 / 1.05, rel=0.05)
    assert stretched["square"] == pytest.approx(1.05**2, rel=0.01)


def certain(rows):
    """Two standard errors of the mean square of noise in so many rows, relative to it; no more than once as much."""
    return min(2 * math.sqrt(2 / rows), 1)


@pytest.mark.parametrize(("differences", "power", "at_best"), [(CENTRAL, 9, 2 * 1.25), (FORWARD, 1, 0.75)])
@pytest.mark.parametrize("rows", [1, 8, 16, 128])
def test_without_noise_bending_seems_larger_by_what_is_made_up_for(rows, differences, power, at_best):
    """By 9, less the part of 2 · 1.25 for the noise at the best step that is subtracted too much; and by 1 and 0.75."""
    found = errors_of(bent=0.01, differences=differences, rows=rows)["bending"]
    assert found == pytest.approx(0.01 / (power - certain(rows) * at_best))


@each_kind
@pytest.mark.parametrize("rows", [1, 8, 16, 128])
def test_more_than_two_standard_errors_beyond_the_noise_are_bending(rows, differences):
    by_noise = 0.1 * (1.25 if differences == CENTRAL else 0.75)
    bent, at_best = certain(rows) * by_noise, 2.5 if differences == CENTRAL else 0.75
    case = {"variance": 0.1, "differences": differences, "rows": rows}
    assert errors_of(bent=0.99 * bent, **case)["bending"] == 0
    more = errors_of(bent=1.5 * bent, **case)["bending"]
    assert more == pytest.approx(0.5 * bent / ((2**differences.order - 1) ** 2 - certain(rows) * at_best))


@each_kind
def test_without_noise_bending_of_many_rows_is_what_it_is(differences):
    assert drawn(differences, bent=1e-3)["bending"] == pytest.approx(1e-3, rel=0.1)


def test_noise_by_itself_is_no_bending():
    for differences in (CENTRAL, FORWARD):
        assert drawn(differences, variance=0.1)["bending"] == 0


def errors_of(variance=0.0, differences=CENTRAL, **values):
    sums = moments(variance=variance, differences=differences, **values)
    found = SlopeErrors.of(sums, torch.tensor([variance], dtype=torch.float64), differences, NO_JUMPS)
    return {name: float(value) for name, value in found._asdict().items()}


@pytest.mark.parametrize("order", [1, 2, 4])
def test_slopes_that_grow_from_h_to_2h_have_grown_by_the_known_part_of_that_up_to_h(order):
    assert errors_of(twice=0.3, differences=CENTRAL)["stretch"] == pytest.approx(0.1)
    differences = Differences(order)
    sums = moments(twice=0.3)
    found = SlopeErrors.of(sums, torch.zeros(1), differences, NO_JUMPS).stretch
    assert float(found) == pytest.approx(0.3 / (2**order - 1))


@pytest.mark.parametrize(("shrinks", "factor"), [(0.0, 1), (0.2, 0.8**-8), (1 / 3, 1.5**8), (0.6, 1.5**8), (-0.2, 1)])
def test_where_slopes_shrink_bending_is_larger_by_a_high_power_of_it(shrinks, factor):
    assert errors_of(twice=-shrinks, bent=0.01)["bending"] == pytest.approx(0.01 / (9 - 2.5 * certain(16)) * factor)


def test_slopes_squared_have_no_noise_and_are_not_negative():
    assert errors_of(variance=0.1)["square"] == pytest.approx(1)
    assert errors_of(square=-0.05, variance=0.1)["square"] == 0


@pytest.mark.parametrize(
    ("half", "twice", "order", "saturates"),
    [
        (0.5, -0.5, 2, True),
        (0.26, -0.5, 2, True),  # twice a quarter of what they shrink by from h to 2h
        (0.24, -0.5, 2, False),
        (0.51, -0.5, 1, True),
        (0.49, -0.5, 1, False),
        (0.1, 0.0, 2, True),
        (-0.1, 0.3, 2, False),
    ],
)
def test_outputs_have_reached_their_end_where_slopes_shrink_too_soon(half, twice, order, saturates):
    differences = Differences(order)
    assert bool(SlopeErrors.of(moments(half, twice), torch.zeros(1), differences, NO_JUMPS).saturates) == saturates


@pytest.mark.parametrize(("rows", "saturates"), [(16.0, False), (64.0, True)])
def test_that_must_be_more_than_noise(rows, saturates):
    # 0.3 / 1.2 against two standard errors sqrt(4 · 0.1 / 1.1 / rows) of D(h/2): 0.30 and 0.15.
    assert errors_of(half=0.3, twice=0.0, variance=0.1, rows=rows)["saturates"] == saturates
