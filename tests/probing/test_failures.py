"""Random failures: how often, how many retries they need, and what code follows."""

import math

import numpy as np
import pytest
import torch

from bondgrad import probe
from bondgrad.probing._failures import RandomFailures
from tests.probing.test_probe import rows
from tests.probing.test_probe_code import pasted


@pytest.mark.parametrize(("failed", "retries"), [(0, 2), (10, 2), (40, 4), (100, 9), (180, 10)])
def test_as_many_retries_as_leave_one_row_in_a_thousand(failed, retries):
    found = RandomFailures(1, 200, failed)
    assert found.retries == retries
    assert retries == 10 or found.left(retries) <= 1e-3
    assert retries == 2 or found.left(retries - 1) > 1e-3


def test_words():
    text = "5 % of rows fail at random; after 2 retries 0.013 % still would."
    assert RandomFailures(1, 200, 10).words == f"Of 200 calls with a row that works, 10 failed. {text}"
    assert RandomFailures(4, 200, 0).words.startswith("Of 200 calls with 4 rows that works, 0 failed. Less than 0.5 %")


@pytest.mark.parametrize("kind", ["raises", "nan"])
@pytest.mark.parametrize(("share", "retries"), [(0.05, (2, 3)), (0.3, (4, 7))])
def test_the_share_of_rows_and_the_retries(kind, share, retries):
    numbers = np.random.default_rng(0)

    def fn(x: torch.Tensor):
        bad = torch.from_numpy(numbers.random(len(x)) < share)
        if kind == "raises" and len(x) == 1 and bool(bad.any()):
            raise OSError("timeout")
        return torch.sin(x).masked_fill(bad[:, None] & (kind == "nan"), math.nan)

    report = probe(fn, rows())
    assert report.failures.share == pytest.approx(share, abs=0.09)
    assert retries[0] <= report.failures.retries <= retries[1]
    assert f"retries={report.failures.retries})" in report.arguments["evaluator"]
    assert "rows fail at random; after" in report.reasons["evaluator"]
    assert not any("fails at random" in text for text in report.warnings)
    assert pasted(report, fn).evaluator.retries == report.failures.retries


def test_nothing_is_said_of_a_box_that_never_fails():
    report = probe(torch.sin, rows())
    assert report.failures is None
    assert not any("Failures" in text for text in report.left_out)
    assert "evaluator" not in report.arguments
