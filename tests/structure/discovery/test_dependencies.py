"""The pieces of the search for dependencies, by hand-made numbers."""

import math

import pytest
import torch

from bondgrad.structure.discovery._dependencies import Responses, confirmed, mean_change
from bondgrad.structure.discovery._search_batch import SearchBatch
from bondgrad.structure.discovery._tracker import AutoHorizon
from bondgrad.structure.discovery._watch import missing_dependencies


def batch_of(fn, x, noise=1e-7, low=-math.inf, high=math.inf, **settings):
    low, high = (torch.as_tensor(limit).expand(x.shape[1]) for limit in (low, high))
    return SearchBatch(x, fn(x), lambda points, rows: fn(points), 10**6, noise, 1e-7, low, high, **settings)


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
    change, noise = mean_change(batch, torch.tensor([0]), torch.ones(1, 1), torch.full((1, 1), 0.1), 8)
    assert noise.item() == pytest.approx(math.sqrt(8 / 7) / math.sqrt(2))
    assert change.item() == pytest.approx(4 * math.sqrt(8) / math.sqrt(8 / 7))
    change, noise = mean_change(batch, torch.tensor([0]), torch.ones(1, 1), torch.full((1, 1), 2.0), 8)
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


@pytest.mark.parametrize(
    ("known", "time", "measured", "after"),
    [
        ((), 20, 0, ()),
        ((), 20, 5, (5, 5, 20)),
        ((), 20, 20, (None, 20, 20)),  # it did not forget
        ((5, 5, 20), 20, 0, (5, 5, 20)),
        ((5, 5, 20), 20, 6, (6, 6, 20)),
        ((5, 5, 20), 20, 20, (None, 20, 20)),
        ((5, 5, 20), 20, 3, (5, 3, 20)),  # once is not enough
        ((5, 3, 20), 20, 2, (3, 2, 20)),
        ((5, 4, 20), 20, 4, (5, 4, 20)),  # and a little shorter is not worth a change
        ((5, 5, 20), 4, 4, (5, 5, 20)),  # too short a sequence
        ((5, 5, 20), 10, 7, (7, 7, 20)),
        ((5, 5, 20), 30, 4, (4, 4, 30)),  # a longer one says more
        ((None, 20, 20), 20, 14, (None, 14, 20)),
        ((None, 14, 20), 20, 13, (14, 13, 20)),
    ],
)
def test_how_a_horizon_follows_what_is_measured(known, time, measured, after):
    def echo(points):  # of so many time steps
        x = points.unflatten(-1, (time, 2))[..., 0]
        late = torch.nn.functional.pad(x, (max(0, measured - 1), 0))[..., :time]
        return (x + late) * (measured > 0)

    names = ("horizon", "last", "time")
    before, expected = (dict(zip(names, values, strict=False)) for values in (known, after))
    batch = batch_of(echo, torch.ones(1, 2 * time), features=2)
    assert AutoHorizon().search(before, batch, torch.Generator()) == expected
