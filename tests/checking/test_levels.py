"""Outputs of few levels: those of rounding are whole multiples of one distance apart, those of a tree are not."""

import pytest
import torch

from bondgrad import BlackBox, check
from bondgrad.checking._levels import Levels
from tests.checking.test_check import rows


def even(*parts):
    levels = Levels()
    for y in parts:
        levels.observe(y)
    return levels.even(torch.ones(parts[0].shape[1], dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_levels_at_even_distances(dtype):
    y = torch.randn(200, 3, dtype=dtype, generator=torch.Generator().manual_seed(0))
    assert even((10 * y).round() / 10)
    assert even((10 * y[:100]).round() / 10, (10 * y[100:]).round() / 10 + 0.1)
    assert even((10 * y).round() / 10 + 3.3)
    assert not even(y[torch.randint(8, (200,))])  # eight levels anywhere
    assert not even((y > 0).to(dtype))  # of two levels nothing is known
    assert not even(torch.full((5, 2), 1.5, dtype=dtype))
    assert not even(torch.full((5, 2), torch.nan, dtype=dtype))


def tree(x, places, leaves):
    """A tree that asks each of four inputs one question, which gives 16 leaves."""
    number = ((x > places.to(x)) * torch.tensor([1, 2, 4, 8])).sum(1)
    return leaves.to(x)[number]


@pytest.mark.parametrize("spread", [0.1, 0.5])
def test_a_tree_with_few_leaves_is_not_called_rounded(spread):
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        places, leaves = spread * torch.randn(4, generator=generator), torch.randn(16, 2, generator=generator)
        box = BlackBox(lambda x, places=places, leaves=leaves: tree(x, places, leaves), 4, seed=0)
        found = check(box, spread * rows(4, seed=seed), seed=seed)
        assert found.verdict == "undecided"
        assert "the box is piecewise constant" in found.notes[0]
        assert "no slope" in str(found)


def test_where_nothing_changes_more_evaluations_are_of_no_use():
    leaves = torch.randn(16, 2, generator=torch.Generator().manual_seed(0))
    found = check(BlackBox(lambda x: tree(x, torch.full((4,), 9.0), leaves), 4, seed=0), rows(4))
    told = "undecided: no output changes when inputs are moved by as much as they vary. Give rows that vary more"
    assert str(found) == f"{told}\n  {found.evaluations} evaluations"


def test_rounded_outputs_are_called_so():
    for seed in range(3):
        box = BlackBox(lambda x: (20 * torch.sin(2 * x)).round() / 20, 4, seed=0)
        found = check(box, 0.5 * rows(4, seed=seed), seed=seed)
        assert found.verdict != "right"
        assert "the outputs are rounded" in found.notes[0]  # also where steps over many levels are called wrong
