"""The box near the rows of a batch: what requests say of their rows, and how many points exist at a time."""

import pytest
import torch

from bondgrad import BlackBox, evaluators
from bondgrad.policies import Fixed
from bondgrad.step._neighbourhood import Neighbourhood
from tests.helpers import gradient


class Recording(evaluators.Evaluator):
    """Evaluates here, and keeps the requests."""

    def __init__(self, memory=None):
        self.memory, self.requests = memory, []

    def evaluate(self, request):
        self.requests.append(request)
        return evaluators.Answer(request.function(request.points, *request.context, seed=request.seed))


@pytest.mark.parametrize(
    ("estimator", "pairs"), [("central", True), ("simultaneous", True), ("forward", False)], ids=lambda v: str(v)
)
def test_rows_are_pairs_where_a_move_has_two_ends(estimator, pairs):
    evaluator = Recording()
    layer = BlackBox(torch.sin, 3, estimator=estimator, policy=Fixed(0.01), evaluator=evaluator)
    x = torch.randn(4, 3)
    gradient(layer, x, torch.ones(4, 3))
    base, moved = evaluator.requests
    assert (base.purpose, base.pairs, moved.purpose, moved.pairs) == ("base", False, "gradient", pairs)
    if pairs:
        rows = x.repeat_interleave(len(moved.points) // len(x) // 2, 0)
        assert torch.allclose((moved.points[0::2] + moved.points[1::2]) / 2, rows, atol=1e-6)


@pytest.mark.parametrize("max_rows", [None, 1, 2, 5, 8])
def test_ends_of_a_move_have_one_seed_and_one_place(max_rows):
    def fn(x: torch.Tensor, seed: int) -> torch.Tensor:
        return x + torch.rand(x.shape, generator=torch.Generator().manual_seed(seed))

    layer = BlackBox(fn, 3, policy=Fixed(0.01), evaluator=evaluators.Local(max_rows=max_rows))
    assert torch.allclose(gradient(layer, torch.randn(4, 3), torch.ones(4, 3)), torch.ones(4, 3), atol=1e-3)
    assert layer.stats.evaluations == 4 * 7


@pytest.mark.parametrize("ends", [1, 2, 3])
def test_all_ends_of_a_move_have_the_same_noise(ends):
    def fn(x: torch.Tensor, seed: int) -> torch.Tensor:
        return x + torch.rand(x.shape, generator=torch.Generator().manual_seed(seed))

    layer, x = BlackBox(fn, 3), torch.zeros(4, 3)
    site = Neighbourhood(layer.parts(), x, layer(x))
    y, ok = site.ask(torch.zeros(4, 5, ends, 3), slice(0, 4), "structure")
    assert ok is None
    assert torch.equal(y, y[:, :, :1].expand(-1, -1, ends, -1))
    assert len(y[:, :, 0].flatten().unique()) == 4 * 5 * 3


def test_points_of_a_request_fit_into_the_memory_that_it_may_take():
    """Four rows of three inputs and two outputs: a point takes 20 bytes with its answer."""
    layer = BlackBox(lambda x: x[:, :2], 3, policy=Fixed(0.01), evaluator=evaluators.Local(memory=120))
    x = torch.randn(4, 3)
    layer(x)
    site = Neighbourhood(layer.parts(), x, layer(x))
    asked = []
    layer.function.fn = lambda points: (asked.append(len(points)), points[:, :2])[1]
    site.slopes(torch.ones(4, 2), torch.full((1, 4, 3), 0.01))
    assert asked == [6] * 4  # which are those of one row
