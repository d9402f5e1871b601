"""Values that are not finite cost accuracy, never the run."""

import contextlib
import copy
import math
import random
import warnings

import pytest
import torch
from torch import nn

from bondgrad import BlackBox, BoxError, Forward, Simultaneous
from bondgrad.evaluators import Local
from bondgrad.policies import Bond, Fixed, Gaussian
from bondgrad.structure import Sequence
from tests.helpers import gradient, root, same_state


@pytest.mark.parametrize("estimator", ["central", Forward(), Simultaneous(64)])
def test_a_failed_evaluation_costs_its_own_entry_only(estimator):
    layer = BlackBox(root, 2, estimator=estimator, policy=Fixed(0.01), seed=0)
    x = torch.tensor([[1.0, 2.0], [0.005, 3.0], [-1.0, 1.0], [math.nan, 1.0], [4.0, 5.0]])
    gy = torch.ones(5, 2)
    with pytest.warns(UserWarning, match="rows? got no finite output"):
        g = gradient(layer, x, gy)
    assert torch.isfinite(g).all()
    assert layer.stats.failures > 0
    exact = 0.5 / x.sqrt()
    tolerance = 0.5 if isinstance(estimator, Simultaneous) else 0.01
    assert torch.allclose(g[[0, 4]], exact[[0, 4]], rtol=tolerance)
    if not isinstance(estimator, Simultaneous):
        assert torch.isclose(g[1, 1], exact[1, 1], rtol=tolerance)  # beside a failed entry, in the same row
        assert not g[2:4].any()  # one output of which had a substitute, and no evaluation of the other was finite
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradient(layer, x, gy)  # said once


def test_where_one_side_fails_the_other_is_used():
    layer = BlackBox(root, 1, policy=Fixed(0.01))
    with pytest.warns(UserWarning, match="no finite output"):
        g = gradient(layer, torch.tensor([[0.005]]), torch.ones(1, 1))
    one_sided = (math.sqrt(0.015) - math.sqrt(0.005)) / 0.01
    assert math.isclose(float(g), one_sided, rel_tol=1e-3)
    assert layer.stats.failures == 1


def test_a_direction_that_fails_costs_nothing_but_itself():
    def fn(x):
        y = torch.sin(x)
        y[:1] = math.nan if len(x) > 4 else y[:1]  # one point of the first row
        return y

    x, gy = torch.randn(4, 3), torch.ones(4, 3)
    evaluator = Local(retries=0, memory=2**30)  # all points at once
    layer = BlackBox(fn, 3, estimator=Simultaneous(2000), policy=Fixed(1e-2), evaluator=evaluator, seed=0)
    with pytest.warns(UserWarning, match="no finite output"):
        g = gradient(layer, x, gy)
    assert torch.allclose(g, x.cos(), atol=0.15)
    assert layer.stats.failures == 1


class SilentNear:
    """Raises where a row is near one of these values, and not there; keeps the rows of all calls."""

    def __init__(self, *values):
        self.values, self.calls = values, []

    def __call__(self, x: torch.Tensor):
        self.calls.append(len(x))
        for value in self.values:
            if bool((((x - value).abs().amax(1) < 0.1) & (x != value).any(1)).any()):
                raise RuntimeError("nothing answers near here")
        return x.sin().sum(1, keepdim=True)


NEAR = {"policy": Fixed(1e-2), "out_features": 1, "evaluator": Local(memory=60, retries=1)}  # of a few moves


@pytest.mark.parametrize("estimator", ["central", "forward", Simultaneous(32)])
def test_a_row_near_which_nothing_answers_costs_its_own_gradient_whatever_the_size_of_requests(estimator):
    layer = BlackBox(SilentNear(0.5), 4, estimator=estimator, seed=0, **NEAR)
    x = torch.tensor([0.0, 0.5, 1.0])[:, None].expand(3, 4).clone()
    told = "got no output, since the box .* nothing answers near here"
    with pytest.warns(UserWarning, match=told), pytest.warns(UserWarning, match="got no finite output"):
        g = gradient(layer, x, torch.ones(3, 1))
    assert g[1].tolist() == [0] * 4
    assert bool((g[[0, 2]] != 0).all())


def test_a_box_that_answers_near_no_row_is_given_up_when_all_rows_of_the_gradient_were_asked_alone():
    fn = SilentNear(0.0, 0.5, 1.0)
    layer = BlackBox(fn, 4, **NEAR)
    x = torch.tensor([0.0, 0.5, 1.0])[:, None].expand(3, 4).clone()
    with pytest.raises(BoxError, match="nothing answers near here"):
        gradient(layer, x, torch.ones(3, 1))
    assert fn.calls[0] == 3
    assert fn.calls.count(1) >= 3 * 8


def test_on_failure_raise():
    layer = BlackBox(root, 1, policy=Fixed(0.01), on_failure="raise", seed=0)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(BoxError, match=r"1 row got no finite output\. Give limits="):
        gradient(layer, torch.tensor([[0.005]]), torch.ones(1, 1))
    assert same_state(layer.state_dict(), before, but=["progress"])
    assert layer.progress.steps == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_handed_on_but_not_remembered(value):
    layer = BlackBox(torch.sin, 2, seed=0)
    x = torch.randn(4, 2)
    gradient(layer, x, torch.ones(4, 2))
    sums = layer.policy_state.sums.clone()
    gy = torch.ones(4, 2)
    gy[1, 0] = value
    g = gradient(layer, x, gy)
    assert not torch.isfinite(g[1]).any()  # so that a loss scaler sees it
    assert torch.isfinite(g[[0, 2, 3]]).all()
    assert torch.equal(layer.policy_state.sums, sums)


@pytest.mark.parametrize("policy", [Bond(), Bond(max_step=math.inf), Bond("error-terms"), Gaussian(0.1)])
def test_a_function_that_ignores_its_input_never_harms_the_state(policy):
    layer = BlackBox(torch.zeros_like, 3, policy=policy)
    for _ in range(5):
        g = gradient(layer, torch.randn(4, 3), torch.ones(4, 3))
        assert torch.equal(g, torch.zeros(4, 3))
    assert all(torch.isfinite(b).all() for b in layer.buffers())


def test_an_input_that_wakes_late_is_found():
    asleep = True
    layer = BlackBox(lambda x: x * torch.tensor([1.0, 0.0 if asleep else 1.0]), 2, seed=0)
    for _ in range(20):
        gradient(layer, torch.randn(16, 2), torch.ones(16, 2))
    asleep = False
    for _ in range(3):
        g = gradient(layer, torch.randn(16, 2), torch.ones(16, 2))
    assert torch.allclose(g, torch.ones(16, 2), rtol=0.05)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_one_bad_row_does_not_spoil_the_steps_of_the_others(value):
    layer = BlackBox(torch.sin, 2, seed=0)
    x, gy = torch.randn(64, 2), torch.full((64, 2), 1e-9)  # so small that the lower bound is enormous
    for _ in range(3):
        gradient(layer, x, gy)
    x[0] = value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        g = gradient(layer, x, gy)
    assert (g[1:].sign() == x[1:].cos().sign()).float().mean() > 0.98


def test_sums_of_large_gradients_do_not_overflow():
    layer = BlackBox(lambda x: x, 2, seed=0)
    for size in (1.8e19, 9e16):
        for _ in range(50):
            gradient(layer, torch.randn(4, 2), torch.full((4, 2), size))
        assert torch.isfinite(layer.policy_state.sums).all()


@pytest.mark.parametrize("max_step", [math.inf, 1e-3])
def test_gradients_that_cancel_do_not_end_the_training(max_step):
    layer = BlackBox(lambda x: x, 1, policy=Bond(reduce="mean", max_step=max_step), seed=0)
    for gy in (1.0, -0.9, 1.0, 1.0, 1.0):
        g = gradient(layer, torch.zeros(1, 1), torch.full((1, 1), gy))
        assert math.isclose(g, gy, rel_tol=0.05)


def test_inputs_that_are_all_zero_get_a_gradient():
    layer = BlackBox(lambda x: 3 * x, 2, seed=0)
    for _ in range(3):
        g = gradient(layer, torch.zeros(8, 2), torch.ones(8, 2))
    assert torch.allclose(g, torch.full((8, 2), 3.0), rtol=1e-2)


def test_training_survives_a_box_that_fails_at_random(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between retries
    torch.manual_seed(0)
    flaky = torch.Generator().manual_seed(1)

    def fn(x):
        y = torch.sin(x)
        y[torch.rand(len(x), generator=flaky) < 0.05] = math.nan
        return y

    layer = BlackBox(fn, 3, seed=0)
    read_in = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(read_in.parameters(), 1e-2)
    data, target = torch.randn(64, 4), torch.rand(64, 3)
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(200):
            optimizer.zero_grad()
            loss = (layer(read_in(data)) - target).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    assert losses[-1] < 0.6 * losses[0]
    assert layer.stats.failures > 0


@pytest.mark.parametrize(("above", "said"), [(0.05, True), (1.55, False)])  # two thirds of all rows fail, or a few
def test_a_box_that_most_rows_leave_is_warned_of_again(above, said):
    layer = BlackBox(lambda x: x.masked_fill(x > above, math.nan), 1, policy=Fixed(0.01), evaluator=Local(retries=0))
    x = torch.linspace(-1, 2, 31)[:, None]
    told = "of the rows of the last 20 forward passes"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(19):
            gradient(layer, x, torch.ones(31, 1))
        assert not [w for w in caught if told in str(w.message)]
        for _ in range(30):
            gradient(layer, x, torch.ones(31, 1))
    again = [str(w.message) for w in caught if told in str(w.message)]
    assert len(again) == said
    assert all(message.startswith("65% of the rows") and "Give limits=" in message for message in again)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(30):
            layer.eval()(x)  # what happens in evaluation is no training that goes wrong


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("estimator", ["central", Forward(), Simultaneous(4)])
@pytest.mark.parametrize("structure", [Sequence(2), Sequence("auto")])
def test_sequences_through_a_box_whose_calls_fail(estimator, structure):
    draws = random.Random(0)

    def flaky(x):  # [N, T, 3] -> [N, T, 3]
        if draws.random() < 0.2:
            raise OSError("the line is dead")
        y = torch.sin(x) + 0.5 * nn.functional.pad(x[:, :-1], (0, 0, 1, 0))
        return y.masked_fill(torch.tensor([draws.random() < 0.2 for _ in x])[:, None, None], math.nan)

    layer = BlackBox(flaky, 3, estimator=estimator, structure=structure, seed=0)
    for _ in range(15):
        x = torch.randn(4, 5, 3)
        with contextlib.suppress(BoxError):  # nothing was answered at all
            assert torch.isfinite(gradient(layer, x, torch.randn(4, 5, 3))).all()
    assert layer.stats.errors["OSError"] > 0


def test_an_attempt_without_any_output_leaves_what_came_before():
    calls = []

    def fn(x):  # [N, 5, 1] -> [N, 5, 1]
        calls.append(len(x))
        if len(calls) in (2, 3):
            raise OSError("the line is dead")
        return torch.sin(x).masked_fill((torch.arange(len(x)) == 1)[:, None, None] & (len(calls) == 1), math.nan)

    layer, x = BlackBox(fn, 1, structure=Sequence(2), evaluator=Local(retries=5)), torch.randn(4, 5, 1)
    with pytest.warns(UserWarning, match="asked again"):
        y = layer(x)
    assert torch.equal(y, torch.sin(x))
    assert bool(layer.last_ok.all())


class Counter:
    """Keeps a state to itself, and breaks when it is told to."""

    def __init__(self):
        self.count, self.broken = 0.0, ""

    def snapshot(self):
        return self.count

    def restore(self, count):
        self.count = count

    def __call__(self, x: torch.Tensor):
        self.count += 1
        return broken(self, torch.sin(x + self.count))


def broken(box, y):
    """The outputs y; an error, or a NaN in the last row, if the box is to break."""
    if box.broken == "raises":
        raise RuntimeError("out of order")
    return y.masked_fill(torch.arange(len(y))[:, None] == len(y) - 1, math.nan) if box.broken == "nan" else y


def breakable(kind):
    box = Counter()
    options = {"evaluator": Local(retries=0), "on_failure": "raise", "policy": "bond", "seed": 0}

    def with_state(x: torch.Tensor, state):
        return broken(box, torch.sin(x + state)), state + 1

    def with_seed(x: torch.Tensor, seed: int):
        return broken(box, torch.sin(x) + 1e-3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))

    if kind == "state":
        return box, BlackBox(with_state, 2, 2, state=torch.zeros(1, 2), **options)
    if kind == "snapshot":
        return box, BlackBox(box, 2, 2, **options)
    if kind == "seed":
        return box, BlackBox(with_seed, 2, 2, **options)
    return box, BlackBox(lambda x: broken(box, torch.sin(x)), 2, 2, eager=kind == "eager", **options)


@pytest.mark.parametrize("how", ["raises", "nan"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("kind", ["plain", "eager", "state", "snapshot", "seed"])
def test_a_pass_that_fails_leaves_the_layer_as_it_was(kind, where, how):
    (box, layer), (_, twin) = breakable(kind), breakable(kind)
    x = torch.randn(4, 2, requires_grad=True)
    for each in (layer, twin):
        gradient(each, x, torch.ones(4, 2))
    y = layer(x) if where == "backward" else None
    before = copy.deepcopy(layer.state_dict())
    if kind == "eager" and where == "backward":  # a second one, since all evaluations of the first are made already
        torch.autograd.grad(y, x, torch.ones(4, 2), retain_graph=True)
        before = copy.deepcopy(layer.state_dict())
    box.broken = how
    with pytest.raises(BoxError):
        if y is None:
            layer(x)
        else:
            y.sum().backward()
    assert same_state(layer.state_dict(), before, but=["requests"])
    box.broken = ""
    if y is None:
        assert torch.equal(gradient(layer, x, torch.ones(4, 2)), gradient(twin, x, torch.ones(4, 2)))
