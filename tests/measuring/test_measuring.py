"""What all measurements have in common: moves of one input, noise from repeats, spread."""

import math

import pytest
import torch

from bondgrad.measuring._moves import one_input_moved
from bondgrad.measuring._noise import noise_from_repeats
from bondgrad.measuring._rounding import ROUNDING_UNITS, RoundingNoise
from bondgrad.measuring._spread import Spread, input_sums


@pytest.mark.parametrize("inputs", [slice(1, 4), torch.tensor([1, 2, 3]), torch.tensor([[1, 2, 3]] * 5)])
def test_one_input_is_moved_and_no_other(inputs):
    x, values = torch.randn(5, 6), torch.randn(5, 2, 3)
    points = one_input_moved(x, inputs, values)
    assert points.shape == (5, 3, 2, 6)
    for n, i in enumerate((1, 2, 3)):
        assert torch.equal(points[:, n, :, i], values[:, :, n])
        others = [j for j in range(6) if j != i]
        assert torch.equal(points[:, n, :, others], x[:, None, others].expand(-1, 2, -1))


def test_inputs_of_its_own_for_every_row():
    points = one_input_moved(torch.zeros(2, 3), torch.tensor([[0], [2]]), torch.ones(2, 1, 1))
    assert points.flatten(0, 2).tolist() == [[1, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize("order", [1, 2, 5])
def test_noise_is_that_of_the_answers_and_drift_is_none(order):
    generator = torch.Generator().manual_seed(0)
    noise = 0.3 * torch.randn(2000, 16, 2, dtype=torch.float64, generator=generator)
    drift = torch.linspace(0, 5, 16, dtype=torch.float64)[:, None] ** (order - 1)
    assert noise_from_repeats(noise + drift, 1, order, (0, 1)).sub(0.3).abs().max() < 0.01


def test_noise_without_answers_is_zero():
    assert noise_from_repeats(torch.full((3, 4, 2), math.nan), 1, 1, (0, 1)).tolist() == [0, 0]


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


def test_rounding_goes_by_the_larger_answer_and_by_the_usual_one():
    y = torch.tensor([[1.0, 0.0], [-3.0, math.nan], [2.0, 0.0]])
    rounding = RoundingNoise.of(y, 0.5)
    assert rounding.usual.tolist() == [2, 0]
    between = rounding.between(torch.tensor([[1.0, -4.0], [-8.0, math.nan]]), torch.tensor([[0.5, 2.0], [1.0, 1.0]]))
    assert (between / ROUNDING_UNITS).tolist() == [[1, 2], [4, 0]]  # nothing is known of an answer that did not come
