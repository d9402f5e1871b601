"""What measurements conclude from what is known of a box, by numbers."""

import math

import pytest
import torch

from bondgrad.probing._facts import Facts
from bondgrad.probing._influences import History
from bondgrad.probing._randomness import Randomness
from bondgrad.probing._report import Findings
from bondgrad.probing._rounding import Rounding

UNIT = 2.0**-23


def noise(std, largest):
    return Randomness(False, False, False, std, largest, std, 0.1, True, False, [])


def rounding(floor):
    return Rounding(floor, "float32", False, "float32", [None], 0.0, 0.0)


def facts(*answers, **found):
    return Facts(torch.tensor(answers, dtype=torch.float64), UNIT, Findings(**found))


def test_size_and_spread_of_the_outputs():
    known = facts([3.0, 5.0, 0.0], [-3.0, 5.0, 0.0], [math.nan, 1.0, 1.0], [3.0, 5.0, 0.0], [-3.0, 5.0, 0.0])
    assert known.usable.tolist() == [0, 1, 3, 4]
    assert known.scale.tolist() == [3.0, 5.0, 0.0]
    assert known.positive_scale.tolist() == [3.0, 5.0, 1.0]
    assert known.output_spread.tolist() == pytest.approx([math.sqrt(12), 5.0, 1.0])  # of what never changes, its size


def test_one_row_has_its_size_for_a_spread():
    assert facts([4.0]).output_spread.tolist() == [4.0]


def test_a_change_below_a_quarter_of_the_rounding_unit_is_none():
    assert facts([1.0], [1.0 + UNIT]).output_spread.item() == pytest.approx(UNIT / math.sqrt(2))
    assert facts([1.0], [1.0 + UNIT / 4]).output_spread.item() == pytest.approx(1)


def test_changes_that_may_come_from_rounding():
    assert facts([4.0]).repeat_tolerance.item() == 8 * UNIT
    assert facts([4.0]).tolerance.item() == 4 * 64 * UNIT
    assert facts([4.0], rounding=rounding(1e-3)).tolerance.item() == pytest.approx(4 * 16e-3)
    assert facts([4.0], rounding=rounding(1e-9)).tolerance.item() == 4 * 2 * UNIT
    for std, expected in [(1.0, 256 * UNIT), (10 * UNIT, 40 * UNIT), (UNIT, 8 * UNIT)]:
        assert facts([4.0], randomness=noise([std], [std])).tolerance.item() == pytest.approx(expected)
    remembered = facts([1.0], [-1.0], history=History(False, rounding=0.01))
    assert remembered.tolerance.item() == pytest.approx(0.04 * math.sqrt(2))
    mixed = facts([4.0, 4.0], randomness=noise([10 * UNIT, 0.0], [0.0, 0.0]))
    assert mixed.tolerance.tolist() == pytest.approx([40 * UNIT, 256 * UNIT])


def test_differences_that_are_certain():
    known = facts([4.0, 4.0], randomness=noise([1.0, 1.0], [1.0, 100.0]))
    assert known.certain(1).tolist() == pytest.approx([6 * math.sqrt(2), 250.0])
    assert known.certain(50).tolist() == pytest.approx([6 / 5, 5.0])
    assert facts([4.0]).certain(1).tolist() == [256 * UNIT]


def test_changes_relative_to_the_spread():
    known = facts([0.0, 0.0], [2.0, 4.0])
    assert known.output_spread.tolist() == pytest.approx([math.sqrt(2), math.sqrt(8)])
    assert known.relative(torch.tensor([[math.sqrt(2), math.nan], [math.nan, 3 * math.sqrt(8)]])) == pytest.approx(
        5**0.5
    )
    assert known.relative(torch.full((1, 2), math.nan)) == 0


def test_rows_are_chosen_among_those_that_work():
    known = facts([1.0], [math.nan], [2.0], [3.0])
    chosen = known.choose(6, torch.Generator().manual_seed(0)).tolist()
    assert sorted(chosen[:3]) == [0, 2, 3]
    assert chosen[3:] == chosen[:3]


def test_what_is_known_of_memory():
    assert not facts([1.0]).remembers
    assert not facts([1.0], history=History(remembers=False)).remembers
    assert facts([1.0], history=History(remembers=True)).remembers
