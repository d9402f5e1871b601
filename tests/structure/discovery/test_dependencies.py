"""The pieces of the search for dependencies, by hand-made numbers."""

import math

import pytest
import torch

from bondgrad.structure.discovery._dependencies import (
    Responses,
    confirmed,
    find_dependencies,
    mean_change,
    measure_noise,
    responses,
)
from bondgrad.structure.discovery._search_batch import SearchBatch


def batch_of(fn, x, noise=1e-7, low=-math.inf, high=math.inf, max_points=10**6, **settings):
    low, high = (torch.as_tensor(limit).expand(x.shape[1]) for limit in (low, high))
    return SearchBatch(x, fn(x), lambda points, rows: fn(points), max_points, noise, 1e-7, low, high, **settings)


def random(seed=0):
    return torch.Generator().manual_seed(seed)


# ---- asking


@pytest.mark.parametrize(
    ("max_points", "whole", "shapes"),
    [
        (100, False, [(3, 4, 2)]),
        (24, False, [(3, 4, 2)]),
        (23, False, [(2, 4, 2), (1, 4, 2)]),
        (15, False, [(1, 4, 2)] * 3),
        (7, False, [(1, 3, 2), (1, 1, 2)] * 3),
        (1, False, [(1, 1, 2)] * 12),
        (23, True, [(3, 3, 2), (3, 1, 2)]),
        (5, True, [(3, 1, 2)] * 4),
    ],
)
def test_requests_have_no_more_points_than_may_exist(max_points, whole, shapes):
    """Three rows with four moves to two ends. A box with a memory has all rows in every request."""
    seen = []

    def fn(points):
        seen.append(points.shape[:-1])
        return 2 * points

    batch = batch_of(fn, torch.zeros(3, 5), max_points=max_points, whole=whole)
    points = torch.arange(3 * 4 * 2 * 5).view(3, 4, 2, 5).float()
    assert torch.equal(batch.ask(points, torch.arange(3)), 2 * points)
    assert [tuple(shape) for shape in seen[1:]] == shapes
    assert batch.evaluations == 24


def test_answers_that_are_not_finite_are_nan():
    batch = batch_of(lambda points: 1 / points, torch.ones(1, 2))
    assert batch.ask(torch.zeros(1, 1, 1, 2), torch.tensor([0])).isnan().all()


def test_a_box_may_write_into_its_points():
    points = torch.ones(1, 1, 1, 2)
    batch_of(lambda points: points.mul_(2), torch.ones(1, 2)).ask(points, torch.tensor([0]))
    assert points.eq(1).all()


def test_a_box_with_a_memory_is_asked_about_all_rows():
    """Those that are of no interest are as they are in the batch."""
    seen = []

    def fn(points):
        seen.append(points)
        return points

    x = torch.tensor([[1.0], [2.0], [3.0]])
    batch = batch_of(fn, x, whole=True)
    answer = batch.ask(torch.tensor([[[[7.0]]], [[[8.0]]]]), torch.tensor([2, 0]))
    assert answer.flatten().tolist() == [7, 8]
    assert [points.flatten().tolist() for points in seen[1:]] == [[8, 2, 7]]
    assert batch.evaluations == 3
    assert batch.choose_rows(2, random()).tolist() == [0, 1, 2]


def test_rows_are_different_ones_as_far_as_there_are():
    batch = batch_of(torch.sin, torch.zeros(5, 1))
    assert len(set(batch.choose_rows(4, random()).tolist())) == 4
    rows = batch.choose_rows(12, random()).tolist()
    assert rows[:5] == rows[5:10]
    assert sorted(rows[:5]) == [0, 1, 2, 3, 4]
    assert len(rows) == 12


# ---- moving inputs one by one


def linear(points):
    """y₀ = 10 x₀, y₁ = 10 x₀ + x₁, y₂ = 0."""
    return torch.stack((10 * points[..., 0], 10 * points[..., 0] + points[..., 1], 0 * points[..., 0]), -1)


@pytest.mark.parametrize("max_points", [1, 4, 100])
@pytest.mark.parametrize("paired", [False, True])
def test_changes_are_in_standard_deviations_of_a_difference(paired, max_points):
    x = torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 1.0]])
    batch, noise = batch_of(linear, x, max_points=max_points), torch.tensor([[1.0, 2.0, 0.0], [4.0, 1.0, 0.0]])
    found = responses(batch, torch.tensor([2, 1]), torch.tensor([[3.0, 2.0], [5.0, 14.0]]), noise, paired)
    expected = torch.tensor([[10 / 1, 0], [40 / 1, 13 / 1], [0, 0]]) / math.sqrt(2)
    assert torch.allclose(found.largest, expected)
    assert found.where.tolist() == [[0, 0], [1, 1], [0, 0]]  # among equals the first: 10 / 1 and 40 / 4
    assert found.certain.tolist() == [[2, 0], [1, 1], [0, 0]]  # more than 6: 5 / √2 is less
    assert found.answered.tolist() == [[2, 2]] * 3
    assert found.rows.tolist() == [2, 1]
    assert batch.evaluations == 2 * 2 * (2 if paired else 1)


@pytest.mark.parametrize(("size", "certain"), [(5.9, 0), (6.1, 1)])
def test_six_standard_deviations_are_certain(size, certain):
    batch = batch_of(torch.clone, torch.zeros(1, 1))
    found = responses(batch, torch.tensor([0]), torch.tensor([[size * math.sqrt(2)]]), torch.ones(1, 1), False)
    assert found.certain.tolist() == [[certain]]


@pytest.mark.parametrize("paired", [False, True])
def test_comparisons_that_fail_are_no_answers(paired):
    """One answer is missing where the first input is moved to 3, and one at the second row itself."""

    def fn(points):
        y = linear(points)
        y[..., 0] = torch.where(points[..., 0] == 3, math.nan, y[..., 0])
        y[..., 2] = torch.where(points[..., 1] == 9, math.inf, y[..., 2])
        return y

    batch = batch_of(fn, torch.tensor([[1.0, 1.0], [1.0, 9.0]]))
    targets = torch.tensor([[3.0, 2.0], [2.0, 2.0]])
    found = responses(batch, torch.tensor([0, 1]), targets, torch.ones(2, 3), paired)
    assert found.answered.tolist() == [[1, 2], [2, 2], [1, 1]]
    assert found.largest[0].tolist() == pytest.approx([10 / math.sqrt(2), 0])
    assert found.largest[2].tolist() == [0, 0]


def test_the_noise_of_a_row_is_at_least_that_of_most_and_rounding():
    """Answers that jump by 0.2 and by 0.4 have noise of 0.2 / √2 and 0.4 / √2; together 0.316 / √2."""
    x = torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]])

    def fn(points):
        if points.ndim == 2:
            return points.clone()
        jumps = torch.arange(points.shape[1])[:, None, None] % 2 * torch.tensor([0.2, 0.0])
        return points + jumps * points[..., :1]

    noise, deterministic = measure_noise(batch_of(fn, x), torch.tensor([1, 2]))
    pooled = math.sqrt((0.2**2 + 0.4**2) / 2)
    assert noise[:, 0].tolist() == pytest.approx([pooled / math.sqrt(2), 0.4 / math.sqrt(2)])
    assert noise[:, 1].tolist() == pytest.approx([8e-7, 16e-7])  # eight units of 1e-7, of at least the median of 1
    assert not deterministic


@pytest.mark.parametrize(("units", "deterministic"), [(31, True), (33, False)])
def test_answers_that_differ_from_the_first_by_rounding_only(units, deterministic):
    """By four times eight units of 1e-7."""
    x = torch.ones(1, 1).double()
    batch = batch_of(lambda points: points * (1 + units * 1e-7 * (points.ndim > 2)), x)
    assert measure_noise(batch, torch.tensor([0]))[1] is deterministic


# ---- the search


def test_what_a_search_costs():
    """A deterministic box: eight rows sixteen times, and once for every input."""
    x = torch.randn(20, 2, generator=random())
    batch = batch_of(linear, x)
    found = find_dependencies(batch, random())
    assert found.depends.tolist() == [[True, False], [True, True], [False, False]]
    assert (found.unseen, found.answered) == (0, 1)
    assert batch.evaluations == 8 * (16 + 2)
    assert found.noise.tolist() == pytest.approx((8e-7 * batch.y.abs()).square().mean(0).sqrt().tolist(), rel=1)


@pytest.mark.parametrize(("shown", "rounds"), [(0, 1), (2, 2)])
def test_dependencies_that_showed_once_ask_for_another_round(shown, rounds):
    """Two that showed at a single row say that others are unseen; in the second round they have shown twice."""
    x = torch.arange(8).float()[:, None].expand(8, 3).clone()

    def fn(points):  # of each input, but only where the last is that of the first row
        y = points.clone()
        y[..., :shown] *= points[..., -1:] == 0
        return torch.nn.functional.pad(y, (0, 400))  # and many that never change, which do not count

    batch = batch_of(fn, x)
    found = find_dependencies(batch, random())
    assert batch.evaluations == rounds * 8 * (16 + 3)
    assert found.depends[:shown, :shown].diagonal().all()


def test_there_are_four_rounds_at_most():
    """Every output reacts at one row only, so that every round shows new dependencies."""
    x = torch.stack((torch.ones(64), torch.arange(64.0)), 1)
    batch = batch_of(lambda points: points[..., :1] * (points[..., 1:] == torch.arange(64.0)), x)
    assert find_dependencies(batch, random()).unseen > 0.001
    assert batch.evaluations == 4 * 8 * (16 + 2)


@pytest.mark.parametrize(("rows", "again"), [(1, 16), (2, 0), (3, 0)])
def test_dependencies_of_a_noisy_box_that_were_certain_at_two_rows_are_not_tested_again(rows, again):
    """Eight rows, of which some have a gate that is open, which no input moves. Answers jump by a thousandth."""
    x = torch.zeros(8, 2)
    x[:rows, 0] = 1
    x[:, 1] = torch.linspace(5, 6, 8)
    answers = [0]

    def fn(points):
        answers[0] += 1
        steps = torch.arange(points[..., 0].numel()).view(points.shape[:-1]) + answers[0]
        return (steps % 2 * 1e-3 + gates(points) * points[..., 1])[..., None]

    def gates(points):
        if points.ndim == 2:
            return points[:, 0]
        return x[batch_rows[-1], 0].view(-1, 1, 1).expand(points.shape[:-1])

    batch_rows = []
    batch = batch_of(fn, x)
    evaluate = batch.evaluate

    def remember(points, which):
        batch_rows.append(which)
        return evaluate(points, which)

    batch.evaluate = remember
    found = find_dependencies(batch, random())
    assert found.depends.tolist() == [[False, True]]
    assert batch.evaluations == 8 * (16 + 2 * 2) + again


@pytest.mark.parametrize(("failing", "answered"), [(0, 1), (2, 0.5)])
def test_what_never_answers_is_taken_to_depend(failing, answered):
    def fn(points):
        y = points.repeat_interleave(2, -1)
        y[..., :failing] = math.nan
        return y

    found = find_dependencies(batch_of(fn, torch.randn(20, 2, generator=random())), random())
    expected = torch.eye(2).repeat_interleave(2, 0).bool()
    expected[:failing] = True
    assert torch.equal(found.depends, expected)
    assert found.answered == answered


def responses_at(rows, largest, where, certain):
    r, (d_out, d) = len(rows), torch.tensor(largest).shape
    return Responses(
        torch.tensor(rows),
        torch.zeros(r, d),
        torch.ones(r, d_out),
        torch.tensor(largest),
        torch.tensor(where),
        torch.tensor(certain),
        torch.ones(d_out, d),
    )


def test_rounds_are_joined():
    first = responses_at([5, 3], [[1.0, 9.0, 2.0]], [[0, 1, 1]], [[0, 1, 2]])
    second = responses_at([4, 7, 0], [[2.0, 3.0, 2.0]], [[2, 0, 0]], [[1, 0, 1]])
    both = first.joined(second)
    assert both.rows.tolist() == [5, 3, 4, 7, 0]
    assert both.largest.tolist() == [[2, 9, 2]]
    assert both.where.tolist() == [[4, 1, 1]]  # among equals the first
    assert both.certain.tolist() == [[1, 1, 3]]
    assert both.answered.tolist() == [[2, 2, 2]]
    assert len(both.targets) == len(both.noise) == 5


@pytest.mark.parametrize(("certain", "unseen"), [([[1, 1, 1, 2, 5]], 1.5), ([[1, 1, 1]], 3), ([[1, 2, 3]], 0)])
def test_the_estimate_of_unseen_dependencies(certain, unseen):
    zeros = torch.zeros(1, len(certain[0]))
    assert responses_at([0], zeros.tolist(), zeros.long().tolist(), certain).unseen() == unseen


def test_a_mean_change_in_its_standard_deviations():
    """y = x₀ with changes of 3 and 5 in turn: mean 4, noise of the changes 1.07, of the outputs 0.76."""
    x = torch.zeros(1, 1)
    alternating = torch.tensor([3.0, 5.0]).repeat(4)[None, :, None]  # [1, 8, 1]
    batch = batch_of(lambda points: points * alternating[..., None] if points.ndim == 4 else points, x)
    change, noise = mean_change(batch, torch.tensor([0]), torch.ones(1, 1, 1), torch.full((1, 1), 0.1), 8)
    assert noise.item() == pytest.approx(math.sqrt(8 / 7) / math.sqrt(2))
    assert change.item() == pytest.approx(4 * math.sqrt(8) / math.sqrt(8 / 7))
    change, noise = mean_change(batch, torch.tensor([0]), torch.ones(1, 1, 1), torch.full((1, 1), 2.0), 8)
    assert noise.item() == 2  # which was known to be larger
    assert change.item() == pytest.approx(4 * math.sqrt(8) / (math.sqrt(2) * 2))


def test_a_doubtful_dependency_is_confirmed_where_it_showed():
    """y₀ = x₀ at the row 1 only; the other doubt is none."""
    x = torch.tensor([[0.0, 0.0], [0.0, 1.0]])

    def fn(points):
        return points[..., :1] * points[..., 1:]

    seen = responses_at([0, 1], [[9.0, 9.0]], [[1, 0]], [[1, 1]])
    seen = seen._replace(targets=torch.ones(2, 2), noise=torch.full((2, 1), 0.1))
    for whole in (False, True):
        assert confirmed(batch_of(fn, x, whole=whole), seen, torch.tensor([[True, True]])).tolist() == [[True, False]]


@pytest.mark.parametrize(("change", "doubts", "believed"), [(1.28, 1, 0), (1.3, 1, 1), (1.4, 2, 0), (1.41, 2, 2)])
def test_from_when_on_a_change_is_confirmed(change, doubts, believed):
    """Over eight pairs 1.3 is twice as many standard deviations; one in a hundred is beyond 2.58, of either sign.

    With two doubts each of them may be half as likely, beyond 2.81.
    """
    x = torch.zeros(1, 2)
    seen = responses_at([0], [[9.0, 9.0]], [[0, 0]], [[1, 1]])._replace(targets=torch.full((1, 2), change))
    found = confirmed(
        batch_of(lambda points: points.sum(-1, keepdim=True), x), seen, torch.tensor([[True, doubts > 1]])
    )
    assert int(found.sum()) == believed


def test_inputs_move_by_fractions_of_the_way_to_their_farthest_value():
    x = torch.tensor([[0.1, 3.0], [0.7, -1.0], [0.3, 0.0]])
    targets = batch_of(torch.sin, x).targets(torch.tensor([0, 1, 2, 0]), torch.tensor([0, 1, 2, 3]))
    expected = torch.tensor([[0.7, -1.0], [0.4, 1.0], [0.4, 0.75], [0.1 + 0.6 / 64, 3 - 4 / 64]])
    assert torch.allclose(targets, expected)


def test_inputs_that_hardly_vary_move_within_the_limits():
    """By steps of (3 · 0.009)^(1/3) = 0.3 times their size, to the side with more room."""
    x = torch.ones(3, 4)
    low, high = torch.tensor([0.0, 0.5, 0.8, 0.95]), torch.tensor([2.0, 1.2, 1.1, 2.0])
    expected = torch.tensor([1.3, 0.7, 0.8, 1.3]).expand(2, 4)
    assert torch.allclose(batch_of(torch.sin, x, 0.009, low, high).farthest(torch.tensor([0, 2])), expected)
    narrow = batch_of(torch.sin, x, 0.009, low.clamp(min=0.95), high.clamp(max=1.1))
    assert torch.allclose(narrow.farthest(torch.tensor([0])), torch.tensor([1.1, 1.1, 1.1, 1.1]))
