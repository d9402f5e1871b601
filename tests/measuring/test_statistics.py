"""Means, quantiles and degrees of freedom, by numbers worked out by hand or taken from tables."""

import math

import pytest
import torch

from bondgrad.measuring._statistics import freedom, mean, normal_quantile, student

NAN = math.nan


def test_means_and_their_variances_are_of_what_is_finite():
    samples = torch.tensor([[1.0, 4.0, NAN, 2.0], [3.0, NAN, NAN, math.inf], [5.0, NAN, NAN, 4.0]])
    found, variance, enough = mean(samples)
    assert found.tolist() == pytest.approx([3, 4, NAN, 3], nan_ok=True)
    assert variance.tolist() == pytest.approx([8 / 2 / 3, 0, 0, 2 / 1 / 2])
    assert enough.tolist() == [True, False, False, True]


def test_quantiles_of_the_normal_distribution():
    assert [normal_quantile(p) for p in (0.5, 0.975)] == pytest.approx([0, 1.959964], abs=1e-6)


@pytest.mark.parametrize(
    ("p", "degrees", "expected", "tolerance"),
    [
        (0.975, 5, 2.570582, 3e-3),
        (0.975, 10, 2.228139, 2e-4),
        (0.999, 20, 3.551808, 4e-4),
        (0.9995, 20, 3.849516, 6e-4),
    ],
)
def test_quantiles_of_students_distribution_are_those_of_the_tables(p, degrees, expected, tolerance):
    found = float(student(normal_quantile(p), torch.tensor([degrees], dtype=torch.float64)))
    assert found == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize(
    ("z", "terms"),
    [
        (1.0, (1, 2 / 4, (5 + 16 + 3) / 96, (3 + 19 + 17 - 15) / 384)),
        (2.0, (2, 10 / 4, (160 + 128 + 6) / 96, (384 + 608 + 136 - 30) / 384)),
    ],
)
def test_quantiles_of_students_distribution_have_the_terms_of_the_published_series(z, terms):
    """M. Abramowitz and I. Stegun, "Handbook of mathematical functions", 26.7.5."""
    found = student(z, torch.tensor([1.0, 2.0], dtype=torch.float64))
    assert found.tolist() == pytest.approx([sum(terms), sum(term / 2**n for n, term in enumerate(terms))])


def test_degrees_of_freedom_of_welch_and_satterthwaite():
    of_s, of_g = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[2.0, 0.0], [1.0, 1.0]])
    # With three and five copies squares are divided by 2 and 4: 0.5 + 1 + 4.5 + 0.25, and 2 + 0 + 8 + 0.25.
    first, second = 7**2 / 6.25, 7**2 / 10.25
    assert freedom(of_s, 3, of_g, 5).tolist() == pytest.approx([first, second, second])


def test_no_variance_counts_as_one_that_is_badly_known():
    nothing = torch.zeros(2, 2)
    assert freedom(nothing, 3, nothing, 5).tolist() == [2, 2, 2]
    assert freedom(nothing, 5, nothing, 4).tolist() == [3, 3, 3]
