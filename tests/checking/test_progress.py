"""A limit on time, which is looked at between requests, and what is told of the progress."""

import time

import pytest
import torch

from bondgrad import BlackBox, check
from bondgrad.checking import CheckProgress
from bondgrad.checking._progress import RequestPace
from bondgrad.measuring._sampler import BudgetExceeded
from tests.checking.test_check import rows


class Clock:
    """Time that passes only while a box works."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def slow(self, per_row, per_call=0.0, sizes=None):
        def box(x):
            self.now += per_call + per_row * len(x)
            if sizes is not None:
                sizes.append(len(x))
            return torch.sin(x)

        return box


def test_the_time_is_kept_to(monkeypatch):
    clock = Clock(monkeypatch)
    for seconds in (0.05, 1.0, 5.0, 20.0):
        clock.now = 0.0
        found = check(clock.slow(0.01), rows(3), seconds=seconds)
        assert clock.now <= seconds + 1.1  # one request more, of a second at most
        assert found.verdict in ("right", "undecided")
        assert found.evaluations <= clock.now / 0.01 + 1
        if found.verdict == "undecided":
            assert "seconds" in str(found)
    assert found.verdict == "right"  # with fewer rows


def test_a_black_box_keeps_to_the_time(monkeypatch):
    clock = Clock(monkeypatch)
    found = check(BlackBox(clock.slow(0.01), 3, policy="bond", seed=0), rows(3), seconds=20.0)
    assert clock.now <= 22
    assert found.verdict == "right"


def test_too_little_time_says_so(monkeypatch):
    found = check(Clock(monkeypatch).slow(1.0), rows(3), seconds=2.0)
    assert str(found).startswith("undecided: no slopes are known yet, and the 2 seconds are over. Give more seconds")
    assert "Taylor" not in str(found)  # nothing is known of it
    assert found.factor.isnan().all()
    assert found.problems == ()


def printed(x):
    """Its fourth digit is rounded, so that a first step from one row is far too short."""
    y = torch.stack((x[:, 0].sin() * (x[:, 1] / 2).exp(), x[:, 0] * x[:, 1] + 100, x[:, 2].cos()), 1)
    return (y * 1e4).round() / 1e4


@pytest.mark.parametrize("policy", ["calibrated", "bond"])
@pytest.mark.parametrize("told", [{"seconds": 1e6}, {"progress": lambda _: None}])
def test_the_gradient_of_a_fresh_layer_is_that_without_a_limit(policy, told, monkeypatch):
    Clock(monkeypatch)
    for seed in range(3):
        x = rows(3, dtype=torch.float32, seed=seed)
        usual = check(BlackBox(printed, 3, policy=policy, seed=seed), x)
        limited = check(BlackBox(printed, 3, policy=policy, seed=seed), x, **told)
        assert str(limited) == str(usual)
        assert torch.equal(limited.error, usual.error)
        assert usual.verdict == "right" or policy == "bond"


@pytest.mark.parametrize("seconds", [6.0, 10.0])
def test_a_batch_that_takes_longer_than_the_time_left_is_not_begun(monkeypatch, seconds):
    clock = Clock(monkeypatch)
    found = check(BlackBox(clock.slow(0.01), 8, seed=0), rows(8), seconds=seconds)
    assert clock.now < seconds
    assert "gradients at 16 rows, which are taken in one batch, may take" in str(found)
    assert str(found).splitlines()[0].endswith("s are left. Give more seconds")
    found = check(BlackBox(clock.slow(0.01), 8, seed=0), rows(8), seconds=10 * seconds)
    assert found.verdict == "right"


def test_boxes_with_a_cost_per_call_get_large_requests(monkeypatch):
    sizes = []
    check(Clock(monkeypatch).slow(1e-4, 2.0, sizes), rows(3), seconds=100.0)
    assert max(sizes) > 500


def test_without_a_limit_requests_are_whole():
    sizes = []

    def box(x):
        sizes.append(len(x))
        return torch.sin(x)

    check(box, rows(3))
    assert sizes[0] == 64
    paced, sizes = sizes, []
    assert check(box, rows(3), progress=lambda _: None)
    assert len(sizes) > len(paced)


def test_progress_is_told():
    told = []
    found = check(torch.sin, rows(3), budget=5000, progress=told.append)
    assert all(isinstance(one, CheckProgress) for one in told)
    counts = [one.evaluations for one in told]
    assert counts == sorted(counts)
    assert counts[-1] == found.evaluations
    assert len({one.stage for one in told}) >= 4
    assert str(told[-1]).endswith("of at most 5,000 evaluations, 0 s") or told[-1].seconds >= 0.5


def test_the_limit_does_not_change_what_is_found():
    assert torch.equal(check(torch.sin, rows(3)).factor, check(torch.sin, rows(3), seconds=1e6).factor)


def test_when_the_time_is_over_nothing_begins(monkeypatch):
    clock = Clock(monkeypatch)
    pace = RequestPace(1.0, None)
    pace.begin()
    clock.now = 1.0
    with pytest.raises(BudgetExceeded, match="1 seconds are over"):
        pace.begin()


def test_bad_seconds():
    with pytest.raises(ValueError, match="seconds must be a positive"):
        check(torch.sin, rows(3), seconds=0)
