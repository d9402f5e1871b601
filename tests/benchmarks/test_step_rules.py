"""The step choosers that the default layer is compared with do what their authors say."""

import math

import numpy as np
import pytest
from lockstep import side_by_side
from step_rules import RULES, choose, derivative, noise_of_differences


def test_noise_is_that_of_the_differences():
    random, found = np.random.default_rng(0), []
    for _ in range(200):
        values = np.sin(1 + 1e-4 * np.arange(7)) + 1e-3 * random.normal(size=7)
        found.append(noise_of_differences(values.tolist()))
    assert sum(value is None for value in found) < 40
    assert np.mean([value for value in found if value is not None]) == pytest.approx(1e-3, rel=0.15)


def test_a_smooth_table_has_no_noise():
    assert noise_of_differences([math.exp(0.5 * k) for k in range(7)]) is None


def test_derivatives_are_of_the_right_size():
    assert derivative(math.exp, 1.0, 1e-12, 2) == pytest.approx(math.e, rel=0.1)
    assert derivative(math.exp, 1.0, 1e-12, 3) == pytest.approx(math.e, rel=0.1)
    with pytest.raises(ValueError, match="no curvature"):
        derivative(lambda _: 1.0, 1.0, 1e-12, 2)


@pytest.mark.parametrize("name", RULES)
def test_every_rule_finds_about_the_best_step(name):
    pytest.importorskip("numericalderivative")
    random = np.random.default_rng(0)
    rule, sigma = RULES[name], 1e-4
    chosen = [choose(rule, lambda x: math.exp(x) + sigma * random.normal(), 1.0, 1.0) for _ in range(40)]
    best = 8**0.25 * math.sqrt(sigma / math.e) if rule.forward else (3 * sigma / math.e) ** (1 / 3)
    assert best / 5 < np.median([choice.step for choice in chosen]) < 5 * best
    assert np.mean([choice.failed for choice in chosen]) < 0.3
    assert all(8 <= choice.evaluations < 100 for choice in chosen)


def test_a_rule_that_finds_nothing_says_so():
    assert choose(RULES["ECnoise, Moré-Wild, central"], lambda _: 1.0, 0.0, 1.0).failed


def test_searches_side_by_side_ask_in_one_call():
    calls = []

    def values(which, at):
        calls.append(len(at))
        return [n + x for n, x in zip(which, at, strict=True)]

    def search(f):
        return f(0.5) + f(1.0)

    assert side_by_side([search] * 3, values) == [1.5, 3.5, 5.5]
    assert calls == [3, 3]


def test_an_error_of_the_box_ends_every_search():
    def values(which, at):
        raise RuntimeError("the box is off")

    with pytest.raises(RuntimeError, match="the box is off"):
        side_by_side([lambda f: f(0.0)] * 2, values)
