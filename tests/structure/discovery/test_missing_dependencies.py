"""One check whether a known pattern is complete, by numbers."""

import math

import pytest
import torch

from bondgrad.structure.discovery._missing_dependencies import check_pattern
from tests.structure.discovery.test_dependencies import batch_of, random


class Recorded:
    """A box that keeps the points that it is asked about."""

    def __init__(self, fn):
        self.fn, self.points = fn, []

    def __call__(self, points):
        self.points.append(points)
        return self.fn(points)


def check_of(fn, depends, n=100, seed=0, noise=0.0, budget=16, **settings):
    box = Recorded(fn)
    batch = batch_of(box, torch.rand(n, depends.shape[1], generator=random(1)), **settings)
    known = torch.full((len(depends),), noise)
    return check_pattern(depends, known, batch, budget, random(seed)), batch, box.points[1:]


def test_a_check_of_a_deterministic_box_that_finds_nothing_asks_every_row_once():
    found, batch, points = check_of(torch.sin, torch.eye(8).bool())
    assert not found.missing.any()
    assert not found.noise.any()
    assert batch.evaluations == 16
    moved = points[0].squeeze(1).squeeze(1)  # [16, 8]
    moving = (moved[:, None] != batch.x).all(1)  # no value of the batch, which most are not
    assert moving.sum() <= 16 * 4
    assert len({tuple(row) for row in moving.tolist()}) > 1


@pytest.mark.parametrize("seeded", [False, True])
def test_a_row_of_a_noisy_box_is_moved_twice_and_asked_itself(seeded):
    """Of a box that takes a seed, twice: the noise of the forward pass is another one."""
    found, batch, points = check_of(torch.sin, torch.eye(8).bool(), noise=0.1, seeded=seeded)
    assert batch.evaluations == (4 * 4 if seeded else 6 * 3)  # about the budget
    one, other, *unmoved = points[0].squeeze(1).unbind(1)  # [k, 8] each
    assert len(unmoved) == 1 + seeded
    assert all(torch.equal(x, unmoved[0]) for x in unmoved)
    for moved in (one, other):
        assert ((moved != unmoved[0]).sum(1) == 4).all()  # half of the inputs
    assert not torch.equal(one, other)
    assert torch.allclose(found.noise, torch.tensor(0.1 * math.sqrt(0.75)))  # there is none, as it turns out


@pytest.mark.parametrize("seeded", [False, True])
def test_noise_that_is_the_same_at_all_ends_hides_nothing(seeded):
    """As in a box that takes a seed: noise of 1 in every request, and a coupling of 0.5."""
    generator = random(3)

    def fn(points):
        y = torch.sin(points) + torch.randn((), generator=generator)
        y[..., 0] += 0.5 * points[..., 5]
        return y

    found = check_of(fn, torch.eye(8).bool(), noise=0.0 if seeded else 1e-3, seeded=seeded)[0]
    assert found.missing.any() == seeded
    assert (found.noise > 0.1).all() == (not seeded)


@pytest.mark.parametrize(
    ("budget", "noise", "evaluations"),
    [(0, 0, 1), (7, 0, 7), (100, 0, 16), (math.inf, 0, 16), (0, 1, 3), (7, 1, 9), (100, 1, 24), (math.inf, 1, 24)],
)
def test_the_rows_of_a_check_follow_from_its_budget(budget, noise, evaluations):
    check = check_of(torch.sin, torch.eye(8).bool(), budget=budget, noise=noise)
    assert check[1].evaluations == evaluations


def test_a_complete_pattern_is_not_checked():
    found, batch, _ = check_of(lambda x: x.cumsum(-1), torch.ones(3, 3).bool())
    assert not found.missing.any()
    assert batch.evaluations == 0


@pytest.mark.parametrize(
    "depends",
    [torch.eye(6).bool() | torch.eye(6).bool().roll(1, 0), ~torch.eye(6).bool(), torch.ones(6, 6).tril().bool()],
    ids=["two each", "all but one", "all before"],
)
def test_some_output_depends_on_none_of_the_inputs_that_move(depends):
    for seed in range(20):
        points = check_of(lambda x: x, depends, noise=1e-3, seed=seed)[2]
        moved, _, base = points[0].squeeze(1).unbind(1)
        affected = (depends.float() @ (moved != base).float().T) > 0  # [6, 5]
        assert not affected.all(0).any()
        assert (moved != base).any(1).all()


@pytest.mark.parametrize("whole", [False, True])
def test_what_is_missing_is_found_by_halving(whole):
    """The first output depends on the last input, too."""

    def fn(points):
        y = points.clone()
        y[..., 0] += points[..., 31]
        return y

    found, batch, _ = check_of(fn, torch.eye(32).bool(), n=16, whole=whole)
    expected = torch.zeros(32, 32).bool()
    expected[0, 31] = True
    assert torch.equal(found.missing, expected)
    if not whole:  # sixteen pairs; then both halves of 16, 8, 4 and 2 inputs; and the input by itself at nine rows
        assert batch.evaluations == 16 + 32 + 4 * 4 + 9 * 2


def test_after_an_alarm_all_outputs_are_looked_at():
    """Whichever half of the inputs is moved, the outputs of these inputs are not under suspicion."""
    found, batch, _ = check_of(lambda x: torch.sin(x) + 3 * x[..., 5:6], torch.eye(32).bool())
    expected = torch.zeros(32, 32).bool()
    expected[:, 5] = True
    expected[5, 5] = False
    assert torch.equal(found.missing, expected)
    assert batch.evaluations < 100  # a search from scratch takes 128 + 32 * 8


def test_several_inputs_at_once():
    w = torch.zeros(16, 16)
    w[0, 3] = w[1, 7] = w[1, 9] = w[12, 15] = 1
    missing = torch.zeros(16, 16).bool()
    for seed in range(20):
        known = torch.eye(16).bool() | missing
        missing |= check_of(lambda x: torch.sin(x) + x @ w.T, known, seed=seed)[0].missing
    assert torch.equal(missing, w.bool())


@pytest.mark.parametrize("noise", [0.05, 1.0])
@pytest.mark.parametrize("known", [True, False])
def test_noise_is_not_missing(noise, known):
    generator = random(3)

    def fn(points):
        return points + noise * torch.randn(points.shape, generator=generator)

    checks = [check_of(fn, torch.eye(8).bool(), seed=seed, noise=noise * known)[0] for seed in range(20)]
    assert not torch.stack([check.missing for check in checks]).any()
    if not known:  # it is from then on
        assert all(check.noise.any() for check in checks)


def test_a_change_that_does_not_repeat_is_noise_from_then_on():
    calls = []

    def fn(points):
        calls.append(len(points))
        y = points.clone()
        if len(calls) == 2:  # the first is that of the batch
            y[..., 0] += 1.0
        return y

    found, batch, _ = check_of(fn, torch.eye(8).bool())
    assert not found.missing.any()
    assert batch.evaluations == 16 + 32
    assert found.noise.tolist() == [pytest.approx(1 / (4 * math.sqrt(2)), rel=1e-4), *[0.0] * 7]


def test_no_answer_is_no_alarm():
    calls = []

    def fn(points):
        calls.append(len(points))
        return points if len(calls) == 1 else torch.full_like(points, torch.nan)

    for noise in (0.0, 0.1):
        calls.clear()
        found = check_of(fn, torch.eye(8).bool(), noise=noise)[0]
        assert not found.missing.any()
        assert torch.isfinite(found.noise).all()


def test_failures_of_the_pairs_hide_nothing():
    """A third of all evaluations fail. Where both halves of the inputs might explain a change, both are taken to."""
    generator = random(3)

    def fn(points):
        y = torch.sin(points)
        y[..., 3] += 2 * points[..., 6]
        return torch.where(torch.rand(y.shape[:-1], generator=generator)[..., None] < 0.3, torch.nan, y)

    found = torch.stack([check_of(fn, torch.eye(8).bool(), seed=seed)[0].missing for seed in range(10)])
    assert found[:, 3, 6].sum() >= 5
    assert found.any(0).any(1).nonzero().tolist() == [[3]]


def test_inputs_that_are_missing_only_together():
    """Both must move for the first output to change: neither alone explains it, so that it may depend on either."""
    x = torch.zeros(1000, 3)
    x[0] = 0.4  # how far they go; this row itself is not drawn

    def fn(points):
        y = points.clone()
        y[..., 0] += points[..., 1] + points[..., 2] > 0.7
        return y

    generator, noise = torch.Generator().manual_seed(0), torch.zeros(3)
    checks = [check_pattern(torch.eye(3).bool(), noise, batch_of(fn, x), 16, generator).missing for _ in range(10)]
    assert torch.stack(checks).any(0).tolist() == [[False, True, True], [False] * 3, [False] * 3]
