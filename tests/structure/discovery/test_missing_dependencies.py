"""One check whether a known pattern is complete, by numbers."""

import pytest
import torch

from bondgrad.structure.discovery._dependencies import missing_dependencies
from tests.structure.discovery.test_dependencies import batch_of, random


class Recorded:
    """A box that keeps the points that it is asked about."""

    def __init__(self, fn):
        self.fn, self.points = fn, []

    def __call__(self, points):
        self.points.append(points)
        return self.fn(points)


def check_of(fn, depends, n=100, seed=0, **settings):
    box = Recorded(fn)
    batch = batch_of(box, torch.rand(n, depends.shape[1], generator=random(1)), **settings)
    return missing_dependencies(depends, batch, random(seed)), batch, box.points[1:]


def test_a_check_that_finds_nothing_asks_sixteen_rows_three_times():
    found, batch, points = check_of(torch.sin, torch.eye(8).bool())
    assert not found.any()
    assert batch.evaluations == 3 * 16
    moved, first, second = points[0].squeeze(1).unbind(1)  # [16, 8] each
    assert torch.equal(first, second)
    counts = (moved != first).sum(1).tolist()
    assert counts[::2] == [4] * 8  # half of the inputs
    assert counts[1::2] == [7] * 8  # all that one output does not depend on


def test_a_complete_pattern_is_not_checked():
    found, batch, _ = check_of(lambda x: x.cumsum(-1), torch.ones(3, 3).bool())
    assert not found.any()
    assert batch.evaluations == 0


def test_half_of_the_inputs_are_those_that_fewest_outputs_depend_on():
    """By ranks of outputs: whichever are moved, the output of the lowest rank depends on none of them."""
    depends = torch.eye(6).bool() | torch.eye(6).bool().roll(1, 0)
    _, _, points = check_of(lambda x: x + x.roll(1, -1), depends)
    moved, base, _ = points[0].squeeze(1).unbind(1)
    moving = (moved != base)[::2]  # [8, 6]
    assert (moving.sum(1) >= 3).all()
    affected = (depends.float() @ moving.float().T) > 0  # [6, 8]
    assert (affected.sum(0) < 6).all()


@pytest.mark.parametrize("whole", [False, True])
def test_what_is_missing_is_found_input_by_input(whole):
    """The first output depends on the last input, too."""

    def fn(points):
        y = points.clone()
        y[..., 0] += points[..., 3]
        return y

    found, batch, points = check_of(fn, torch.eye(4).bool(), n=16, whole=whole)
    expected = torch.zeros(4, 4).bool()
    expected[0, 3] = True
    assert torch.equal(found, expected)
    if not whole:  # of k rows, sixteen pairs each, and pairs for all inputs at one of them, which explains the others
        rest = batch.evaluations - 3 * 16 - 2 * 4
        assert rest % 32 == 0
        assert 0 < rest <= 16 * 32
        assert sum(part.shape[:3] == (1, 4, 2) for part in points) == 1


@pytest.mark.parametrize("noise", [0.05, 1.0])
def test_noise_is_not_missing(noise):
    generator = random(3)

    def fn(points):
        return points + noise * torch.randn(points.shape, generator=generator)

    found = [check_of(fn, torch.eye(8).bool(), seed=seed)[0] for seed in range(20)]
    assert not torch.stack(found).any()


def test_inputs_that_are_missing_only_together():
    """Both must move for the first output to change: neither alone explains it, so that it may depend on either."""
    x = torch.zeros(1000, 3)
    x[0] = 0.4  # how far they go; this row itself is not drawn

    def fn(points):
        y = points.clone()
        y[..., 0] += points[..., 1] + points[..., 2] > 0.7
        return y

    generator = torch.Generator().manual_seed(0)
    checks = [missing_dependencies(torch.eye(3).bool(), batch_of(fn, x), generator) for _ in range(10)]
    assert torch.stack(checks).any(0).tolist() == [[False, True, True], [False] * 3, [False] * 3]
