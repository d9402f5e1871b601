"""What benchmarks/step_choosers.py compares: differences of every kind, scores, and searches within a budget."""

import math

import numpy as np
import pytest
import torch
from step_choosers import Batch, Case, batches_of, by_rule, differences, ours, score
from step_rules import RULES


def answers(x):
    return np.stack((np.sin(x).sum(1), x[:, 0] * x[:, 1]), 1)


def slopes(x, gy):
    x, gy = x.numpy(), gy.numpy()
    return gy[:, :1] * np.cos(x) + gy[:, 1:] * x[:, ::-1]


def draw(random):
    return torch.randn(8, 2, generator=random).double(), torch.randn(8, 2, generator=random).double()


CASE = Case(answers, 2, 8, 1.0, draw, slopes)


def test_differences_have_the_step_of_their_row_and_input():
    x, gy = draw(torch.Generator().manual_seed(0))
    batch = Batch(x.numpy(), gy.numpy(), slopes(x, gy))
    for steps in (1e-5, np.array([1e-5, 2e-5]), np.full((8, 2), 1e-5)):
        np.testing.assert_allclose(differences(CASE, batch, steps), batch.slopes, rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(differences(CASE, batch, steps, forward=True), batch.slopes, atol=1e-4)
    steps = np.full((8, 2), 1e-5)
    steps[3, 1] = 1.0
    wrong = np.abs(differences(CASE, batch, steps) - batch.slopes) > 1e-6
    assert np.argwhere(wrong).tolist() == [[3, 1]]


def test_scores():
    exact = np.array([[1.0, -1.0], [2.0, 0.0]])
    assert score(exact, exact) == pytest.approx([100.0, 1.0, 0.0])
    signs, cosine, error = score(np.array([[1.0, 1.0], [math.nan, 5.0]]), exact)
    assert signs == pytest.approx(100 / 3)
    assert cosine == pytest.approx(0.0)
    assert error == 1.0
    assert all(math.isnan(value) for value in score(exact, 0 * exact))


def test_a_rule_searches_at_as_many_rows_as_its_budget_pays_for():
    first, batches = batches_of(CASE, 0)
    rule = RULES["ECnoise, Moré-Wild, central"]
    one, all_rows = (by_rule(CASE, rule, batches, first, budget) for budget in (0, 1e9))
    assert one["rows searched"] == 1
    assert all_rows["rows searched"] == 8
    for found in (one, all_rows):
        assert found["shared"][0] > 99
        assert found["shared"][2] < 1e-6
        assert found["own evaluations"] > 2 * 8


def test_the_budget_is_what_trials_cost():
    found = ours(CASE, 0)
    assert found["shared"][0] > 99
    assert 0 < found["budget"] / (160 * 8 * 5) < 0.2
    assert found["evaluations"] == pytest.approx(5 + found["budget"] / 160 / 8)
