"""How far inputs vary: rows that differ, that are alike, and of several processes."""

import math

import pytest
import torch

from bondgrad.measuring._spread import Spread, input_sums


def test_spread_of_rows_that_differ_that_are_alike_and_that_are_zero():
    x = torch.stack((torch.tensor([1.0, 3.0]), torch.tensor([4.0, 4.0]), torch.tensor([0.0, 0.0])), 1)
    spread = Spread.of(x)
    assert torch.allclose(spread.deviation, torch.tensor([math.sqrt(2), 0.0, 0.0]))  # 1² + 1², divided by 2 - 1
    assert torch.allclose(spread.size, torch.tensor([math.sqrt(5), 4.0, 0.0]))
    assert torch.allclose(spread.reach, torch.tensor([math.sqrt(2), 2.0, 1.0]))
    assert torch.allclose(spread.typical, torch.tensor([math.sqrt(2), 2.0, 1.0]))


def test_inputs_that_vary_less_than_half_their_size_can_go_as_far_as_that():
    spread = Spread.of(torch.tensor([[9.0], [11.0], [10.0]]))
    assert spread.deviation.tolist() == pytest.approx([1])
    assert spread.reach.tolist() == pytest.approx([math.sqrt(302 / 3) / 2])
    assert spread.typical.tolist() == pytest.approx([1])


def test_a_single_row_has_no_deviation():
    spread = Spread.of(torch.tensor([[3.0, 0.0]]))
    assert spread.deviation.tolist() == [0, 0]
    assert spread.reach.tolist() == spread.typical.tolist() == [1.5, 1]


def test_the_variance_of_few_rows_is_right_on_average():
    x = torch.randn(3, 20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert float(Spread.of(x).deviation.square().mean()) == pytest.approx(1, abs=0.02)  # 2/3 without the correction


def test_spread_of_a_joint_batch_is_that_of_all_rows():
    x = torch.randn(12, 4) + 100
    parts = sum(input_sums(part) for part in (x[:5], x[5:]))
    assert torch.allclose(Spread.of(x[:5], parts, 12).deviation, x.double().std(0).float())
