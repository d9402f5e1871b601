"""Evaluations of a gradient that begin in the forward pass, where rows fail: eager=True."""

import gc
import threading
import time
import warnings

import pytest
import torch

from bondgrad import BlackBox, BoxError, Simultaneous
from bondgrad.evaluators import Journal, Local, Threads
from bondgrad.policies import Fixed
from tests.helpers import gradient
from tests.step.test_ahead import EVALUATORS, row_by_row


def test_perturbed_rows_that_fail_and_rows_that_fail_themselves():
    def fn(x: torch.Tensor):
        return torch.sin(x).masked_fill((x > 1).any(1, keepdim=True), torch.nan)

    x = torch.tensor([[0.0, 0.5], [0.9999, 0.0], [2.0, 0.0], [0.3, 0.1]])
    found = []
    for eager in (False, True):
        layer = BlackBox(fn, 2, policy=Fixed(1e-3), eager=eager, seed=0, evaluator=Local(retries=0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found += [gradient(layer, x, torch.ones(4, 2)) for _ in range(2)][1:]
    assert torch.equal(*found)
    assert found[0][2].tolist() == [0, 0]
    assert layer.stats.wasted == 4  # those of the row that failed itself
    assert torch.allclose(found[0][[0, 1, 3]], x.cos()[[0, 1, 3]], atol=1e-3)


@pytest.mark.parametrize("kind", EVALUATORS)
@pytest.mark.parametrize("policy", ["calibrated", "bond", Fixed(1e-2)], ids=str)
@pytest.mark.filterwarnings("ignore:.*got no finite output")
def test_where_perturbed_rows_fail_nothing_is_asked_twice(kind, policy):
    def fn(x: torch.Tensor):
        return row_by_row(x).masked_fill(x[:, :1] > 0.5, torch.nan)

    x = torch.linspace(-0.3, 0.499999, 40).view(8, 5).flip(1)
    gradients, evaluations = [], []
    with EVALUATORS[kind]() as evaluator:
        for eager in (False, True):
            layer = BlackBox(fn, 5, 5, policy=policy, eager=eager, seed=0, evaluator=evaluator)
            gradients.append(torch.stack([gradient(layer, x, torch.ones(8, 5)) for _ in range(4)]))
            evaluations.append(layer.stats.evaluations)
            assert layer.stats.failures > 0
    assert torch.equal(*gradients)
    assert evaluations[0] == evaluations[1]
    assert layer.stats.wasted == 0


@pytest.mark.parametrize("kind", EVALUATORS)
@pytest.mark.parametrize("estimator", ["central", "forward", Simultaneous(4)], ids=str)
@pytest.mark.filterwarnings("ignore:.*got no finite output")
def test_what_was_made_for_other_rows_is_used_where_a_row_of_the_forward_pass_fails(kind, estimator):
    spent = []  # on perturbed rows, by the place of the row that they belong to

    def fn(x: torch.Tensor, gain_of_rows: torch.Tensor):
        row = (gain_of_rows == gain.T).long().argmax(1)
        spent.extend(row[(x != given[row]).any(1)].tolist())
        return (x * gain_of_rows).masked_fill(x[:, :1] == 3, torch.nan)

    x, gain = torch.randn(6, 2), torch.rand(6, 1) + 0.5
    x[1, 0] = x[4, 0] = 3
    given = x.clone()
    with EVALUATORS[kind]() as evaluator:
        layer = BlackBox(fn, 2, 2, policy="bond", estimator=estimator, eager=True, seed=0, evaluator=evaluator)
        seen = []
        layer.register_step_hook(lambda box, step: seen.append((step.x, step.g)))
        for _ in range(2):
            g = gradient(layer, x, torch.ones(6, 2), gain)
            evaluations, each = layer.stats.evaluations, layer.estimator.evaluations(2)
    others = [0, 2, 3, 5]
    assert torch.equal(seen[1][0], x[others])
    assert torch.equal(seen[1][1], g[others])
    assert not g[[1, 4]].any()
    assert layer.stats.wasted == spent.count(1) + spent.count(4) >= 2 * 2 * each
    assert evaluations - layer.stats.retried == 2 * 6 * (1 + each)
    if not isinstance(estimator, Simultaneous):
        assert torch.allclose(g[others], gain[others].expand(-1, 2), rtol=1e-2)


@pytest.mark.parametrize("batch", [3, 4])
def test_both_ends_of_a_perturbation_are_asked_again(batch):
    calls = []

    def fn(x: torch.Tensor):  # its reading drifts, and once an output is lost
        calls.append(len(x))
        y = torch.sin(x) + len(calls)
        y[0, 0] = torch.nan if len(calls) == 2 else y[0, 0]
        return y

    layer = BlackBox(fn, 2, policy=Fixed(1e-3), eager=True, seed=0, evaluator=Local(memory=2**30))
    layer(torch.zeros(1, 2))
    x = torch.randn(batch, 2)
    g = gradient(layer, x, torch.ones(batch, 2))
    assert calls == [1, 5 * batch, 2]
    assert torch.allclose(g, x.cos(), atol=1e-2)


def test_an_error_ahead_is_raised_in_the_backward_pass():
    fails = []

    def fn(x: torch.Tensor):
        if fails and len(x) > 4:
            raise TypeError("no such gate")
        return torch.sin(x)

    with Threads(2) as evaluator:
        layer = BlackBox(fn, 5, policy=Fixed(1e-3), eager=True, evaluator=evaluator)
        gradient(layer, torch.randn(4, 5), torch.ones(4, 5))
        fails.append(True)
        y = layer(torch.randn(4, 5, requires_grad=True))
        with pytest.raises(BoxError, match="no such gate"):
            y.sum().backward()
        fails.clear()
        gradient(layer, torch.randn(4, 5), torch.ones(4, 5))


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.filterwarnings("ignore:.*got no finite output")
def test_waste_of_steps_in_one_call_is_that_of_all_attempts(repeats):
    def fn(x: torch.Tensor):
        return torch.sin(x).masked_fill(x[:, :1] > 0.5, torch.nan)

    x = torch.zeros(16, 2)
    x[0, 0] = 0.495
    layer = BlackBox(fn, 2, 2, policy=Fixed(1e-2), eager=True, seed=0, repeats=repeats, evaluator=Local(retries=2))
    layer(x.requires_grad_())
    gc.collect()
    assert layer.stats.retried == 2 * 2 * repeats  # a pair, of which one end fails
    assert layer.stats.wasted == (64 + 2 * 2) * repeats
    assert layer.stats.evaluations == layer.stats.wasted + 16 * repeats


def test_waste_has_what_was_made_before_memory_ran_out_or_the_forward_pass_failed():
    def fn(x: torch.Tensor):
        if bool((x[:, 0] > 0.5).any()):
            raise error
        return torch.sin(x)

    x = torch.zeros(16, 2)
    x[-1, 0] = 0.495  # so that its first pair fails
    error: Exception = MemoryError()
    with Threads(1, max_rows=2) as evaluator, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = BlackBox(fn, 2, 2, policy=Fixed(1e-2), eager=True, evaluator=evaluator)
        with pytest.raises(BoxError, match="out of memory on a single row"):
            gradient(layer, x, torch.ones(16, 2))
    assert layer.stats.wasted == 62
    layer, error = BlackBox(fn, 2, 2, policy=Fixed(1e-2), eager=True, evaluator=Local(max_rows=2)), TypeError()
    with pytest.raises(BoxError, match="TypeError"):
        layer(x.requires_grad_())
    assert layer.stats.wasted == layer.stats.evaluations == 62


def test_what_a_journal_answered_is_not_wasted(tmp_path):
    for made in (64, 0):
        with Journal(Local(), tmp_path / "run.journal") as evaluator:
            layer = BlackBox(torch.sin, 2, 2, policy=Fixed(1e-2), eager=True, seed=0, evaluator=evaluator)
            layer(torch.zeros(16, 2, requires_grad=True))
            gc.collect()
        assert layer.stats.wasted == made


def test_waste_is_that_of_all_attempts():
    asked, dropped = threading.Event(), threading.Event()

    def fn(x: torch.Tensor):
        if len(x) == 2:  # the pair that is asked again
            asked.set()
            dropped.wait(5)
        return torch.sin(x).masked_fill(x[:, :1] > 0.5, torch.nan)

    x = torch.zeros(16, 2)
    x[0, 0] = 0.495
    with Threads(1) as evaluator:
        layer = BlackBox(fn, 2, 2, policy=Fixed(1e-2), eager=True, seed=0, evaluator=evaluator)
        y = layer(x.requires_grad_())
        assert asked.wait(5)
        del y
        gc.collect()
        dropped.set()
        for _ in range(500):
            if layer.stats.wasted:
                break
            time.sleep(0.01)
    assert layer.stats.evaluations == 16 + 64 + 2
    assert layer.stats.wasted == 64 + 2
