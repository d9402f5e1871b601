"""Another box in the place of one that a layer was made for, other limits, and another evaluator."""

import numpy as np
import pytest
import torch

from bondgrad import BlackBox, BoxError, EvaluationLimitError
from bondgrad.evaluators import Local
from bondgrad.policies import Fixed
from bondgrad.structure import Blocks, Dense
from tests.evaluators.test_own_evaluators import Recording
from tests.helpers import gradient


class Halves:
    """Two blocks, and says so."""

    structure = Blocks(2, 2)

    def __call__(self, x):
        return torch.cat((x[:, :2].cumsum(1), x[:, 2:].cumsum(1)), 1)


def evaluations(layer):
    before = layer.stats.evaluations
    gradient(layer, torch.randn(1, 4), torch.ones(1, 4))
    return layer.stats.evaluations - before


def test_a_box_brings_its_own_structure_unless_one_was_given():
    layer = BlackBox(Halves(), 4, policy=Fixed(0.1))
    assert evaluations(layer) == 1 + 2 * 2
    layer.fn = lambda x: x.cumsum(1)
    assert isinstance(layer.structure, Dense)
    assert evaluations(layer) == 1 + 2 * 4
    given = BlackBox(Halves(), 4, policy=Fixed(0.1), structure="dense")
    assert evaluations(given) == 1 + 2 * 4
    given.fn = Halves()
    assert isinstance(given.structure, Dense)
    assert evaluations(given) == 1 + 2 * 4


def test_a_structure_that_is_found_out_is_found_out_anew():
    layer = BlackBox(Halves(), 4, policy=Fixed(0.1), structure="auto", seed=0)
    gradient(layer, torch.randn(64, 4), torch.ones(64, 4))
    found = layer.structure
    layer.fn = lambda x: x.cumsum(1)
    assert layer.structure != found
    with pytest.raises(ValueError, match="needs a BlackBox of its own"):
        BlackBox(torch.sin, 4).fn = Automatic()


class Automatic:
    structure = "auto"

    def __call__(self, x):
        return x


def test_another_box_begins_with_the_state_that_was_given_in_both_modes():
    def count(x, state):
        return x + state, state + 1

    layer = BlackBox(count, 2, state=torch.zeros(1, 1))
    x = torch.zeros(3, 2)
    for mode in (True, False):
        layer.train(mode)
        layer(x)
        assert layer(x).unique().tolist() == [1]
    layer.fn = lambda x, state: count(x, state)
    assert layer(x).unique().tolist() == [0]
    layer.train()
    assert layer(x).unique().tolist() == [0]


def test_modes_have_states_of_their_own():
    layer = BlackBox(lambda x, state: (x + state, state + 1), 2, state=torch.zeros(1, 1))
    x = torch.zeros(3, 2)
    layer(x)
    layer.train()  # it is in that mode
    assert layer(x).unique().tolist() == [1]
    layer.eval()
    assert layer(x).unique().tolist() == [0]
    layer.eval()
    assert layer(x).unique().tolist() == [1]
    layer.train()
    assert layer(x).unique().tolist() == [2]
    layer.eval()
    assert layer(x).unique().tolist() == [0]


def test_requests_are_numbered_from_zero_and_on_with_another_evaluator():
    first, second = Recording(), Recording()
    layer = BlackBox(torch.sin, 2, policy=Fixed(0.1), evaluator=first)
    gradient(layer, torch.randn(3, 2), torch.ones(3, 2))
    layer.evaluator = second
    gradient(layer, torch.randn(3, 2), torch.ones(3, 2))
    assert [[request.number for request in evaluator.requests] for evaluator in (first, second)] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_box_is_given_single_precision_at_least(dtype):
    seen = []

    def fn(x):
        seen.append(x.dtype)
        return x

    y = BlackBox(fn, 2)(torch.zeros(3, 2, dtype=dtype))
    assert seen == [torch.float64 if dtype is torch.float64 else torch.float32]
    assert y.dtype is dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_box_keeps_its_precision_where_the_model_goes_to_half(dtype):
    box = torch.nn.Linear(2, 2, dtype=dtype)
    layer = BlackBox(box, 2).half()
    assert box.weight.dtype is dtype
    assert layer.double().fn.weight.dtype is torch.float64
    assert BlackBox(torch.nn.Linear(2, 2).half(), 2).bfloat16().fn.weight.dtype is torch.bfloat16


# ---- limits and resolution


def test_limits_and_resolution_are_assigned_as_in_the_constructor():
    seen = []

    def fn(x):
        seen.append(x.detach().clone())
        return torch.sin(x)

    layer, x = BlackBox(fn, 3, 3), torch.randn(16, 3)
    gradient(layer, x, torch.ones(16, 3))
    assert layer.limits is None
    assert layer.resolution is None
    assert layer.policy_state.schedule.trials == 1

    layer.limits = (-0.5, 0.5)  # a pair, as in the constructor
    assert layer.limits == (-0.5, 0.5)
    assert layer.policy_state.schedule.trials == 0  # steps are measured again
    seen.clear()
    gradient(layer, x, torch.ones(16, 3))
    assert torch.cat(seen).abs().max() <= 0.5

    layer.resolution = 0.125
    assert layer.resolution == 0.125
    seen.clear()
    gradient(layer, x, torch.ones(16, 3))
    points = torch.cat(seen)
    assert points.abs().max() <= 0.5
    assert torch.equal(points * 8, (points * 8).round())

    layer.limits = None
    seen.clear()
    gradient(layer, x, torch.ones(16, 3))
    points = torch.cat(seen)
    assert points.abs().max() > 0.5
    assert torch.equal(points * 8, (points * 8).round())

    layer.resolution = None
    assert layer.limits is None
    seen.clear()
    gradient(layer, x, torch.ones(16, 3))
    assert torch.equal(seen[0], x)


def test_a_range_that_is_refused_leaves_the_layer_as_it_was():
    layer = BlackBox(torch.sin, 3, 3, limits=(-1, 1), resolution=0.5)
    with pytest.raises(ValueError, match="limits must have low < high"):
        layer.limits = (1, -1)
    with pytest.raises(ValueError, match="resolution must be a number > 0"):
        layer.resolution = 0
    assert layer.limits == (-1, 1)
    assert layer.resolution == 0.5


def test_resolutions_that_no_layer_can_have():
    with pytest.raises(ValueError, match="resolution must be"):
        BlackBox(torch.sin, 3, resolution=0)
    with pytest.raises(ValueError, match="two values within limits"):
        BlackBox(torch.sin, 3, resolution=5, limits=(-1, 1))


@pytest.mark.parametrize("part", ["limits", "resolution"])
@pytest.mark.parametrize("how", ["backward", "func"])
def test_a_range_that_is_assigned_after_the_forward_pass_refuses_its_gradient(part, how):
    layer = BlackBox(lambda x: torch.sin(3 * x), 2, 2, estimator="forward", policy=Fixed(1e-2), limits=(-2, 2))
    x = torch.tensor([[1.5, 0.3]])
    vjp = torch.func.vjp(layer, x)[1] if how == "func" else None
    y = layer(x.requires_grad_())
    setattr(layer, part, (-1, 1) if part == "limits" else 0.5)
    with pytest.raises(BoxError, match="limits or resolution were assigned after the forward pass"):
        y.sum().backward() if vjp is None else vjp(torch.ones(1, 2))
    setattr(layer, part, (-2, 2) if part == "limits" else None)
    assert torch.allclose(gradient(layer, x, torch.ones(1, 2)), 3 * (3 * x).cos(), atol=0.1)


@pytest.mark.parametrize("how", ["backward", "func"])
@pytest.mark.parametrize("low", [-2, [-2.0, -2.0], torch.tensor([-2.0, -2.0])], ids=str)
@pytest.mark.parametrize("resolution", [None, 0.25])
def test_equal_limits_that_are_assigned_after_the_forward_pass_change_nothing(how, low, resolution):
    options = {"limits": (-2, 2), "resolution": resolution, "seed": 0}
    layers = [BlackBox(lambda x: torch.sin(3 * x), 2, 2, **options) for _ in range(2)]
    x, found = torch.randn(8, 2), []
    for layer, limits in zip(layers, (None, (low, np.array(2.0))), strict=True):
        gradient(layer, x, torch.ones(8, 2))
        given = x.clone().requires_grad_()
        vjp = torch.func.vjp(layer, given)[1] if how == "func" else None
        y, version = layer(given), layer.version
        if limits is not None:
            layer.limits = limits
            layer.resolution = None if resolution is None else torch.tensor([0.25, 0.25])
            assert layer.limits is limits  # as it was given
            assert layer.version == version
        found.append(torch.autograd.grad(y.sum(), given)[0] if vjp is None else vjp(torch.ones(8, 2))[0])
        assert layer.policy_state.schedule.trials == 1  # steps are not measured again
    assert torch.equal(*found)


def test_another_evaluator_goes_on_counting_but_for_its_workers():
    calls = []

    def fn(x: torch.Tensor):
        calls.append(len(x))
        if len(calls) == 1:
            raise RuntimeError("once")
        return torch.sin(x)

    layer = BlackBox(fn, 2)
    with pytest.warns(UserWarning, match="once"):
        layer(torch.zeros(4, 2))
    before = layer.stats
    layer.evaluator = Local(max_evaluations=sum(calls) + 4)
    for name in ("evaluations", "calls", "errors", "tracebacks", "retried"):
        assert getattr(layer.stats, name) == getattr(before, name)
    assert before.errors == {"RuntimeError": 4}
    layer(torch.zeros(4, 2))
    assert [worker.rows for worker in layer.stats.workers] == [4]
    with pytest.raises(EvaluationLimitError):
        layer(torch.zeros(1, 2))
