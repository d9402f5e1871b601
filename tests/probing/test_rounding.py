"""Lattices, precision and the half-width that rounding makes of the noise."""

import math

import numpy as np
import pytest
import torch

from bondgrad import per_row, probe
from bondgrad.probing import Session
from bondgrad.probing._float_types import arithmetic_of, precision_of
from tests.probing.test_probe import rows


@pytest.mark.parametrize(
    ("floor", "name"),
    [
        (0.0, "float64"),
        (3e-12, "float64"),
        (1e-7, "float32"),
        (2e-5, "float32"),
        (3e-4, "TF32 or float16"),
        (7e-4, "TF32 or float16"),
        (2e-3, "bfloat16"),
        (3e-2, "coarser than bfloat16"),
    ],
)
def test_arithmetic_by_floor(floor, name):
    assert arithmetic_of(floor) == name


@pytest.mark.parametrize(
    ("floor", "known", "precision"),
    [
        (3e-12, 0, "float64"),
        (4e-12, 0, "good to about 11 digits"),
        (2e-5, 1, "float32"),
        (3e-5, 1, "good to about 4 digits"),
        (7e-4, 2, "float16"),
        (1e-3, 2, "good to about 3 digits"),
        (2e-2, 3, "bfloat16"),
        (3e-2, 0, "good to about 1 digit"),
        (2.0, 0, "good to about 1 digit"),
    ],
)
def test_only_what_is_known_of_a_type_is_said(floor, known, precision):
    assert precision_of(floor, known) == precision


def solved(p):
    """By bisection, to five digits."""
    low, high = -2.0, 2.0
    while high - low > 1e-5:
        middle = (low + high) / 2
        low, high = (middle, high) if middle < math.sin(float(p[0])) + 0.1 * float(p[1]) else (low, middle)
    return (low + high) / 2 / 3


def printed(x: np.ndarray):
    """With six significant digits."""
    y = np.sin(x.astype(float)).cumsum(1)
    return np.vectorize(lambda v: float(f"{v:.6g}"))(y)


@pytest.mark.parametrize("fn", [per_row(solved), printed], ids=["bisection", "printed"])
def test_tolerances_and_printed_digits_are_not_called_a_type(fn):
    report = probe(fn, rows(d=2))
    assert "digits" in report.rounding.precision
    assert report.rounding.precision in report.verdict
    assert not any(name in report.verdict + report.code for name in ("TF32", "float16", "float32"))


@pytest.mark.parametrize("levels", [3, 4, 5, 40])
def test_a_lattice_has_four_values(levels):
    step = 1.7
    found = probe(lambda x: x.mul(levels / 4).round().clamp(0, levels - 1) * step, rows().abs()).rounding
    assert found.quantum == [pytest.approx(step) if levels >= 4 else None] * 4
    assert found.largest_quantum == (pytest.approx(step) if levels >= 4 else 0)
    assert found.half_width == (pytest.approx(step / 2) if levels >= 4 else 0)


def test_neighbours_of_a_lattice_may_be_missing():
    """Multiples of two and three tenths: one and seven are no sums of them, and one is the least difference."""
    found = probe(lambda x: torch.where(x > 0, (5 * x).round() * 0.2, (5 * x).round() * 0.3), rows()).rounding
    assert found.quantum == [pytest.approx(0.1)] * 4


def test_a_lattice_of_one_output_among_three():
    found = probe(lambda x: torch.stack((x[:, 0].sin(), (4 * x[:, 1]).round() / 4, x[:, 2].cos()), 1), rows()).rounding
    assert found.quantum == [None, pytest.approx(0.25), None]
    assert not found.quantised
    assert found.largest_quantum == pytest.approx(0.25)
    assert found.floor == 0  # it cannot be seen between steps


def test_the_half_width_of_coarse_arithmetic_is_twice_its_deviation():
    found = probe(lambda x: torch.sin(x).bfloat16().float(), rows()).rounding
    size = math.sqrt((1 - math.exp(-2)) / 2)  # of the sine of normal numbers
    assert (found.returned, found.precision) == ("float32", "bfloat16")
    assert found.half_width == pytest.approx(2 * found.floor * size, rel=0.1)
    assert probe(torch.sin, rows()).rounding.half_width == 0


def lines_asked(limits=None):
    """The points [lines, spacings, points, d] along which the floor is looked for, around one."""
    asked = []

    def fn(x):
        asked.append(x.double().clone())
        return torch.sin(x)

    for name in Session(fn, torch.ones(50, 2), limits=limits, seconds=1e9).run():
        if name == "Rounding":
            asked.clear()
        if name == "Rows together":
            break
    return torch.cat(asked)[4 + 32 :][: 6 * 4 * 16].view(6, 4, 16, 2)  # after a look, and points between rows


@pytest.mark.parametrize("limits", [None, (0.5, 1), (1, 2)])
def test_points_of_a_line_are_exactly_equally_spaced(limits):
    points = lines_asked(limits)
    gaps = points.diff(dim=2)  # [lines, spacings, points - 1, d]
    assert bool((gaps == gaps[:, :, :1]).all())
    assert [set(gaps[:, n].abs().flatten().tolist()) for n in range(4)] == [{2.0**-p} for p in (20, 16, 12, 8)]
    assert {-1, 1} == set(gaps.sign().flatten().tolist())
    middle = (points.amin(2) + points.amax(2)) / 2
    step = gaps[:, :, 0].abs()
    away = {None: 0.0, (0.5, 1): -8.5, (1, 2): 8.5}[limits]  # between limits, one step is left
    assert float(((middle - 1) / step - away).abs().max()) <= 0.5


def test_the_floor_is_the_deviation_of_what_is_rough():
    """A hash of the inputs, uniform in [0, 1): its deviation is 1 / sqrt(12)."""
    size = 0.05

    def fn(x):
        return 1 + size * (torch.sin(x.double().sum(1, keepdim=True) * 1e6) * 43758.5 % 1)

    found = probe(fn, rows(dtype=torch.float64)).rounding
    assert found.floor == pytest.approx(size / math.sqrt(12), rel=0.3)
    assert found.rough
    assert found.half_width == pytest.approx(2 * found.floor, rel=0.1)
    assert found.precision == "float64"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_type_that_is_returned(dtype):
    found = probe(torch.sin, rows(dtype=dtype)).rounding
    assert f"torch.{found.returned}" == str(dtype)
    assert found.precision == found.returned
    assert 0.01 < found.floor / torch.finfo(dtype).eps < 1
