"""How far inputs vary: rows that differ, that are alike, and of several processes."""

import math

import torch

from bondgrad.measuring._spread import Spread, input_sums


def test_spread_of_rows_that_differ_that_are_alike_and_that_are_zero():
    x = torch.stack((torch.tensor([1.0, 3.0]), torch.tensor([4.0, 4.0]), torch.tensor([0.0, 0.0])), 1)
    spread = Spread.of(x)
    assert spread.deviation.tolist() == [1, 0, 0]
    assert torch.allclose(spread.size, torch.tensor([math.sqrt(5), 4.0, 0.0]))
    assert torch.allclose(spread.reach, torch.tensor([math.sqrt(5) / 2, 2.0, 1.0]))
    assert torch.allclose(spread.typical, torch.tensor([1.0, 2.0, 1.0]))


def test_spread_of_a_joint_batch_is_that_of_all_rows():
    x = torch.randn(12, 4) + 100
    parts = sum(input_sums(part) for part in (x[:5], x[5:]))
    assert torch.allclose(Spread.of(x[:5], parts, 12).deviation, x.double().std(0, correction=0).float())
