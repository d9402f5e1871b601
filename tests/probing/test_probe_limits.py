"""A region in which a box fails becomes limits, if limits of single inputs say where it is."""

import math

import pytest
import torch

from bondgrad import probe
from tests.probing.test_probe import rows
from tests.probing.test_probe_code import pasted


def failing(where):
    def fn(x: torch.Tensor):
        return torch.sin(x).masked_fill(where(x)[:, None], math.nan)

    return fn


def limits_of(report):
    return None if report.ranges.limits is None else tuple(map(tuple, report.ranges.limits))


def test_limits_where_it_works():
    fn = failing(lambda x: (x[:, 1] > 1.2) | (x[:, 3] < -0.8))
    report = probe(fn, rows())
    low, high = report.ranges.limits
    assert (low[:3], high[0], high[2:]) == ([-math.inf] * 3, math.inf, [math.inf] * 2)
    assert 1.1 < high[1] < 1.2
    assert -0.8 < low[3] < -0.7
    assert report.reasons["limits"].startswith("beyond these it fails")
    layer = pasted(report, fn)
    y = layer(3 * rows().requires_grad_())
    y.sum().backward()
    assert bool(torch.isfinite(y).all())
    assert layer.stats.failures == 0


def test_limits_that_were_given_become_narrower():
    report = probe(failing(lambda x: x[:, 0] > 0.5), rows(), limits=([-1, -2, -2, -2], 2))
    low, high = report.ranges.limits
    assert (low, high[1:]) == ([-1, -2, -2, -2], [2, 2, 2])
    assert 0.4 < high[0] < 0.5
    assert "limits=([-1.0, -2.0, -2.0, -2.0], [0.4" in report.code


@pytest.mark.parametrize(
    "where",
    [
        lambda x: (x[:, 0] > 0.2) & (x[:, 0] < 0.9),  # in the middle
        lambda x: x[:, :2].sum(1) > 0.4,  # of two inputs together
        lambda x: x.norm(dim=1) > 1.5,
    ],
)
def test_regions_that_no_limits_describe(where):
    report = probe(failing(where), rows())
    assert limits_of(report) is None
    assert "limits" not in report.arguments
    assert any("box.last_ok" in text for text in report.warnings)


def test_no_limits_for_a_box_that_works_everywhere():
    assert limits_of(probe(torch.sin, rows())) is None
    assert "limits" not in probe(torch.sin, rows()).arguments
