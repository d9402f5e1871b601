"""Estimators by themselves, without a layer: what they ask, what they make of the answers, and what they say of it."""

import math

import pytest
import torch

from bondgrad.estimators import (
    Central,
    Estimator,
    Forward,
    Simultaneous,
    Site,
    column_vjp,
)
from bondgrad.policies import Differences
from bondgrad.structure import Groups, colour
from bondgrad.testing.boxes import Linear, Sparse, Waves
from bondgrad.testing.conformance import slope
from tests.patterns import PATTERNS

EVERYTHING = 10**9  # max_rows, where nothing is to be divided


class Richardson(Estimator):
    """As in the docstring of the room."""

    order = 4

    def evaluations(self, groups):
        return 4 * groups

    def vjp(self, site, evaluate, max_rows):
        twice = site._replace(delta=2 * site.delta)
        near, far = (column_vjp(s, evaluate, max_rows, signs=(1, -1)) for s in (site, twice))
        return (4 * near - far) / 3


ESTIMATORS = [Central(), Forward(), Simultaneous(), Simultaneous(3), Richardson()]
each_estimator = pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)


def site_of(box, estimator, batch=4, step=1e-3, groups=None, dtype=torch.float64, **settings):
    """Rows, a loss, and perturbations of different sizes and signs."""
    x, gy = torch.randn(batch, box.in_features, dtype=dtype), torch.randn(batch, box.out_features, dtype=dtype)
    drawn = torch.randn(estimator.draws, *x.shape, dtype=dtype)
    delta = step * torch.copysign(1 + drawn.abs(), drawn)
    return Site(x, box(x), gy, delta, **({"low": None, "high": None} | settings), groups=groups)


class Asked:
    """Evaluates a box, and remembers at which points. `fails` says which outputs fail at points [..., d]."""

    def __init__(self, box, fails=None):
        self.box, self.fails, self.requests = box, fails, []

    def __call__(self, points, rows):
        self.requests.append((points.clone(), rows))
        y = self.box(points.flatten(0, -2)).view(*points.shape[:-1], -1)
        if self.fails is None:
            return y, None
        failed = self.fails(points).expand_as(y)
        return torch.where(failed, math.nan, y), ~failed.any(-1)

    @property
    def points(self):
        return torch.cat([points.flatten(0, -2) for points, _ in self.requests])


def groups_of(pattern):
    return Groups(colour(pattern), pattern)


# ---- what an estimator says of itself


@each_estimator
def test_the_error_falls_with_the_order(estimator):
    box = Waves(3, 7)
    site = site_of(box, estimator, batch=64)
    jacobian = box.jacobian(site.x)
    if estimator.together:  # the least-squares slope along the directions
        change = torch.einsum("bo,boi,nbi->nb", site.gy, jacobian, site.delta).unsqueeze(2)
        exact = (change * site.delta).sum(0) / site.delta.square().sum(0)
    else:
        exact = box.vjp(site.x, site.gy)
    steps, errors = (0.04, 0.02, 0.01), []
    for step in steps:
        g = estimator.vjp(site._replace(delta=site.delta * step / 1e-3), Asked(box), EVERYTHING)
        errors.append(float((g - exact).norm() / exact.norm()))
    assert slope(steps, errors) == pytest.approx(estimator.order, abs=0.1)


@each_estimator
@pytest.mark.parametrize("name", [None, "grid", "random", "blocks", "an input without outputs"])
@pytest.mark.parametrize("max_rows", [1, 7, EVERYTHING])
def test_evaluations_are_those_that_are_asked_for(estimator, name, max_rows):
    pattern = PATTERNS[name or "grid"]
    box, groups = Sparse(pattern), None if name is None else groups_of(pattern)
    asked = Asked(box)
    estimator.vjp(site_of(box, estimator, batch=5, groups=groups), asked, max_rows)
    count = box.in_features if groups is None else groups.count
    assert len(asked.points) == 5 * estimator.evaluations(count)


def test_what_each_costs():
    assert [e.evaluations(7) for e in ESTIMATORS] == [14, 7, 2, 6, 28]


@each_estimator
def test_the_base_counts_only_where_it_is_shared(estimator):
    box = Waves(3, 7)
    site = site_of(box, estimator)
    other = site._replace(y=site.y + torch.randn_like(site.y))
    a, b = (estimator.vjp(s, Asked(box), EVERYTHING) for s in (site, other))
    assert torch.equal(a, b) == (not estimator.shared_base)


@each_estimator
def test_every_draw_is_used(estimator):
    box = Waves(3, 7)
    site = site_of(box, estimator)
    g = estimator.vjp(site, Asked(box), EVERYTHING)
    for i in range(estimator.draws):
        delta = site.delta.clone()
        delta[i] *= -1.5
        assert not torch.equal(estimator.vjp(site._replace(delta=delta), Asked(box), EVERYTHING), g)


@each_estimator
def test_all_inputs_move_together_or_one_group_at_a_time(estimator):
    box = Sparse(PATTERNS["blocks"])
    for groups, size in ((None, 1), (groups_of(PATTERNS["blocks"]), 4)):
        site = site_of(box, estimator, batch=1, groups=groups)
        asked = Asked(box)
        estimator.vjp(site, asked, EVERYTHING)
        moved = (asked.points != site.x).sum(1)
        assert (moved == (box.in_features if estimator.together else size)).all()


@each_estimator
def test_the_first_request_needs_no_gradient(estimator):
    assert not estimator.first_round_needs_gy
    box = Waves(3, 7)
    site = site_of(box, estimator)
    asked = [Asked(box), Asked(box)]
    for one, gy in zip(asked, (site.gy, -2 * site.gy), strict=True):
        estimator.vjp(site._replace(gy=gy), one, EVERYTHING)
    assert torch.equal(*(one.requests[0][0] for one in asked))


def test_what_a_policy_is_told():
    assert [e.differences for e in ESTIMATORS] == [
        Differences(2, False, 1),
        Differences(1, True, 1),
        Differences(2, False, 1, together=True),
        Differences(2, False, 3, together=True),
        Differences(4, False, 1),
    ]
    assert repr(Central(normalize_rows=True)) == "Central(normalize_rows=True)"
    assert repr(Forward()) == "Forward(normalize_rows=False)"
    assert repr(Simultaneous(3)) == "Simultaneous(n=3, normalize_rows=False)"


# ---- what it makes of the answers


@each_estimator
def test_the_exact_gradient_of_a_linear_box(estimator):
    """Except along random directions every difference is exact."""
    box = Linear(4, 6)
    site = site_of(box, estimator, step=0.1)
    g = estimator.vjp(site, Asked(box), EVERYTHING)
    expected = box.vjp(site.x, site.gy)
    if estimator.together:
        change = (expected * site.delta).sum(2, keepdim=True)  # [n, B, 1]
        expected = (change * site.delta).sum(0) / site.delta.square().sum(0)
    assert torch.allclose(g, expected, rtol=1e-9)


@each_estimator
@pytest.mark.parametrize("name", [None, "random"])
@pytest.mark.parametrize("max_rows", [1, 2, 3, 10, 11, 64, 100])
def test_chunks_change_nothing_but_the_size_of_requests(estimator, name, max_rows):
    pattern = PATTERNS["random"]
    box, groups = Sparse(pattern), None if name is None else groups_of(pattern)
    site = site_of(box, estimator, batch=6, groups=groups)
    whole, parts = Asked(box), Asked(box)
    g = estimator.vjp(site, whole, EVERYTHING)
    assert torch.allclose(estimator.vjp(site, parts, max_rows), g, rtol=1e-9, atol=1e-12)
    assert len(whole.requests) == (2 if isinstance(estimator, Richardson) else 1)
    assert all(points.shape[:-1].numel() <= max(max_rows, points.shape[-2]) for points, _ in parts.requests)
    assert all(len(points) == rows.stop - rows.start for points, rows in parts.requests)


@pytest.mark.parametrize(
    ("estimator", "sizes"), [(Central(), [12] * 3), (Forward(), [9] * 2), (Simultaneous(3), [12] * 3)], ids=repr
)
def test_requests_have_as_many_rows_as_fit(estimator, sizes):
    """Of six rows with 6, 3 and 6 points in requests of at most 12 there are 2, 4 and 2; in equal parts 2, 3 and 2."""
    box = Waves(3, 7)
    asked = Asked(box)
    estimator.vjp(site_of(box, estimator, batch=6), asked, 12)
    assert [points.shape[:-1].numel() for points, _ in asked.requests] == sizes


@each_estimator
def test_a_box_with_a_memory_is_asked_about_all_rows(estimator):
    box = Waves(3, 7)
    site = site_of(box, estimator, batch=5)._replace(whole=True)
    asked = Asked(box)
    estimator.vjp(site, asked, 7)
    assert all(len(points) == 5 and rows == slice(0, 5) for points, rows in asked.requests)


@pytest.mark.parametrize("groups", [None, groups_of(torch.eye(2).bool())], ids=["dense", "grouped"])
@pytest.mark.parametrize("max_rows", [1, EVERYTHING])
def test_ends_that_fail(groups, max_rows):
    """y = x², at one row: nothing fails, one end, the other, both."""
    site = Site(
        torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 4.0]]), torch.tensor([[1.0, 10.0]]), torch.full((1, 1, 2), 0.5),
        None, None, groups,
    )  # fmt: skip

    def g(estimator, fails):
        return estimator.vjp(site, Asked(torch.square, fails), max_rows)[0].tolist()

    first = torch.tensor([True, False])  # the second output never fails
    nothing, above = (lambda p: p > 99), (lambda p: (p > 1) & first)
    below, moved = (lambda p: (p < 1) & first), (lambda p: (p != 1) & first)
    assert g(Central(), nothing) == [2.0, 40.0]
    assert g(Central(), above) == [1.5, 40.0]  # (1 - 0.25) / 0.5
    assert g(Central(), below) == [2.5, 40.0]  # (2.25 - 1) / 0.5
    assert math.isnan(g(Central(), moved)[0])
    assert g(Forward(), nothing) == g(Forward(), below) == [2.5, 45.0]
    assert math.isnan(g(Forward(), above)[0])
    assert g(Forward(), above)[1] == 45.0


def test_a_direction_that_fails_is_left_out():
    box = Waves(3, 7)
    site = site_of(box, Simultaneous(3), batch=2)
    lost = site.x[:, None, None] + site.delta[1][:, None, None]  # one end of the second direction of each row
    both = site.x[:, None, None] - site.delta[1][:, None, None]

    def fails(points):
        return ((points == lost) | (points == both)).all(-1, keepdim=True)

    g = Simultaneous(3).vjp(site, Asked(box, fails), EVERYTHING)
    without = Simultaneous(2).vjp(site._replace(delta=site.delta[[0, 2]]), Asked(box), EVERYTHING)
    assert torch.allclose(g, without, rtol=1e-12)
    one_end = Simultaneous(3).vjp(site, Asked(box, lambda p: (p == lost).all(-1, keepdim=True)), EVERYTHING)
    above, below, span = site.x + site.delta, site.x - site.delta, 2 * site.delta  # [n, B, d] each
    above[1], span[1] = site.x, site.delta[1]
    change = (site.gy * (box(above.flatten(0, 1)) - box(below.flatten(0, 1))).view(3, 2, 7)).sum(2, keepdim=True)
    assert torch.allclose(one_end, (change * span).sum(0) / span.square().sum(0), rtol=1e-9)


@pytest.mark.parametrize("groups", [None, groups_of(torch.ones(7, 3).bool())], ids=["dense", "grouped"])
def test_one_end_alone_says_nothing_without_the_row_itself(groups):
    """Of the second of three directions, at a row where the forward pass had no answer."""
    box = Waves(3, 7)
    site = site_of(box, Simultaneous(3), batch=1, groups=groups)
    site = site._replace(y=torch.full_like(site.y, math.nan))
    lost = site.x + site.delta[1]
    g = Simultaneous(3).vjp(site, Asked(box, lambda p: (p == lost).all(-1, keepdim=True)), EVERYTHING)
    without = Simultaneous(2).vjp(site._replace(delta=site.delta[[0, 2]]), Asked(box), EVERYTHING)
    assert torch.allclose(g, without, rtol=1e-9)


@pytest.mark.parametrize("n", [1, 2])
def test_a_failure_in_one_module_costs_the_others_nothing(n):
    """y = (x₀², 10 x₁) at (1, 1), along (1, 1), where the first output fails above or at both ends."""
    x, delta = torch.ones(1, 2), torch.full((n, 1, 2), 0.5)
    site = Site(x, torch.tensor([[1.0, 10.0]]), torch.ones(1, 2), delta, None, None, groups_of(torch.eye(2).bool()))

    def g(fails):
        def module(x):
            return torch.stack((x[:, 0].square(), 10 * x[:, 1]), 1)

        first = torch.tensor([True, False])
        return Simultaneous(n).vjp(site, Asked(module, lambda p: fails(p) & first), EVERYTHING)[0].tolist()

    assert g(lambda p: p > 99) == [2.0, 10.0]
    assert g(lambda p: p > 1) == [1.5, 10.0]  # (1 - 0.25) / 0.5
    assert g(lambda p: p < 1) == [2.5, 10.0]  # (2.25 - 1) / 0.5
    lost = g(lambda p: p > 0)
    assert not math.isfinite(lost[0])
    assert lost[1] == 10


def test_directions_are_weighted_by_their_steps():
    """y = x₀ + 10 x₁, along (1, 1) and (3, -1)."""
    delta = torch.tensor([[[1.0, 1.0]], [[3.0, -1.0]]])
    site = Site(torch.zeros(1, 2), torch.zeros(1, 1), torch.ones(1, 1), delta, None, None)
    g = Simultaneous(2).vjp(site, Asked(lambda x: x[:, :1] + 10 * x[:, 1:]), EVERYTHING)
    # s = (2, 2), c = 22 and s = (6, -2), c = -14: (22·2 - 14·6) / (4 + 36), (22·2 + 14·2) / (4 + 4)
    assert g.tolist() == [[-1.0, 9.0]]


def test_squares_of_tiny_steps_do_not_underflow():
    site = Site(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), torch.full((2, 1, 1), 1e-30), None, None)
    assert Simultaneous(2).vjp(site, Asked(lambda x: 3 * x), EVERYTHING).tolist() == [[3.0]]


def test_forward_steps_go_where_there_is_room():
    """y = x² in [1, 2], by steps of 0.25: blocked above, blocked below, not blocked, more than both sides allow."""
    x = torch.tensor([[1.875, 1.125, 1.5, 1.75]])
    delta = torch.tensor([[[0.25, -0.25, 0.25, 1.0]]])
    limits = torch.ones(4), torch.full((4,), 2.0)
    site = Site(x, x.square(), torch.ones(1, 4), delta, *limits)
    asked = Asked(torch.square)
    g = Forward().vjp(site, asked, EVERYTHING)
    ends = torch.tensor([[1.625, 1.375, 1.75, 1.0]])
    assert torch.equal(asked.points.diagonal()[None], ends)
    assert torch.equal(g, (ends.square() - x.square()) / (ends - x))


def test_a_step_that_ends_at_the_limit_is_not_blocked():
    x, limits = torch.tensor([[0.75]]), (torch.zeros(1), torch.ones(1))
    asked = Asked(torch.square)
    Forward().vjp(Site(x, x.square(), torch.ones(1, 1), torch.full((1, 1, 1), 0.25), *limits), asked, EVERYTHING)
    assert asked.points.tolist() == [[1.0]]
    Forward().vjp(Site(0 * x + 0.5, x, torch.ones(1, 1), torch.full((1, 1, 1), 0.75), *limits), asked, EVERYTHING)
    assert asked.points[-1].tolist() == [1.0]  # as much room on both sides: up


def test_central_differences_are_divided_by_what_the_limits_leave():
    x = torch.tensor([[0.875]])
    site = Site(x, x.square(), torch.ones(1, 1), torch.full((1, 1, 1), 0.25), torch.zeros(1), torch.ones(1))
    assert Central().vjp(site, Asked(torch.square), EVERYTHING).tolist() == [[(1 - 0.625**2) / (1 - 0.625)]]
