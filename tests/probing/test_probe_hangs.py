"""A call that hangs does not outlast the probe, which says so."""

import threading

import pytest
import torch

from bondgrad import probe
from tests.probing.test_probe import rows

LONG = 60  # seconds


class Hangs:
    """Answers some calls, and then none."""

    def __init__(self, answered):
        self.left, self.over = answered, threading.Event()

    def __call__(self, x: torch.Tensor):
        self.left -= 1
        if self.left < 0:
            self.over.wait(LONG)
        return torch.sin(x)


@pytest.mark.parametrize("answered", [0, 40])
def test_a_call_that_hangs(answered):
    box, x, before = Hangs(answered), rows(), torch.get_rng_state()
    report = probe(box, x, seconds=3)
    box.over.set()
    assert "hangs" in report.verdict
    assert "did not come back within" in report.hung
    assert len(report.left_out) == 1
    assert "Processes(n, timeout=...), which ends a call that hangs." in report.warnings[0]
    assert (report.out_features == 4) == (answered > 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_box_that_answers_does_not_hang():
    report = probe(torch.sin, rows(), budget=300)
    assert report.hung == ""
    assert "hangs" not in report.verdict
