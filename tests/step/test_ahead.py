"""Evaluations of a gradient that begin in the forward pass: eager=True."""

import gc
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bondgrad import BlackBox, Simultaneous
from bondgrad.estimators import Central
from bondgrad.evaluators import Journal, Local, Threads
from bondgrad.policies import Fixed
from bondgrad.structure import Blocks, Sequence
from tests.helpers import gradient, same_state

EVALUATORS = {"local": Local, "one row": lambda: Local(max_rows=1), "threads": lambda: Threads(3, max_rows=1)}


def row_by_row(x: torch.Tensor):
    return torch.stack([torch.sin(row) * row.sum() for row in x])


class Counting:
    def __init__(self):
        self.sizes, self.lock = [], threading.Lock()

    def __call__(self, x: torch.Tensor):
        with self.lock:
            self.sizes.append(len(x))
        return torch.sin(x)


def trained(eager, evaluator, steps=12, batch=8, d=5, fn=row_by_row, **options):
    torch.manual_seed(0)
    layer = BlackBox(fn, d, evaluator=evaluator, eager=eager, seed=0, **options)
    model = nn.Sequential(nn.Linear(3, d), layer, nn.Linear(d, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for x in torch.randn(steps, batch, 3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), layer


@pytest.mark.parametrize("kind", EVALUATORS)
@pytest.mark.parametrize("estimator", ["central", "forward", Simultaneous(3)], ids=str)
@pytest.mark.parametrize("policy", ["calibrated", "bond"])
@pytest.mark.parametrize("batch", [7, 8])
def test_training_is_that_without_it(kind, estimator, policy, batch):
    options = {"estimator": estimator, "policy": policy, "batch": batch, "limits": (-0.7, 0.7)}
    expected, plain = trained(False, Local(), **options)
    with EVALUATORS[kind]() as evaluator:
        found, layer = trained(True, evaluator, **options)
    assert torch.equal(found, expected)
    assert layer.stats.evaluations == plain.stats.evaluations
    assert layer.stats.wasted == 0
    assert layer.progress.steps == plain.progress.steps == 12


@pytest.mark.parametrize("structure", [Blocks(1, 1), torch.eye(5, dtype=torch.bool), "auto"], ids=str)
@pytest.mark.parametrize("noise", [None, "auto"])
def test_with_structure_and_measured_noise(structure, noise):
    options = {"structure": structure, "noise": noise, "policy": "bond", "fn": torch.sin, "steps": 30}
    expected, plain = trained(False, Local(max_rows=1), **options)
    found, layer = trained(True, Local(max_rows=1), **options)
    assert torch.equal(found, expected)
    assert layer.stats.evaluations == plain.stats.evaluations


def test_contexts_and_sequences():
    def fn(x: torch.Tensor, shift: torch.Tensor):
        return torch.stack([row.cumsum(0).sin() + s for row, s in zip(x, shift, strict=True)])

    x, shift, gy = torch.randn(4, 6, 2), torch.randn(4, 6, 2), torch.randn(4, 6, 2)
    layers = [BlackBox(fn, 2, structure=Sequence(), policy=Fixed(1e-3), eager=eager, seed=0) for eager in (False, True)]
    for _ in range(3):
        a, b = (gradient(layer, x, gy, shift) for layer in layers)
        assert torch.equal(a, b)
    assert [layer.stats.calls for layer in layers] == [6, 4]


def test_one_call_a_step():
    fn = Counting()
    layer = BlackBox(fn, 5, policy="bond", eager=True)
    for _ in range(3):
        gradient(layer, torch.randn(16, 5), torch.ones(16, 5))
    assert fn.sizes == [16, 160, 176, 176]  # in the first step the width is not known yet


def test_a_step_with_a_trial_is_taken_as_without():
    fn = Counting()
    layer, due = BlackBox(fn, 5, eager=True), []
    for _ in range(40):
        due.append(layer.trial_due)
        fn.sizes.clear()
        gradient(layer, torch.randn(16, 5), torch.ones(16, 5))
        assert (fn.sizes == [176]) == (not due[-1])
    assert 0 < sum(due) < 20


@pytest.mark.parametrize("mode", ["no_grad", "detached", "eval", "inference"])
def test_where_no_gradient_is_learnt_from_nothing_more_is_sent(mode):
    fn = Counting()
    layer, x = BlackBox(fn, 5, policy="bond", eager=True), torch.randn(4, 5)
    gradient(layer, x, torch.ones(4, 5))
    fn.sizes.clear()
    if mode == "no_grad":
        with torch.no_grad():
            layer(x.requires_grad_())
    elif mode == "inference":
        with torch.inference_mode():
            layer(x)
    else:
        layer.train(mode != "eval")(x.requires_grad_(mode == "eval"))
    assert fn.sizes == [4]


@pytest.mark.parametrize(("reentrant", "sizes"), [(False, [44]), (True, [4, 40])])
def test_checkpoints_send_nothing_more(reentrant, sizes):
    fn = Counting()
    layer, x = BlackBox(fn, 5, policy="bond", eager=True), torch.randn(4, 5, requires_grad=True)
    gradient(layer, x, torch.ones(4, 5))
    fn.sizes.clear()
    checkpoint(lambda t: layer(t * 1), x, use_reentrant=reentrant).sum().backward()
    assert fn.sizes == sizes  # the reentrant kind does not say that a gradient will be asked for


@pytest.mark.parametrize("kind", EVALUATORS)
def test_what_is_never_asked_for_is_counted_as_waste(kind):
    with EVALUATORS[kind]() as evaluator:
        layer = BlackBox(row_by_row, 3, policy="bond", eager=True, evaluator=evaluator)
        x = torch.randn(4, 3, requires_grad=True)
        layer(x).sum().backward()
        before = layer.stats.evaluations
        for _ in range(3):
            layer(x)
        gc.collect()
        for _ in range(100):
            if layer.stats.evaluations - before == 12 + layer.stats.wasted:
                break
            time.sleep(0.01)
        layer(x).sum().backward()
    made = layer.stats.evaluations - before - 28
    assert made == 12 + layer.stats.wasted
    assert layer.stats.wasted <= 72
    assert layer.stats.wasted == 72 or kind == "threads"


def test_a_second_backward_pass_evaluates_again():
    fn = Counting()
    layer, x = BlackBox(fn, 3, policy=Fixed(1e-3), eager=True), torch.randn(4, 3, requires_grad=True)
    layer(x).sum().backward()
    fn.sizes.clear()
    y = layer(x).sum()
    a, b = (torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2))
    assert fn.sizes == [28, 24]
    assert torch.allclose(a, b, atol=1e-3)


def test_several_forward_passes_before_their_backward_passes():
    layer, x = BlackBox(torch.sin, 3, eager=True), torch.randn(3, 16, 3)
    for _ in range(6):
        rows = [t.clone().requires_grad_() for t in x]
        for y in [layer(t) for t in rows]:
            y.sum().backward()
        assert all(torch.allclose(t.grad, t.cos(), atol=1e-2) for t in rows)


def test_threads_evaluate_beside_the_rest_of_the_network():
    calls, in_time, layer_ended = [], [], threading.Event()

    def fn(x: torch.Tensor):
        if len(calls) >= 2 and float(x.abs().max()) != 0:  # after the first step, rows that are moved wait
            in_time.append(layer_ended.wait(5))
        calls.append(len(x))
        return torch.sin(x)

    with Threads(1) as evaluator:
        layer = BlackBox(fn, 2, policy=Fixed(0.1), eager=True, evaluator=evaluator)
        x = torch.zeros(1, 2, requires_grad=True)
        layer(x).sum().backward()
        y = layer(x)  # does not wait for the rows that are moved
        layer_ended.set()
        y.sum().backward()
    assert in_time == [True]
    assert torch.allclose(x.grad, torch.full((1, 2), 2.0), atol=1e-2)


def test_more_than_the_memory_switches_it_off_with_a_warning():
    fn = Counting()
    layer = BlackBox(fn, 5, policy="bond", eager=True, evaluator=Local(memory=40 * 39))
    gradient(layer, torch.randn(4, 5), torch.ones(4, 5))
    fn.sizes.clear()
    with pytest.warns(UserWarning, match="eager=True needs .* MiB .* switched off"):
        gradient(layer, torch.randn(4, 5), torch.ones(4, 5))
    gradient(layer, torch.randn(4, 5), torch.ones(4, 5))
    assert fn.sizes == [4, *fn.sizes[1:]]
    assert sum(fn.sizes) == 88


class Late(Central):
    first_round_needs_gy = True


class Remembers:
    def snapshot(self):
        return 0

    def restore(self, snapshot):
        pass

    def __call__(self, x):
        return x


@pytest.mark.parametrize(
    ("fn", "options", "why"),
    [
        (torch.sin, {"estimator": Late()}, "depend on the gradient of the loss"),
        (lambda x, s: (x, s), {"state": torch.zeros(1, 3)}, "a box with memory"),
        (Remembers(), {}, "a box with memory"),
        (lambda x, seed: x, {}, "takes a seed"),
    ],
)
def test_what_can_never_work_is_refused(fn, options, why):
    with pytest.raises(ValueError, match=f"eager must be False here, since .*{why}"):
        BlackBox(fn, 3, eager=True, **options)


def test_an_estimator_that_cannot_work_is_refused_when_it_is_exchanged():
    layer = BlackBox(torch.sin, 3, eager=True)
    with pytest.raises(ValueError, match="depend on the gradient of the loss"):
        layer.estimator = Late()
    assert not isinstance(layer.estimator, Late)


@pytest.mark.filterwarnings("ignore:.*got no finite output")
@pytest.mark.parametrize("estimator", ["central", "forward"])
@pytest.mark.parametrize("kind", ["float", "half", "fails"])
def test_a_run_that_is_resumed_goes_on_bit_for_bit_and_asks_a_journal(estimator, kind, tmp_path):
    """Also where the number of outputs is not given, and the first forward pass after loading has to know it."""

    def fn(x: torch.Tensor):
        y = torch.sin(3 * x)
        return y.bfloat16() if kind == "half" else y.masked_fill(x > 0.8, torch.nan) if kind == "fails" else y

    def step(layer, number):
        x = torch.randn(16, 2, generator=torch.Generator().manual_seed(number))
        return gradient(layer, x, torch.ones(16, 2))

    def made(evaluator):
        return BlackBox(fn, 2, eager=True, policy="bond", estimator=estimator, seed=0, evaluator=evaluator)

    with Journal(Local(), tmp_path / "run.journal") as journal:
        layer = made(journal)
        for number in range(3):
            step(layer, number)
        torch.save(layer.state_dict(), tmp_path / "state.pt")
        expected = [step(layer, number) for number in (3, 4)]
    with Journal(Local(), tmp_path / "run.journal") as journal:
        resumed = made(journal)
        resumed.load_state_dict(torch.load(tmp_path / "state.pt"))
        found = [step(resumed, number) for number in (3, 4)]
        assert resumed.stats.recorded > 0
        assert resumed.stats.evaluations == 0
    assert all(map(torch.equal, found, expected))
    assert same_state(resumed.state_dict(), layer.state_dict())


def test_states_that_do_not_know_the_number_of_outputs_are_loaded():
    layer, other = (BlackBox(torch.sin, 2, eager=True, seed=0) for _ in range(2))
    gradient(layer, torch.randn(4, 2), torch.ones(4, 2))
    state = layer.state_dict()
    del state["policy_state._extra_state"]["progress"]["learnt"]
    other.load_state_dict(state)
    x = torch.randn(4, 2)
    assert torch.equal(gradient(other, x, torch.ones(4, 2)), gradient(layer, x, torch.ones(4, 2)))


def test_a_state_of_a_box_with_another_number_of_outputs_is_loaded():
    layer, other = BlackBox(torch.sin, 2, eager=True, policy="bond"), BlackBox(lambda x: x[:, :1], 2, eager=True)
    gradient(layer, torch.randn(4, 2), torch.ones(4, 2))
    other.policy = "bond"
    other.load_state_dict(layer.state_dict())
    for _ in range(2):
        g = gradient(other, torch.randn(4, 2), torch.ones(4, 1))
    assert torch.allclose(g, torch.tensor([1.0, 0.0]).expand(4, 2), atol=1e-2)
