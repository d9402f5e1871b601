"""structure="auto": the pattern is found in the first training step, and watched from then on."""

import copy
import warnings

import numpy as np
import pytest
import torch

from bondgrad import BlackBox
from bondgrad.evaluators import Local
from bondgrad.policies import Fixed
from bondgrad.structure import Pattern
from bondgrad.testing.boxes import Sparse
from tests.helpers import close, gradient, noisy, on_each_device, same_state
from tests.patterns import banded, blocks, shuffled


@on_each_device
def test_auto(device):
    pattern = shuffled(blocks(10, 3, 2))
    box = Sparse(pattern)
    layer = BlackBox(box, 30, structure="auto", seed=0).to(device)
    x, gy = torch.randn(16, 30, device=device), torch.randn(16, 20, device=device)
    assert close(gradient(layer, x, gy), box.vjp(x, gy), 0.05)
    assert isinstance(layer.structure, Pattern)
    assert torch.equal(layer.structure.depends, pattern)
    before = layer.stats.evaluations
    assert close(gradient(layer, x, gy), box.vjp(x, gy), 0.05)
    assert layer.stats.evaluations - before == 16 * (1 + 2 * 3)


def test_auto_leaves_no_trace_in_eval_mode():
    layer = BlackBox(Sparse(blocks(5, 2, 2)), 10, structure="auto", seed=0, policy="bond").eval()
    x, gy = torch.randn(4, 10), torch.randn(4, 10)
    before = copy.deepcopy(layer.state_dict())
    gradient(layer, x, gy)
    assert same_state(before, layer.state_dict(), but=["requests"])
    assert layer.stats.evaluations == 4 * 21


@pytest.mark.parametrize("rows", [4, 64, 512])
def test_watching_costs_about_one_percent_or_two_evaluations_a_step(rows):
    """Of the evaluations for gradients, four for each row. A check has sixteen rows at most."""
    layer = BlackBox(Sparse(blocks(10, 2, 2)), 20, structure="auto", seed=0, policy="bond")
    x, gy = torch.randn(rows, 20), torch.randn(rows, 20)
    gradient(layer, x, gy)
    before, steps = layer.stats.evaluations, 400
    for _ in range(steps):
        gradient(layer, x, gy)
    spent = layer.stats.evaluations - before - steps * 5 * rows
    expected = min(steps / 4 * 16, max(0.01 * steps * 4 * rows, 2 * steps))
    assert 0.9 * expected < spent <= 1.01 * expected


def test_resuming_goes_on_bit_for_bit():
    x, gy = torch.randn(32, 20), torch.randn(32, 20)
    layers = [BlackBox(Sparse(banded(20, 1)), 20, structure="auto", seed=seed) for seed in (0, 1)]
    for _ in range(30):
        gradient(layers[0], x, gy)
    layers[1].load_state_dict(layers[0].state_dict())
    start = [layer.stats.evaluations for layer in layers]
    for _ in range(60):
        assert torch.equal(gradient(layers[0], x, gy), gradient(layers[1], x, gy))
    spent = [layer.stats.evaluations - before for layer, before in zip(layers, start, strict=True)]
    assert spent[0] == spent[1] > 60 * 32 * 7  # some were spent on watching
    assert same_state(layers[0].state_dict(), layers[1].state_dict())


def test_when_the_next_search_is_due():
    """Two evaluations a step pay for eight after four steps; 16 rows of 2 inputs take 32 a step for the gradient."""
    layer = BlackBox(torch.sin, 2, structure="auto", policy=Fixed(1e-3), seed=0)
    x, gy = torch.randn(16, 2), torch.randn(16, 2)
    tracker = layer.tracker
    assert tracker.due()
    gradient(layer, x, gy)
    assert (tracker.steps, tracker.budget) == (1, 2)  # since the first search, which is not counted
    for _ in range(3):
        assert not tracker.due()
        gradient(layer, x, gy)
    assert tracker.due()
    before = layer.stats.evaluations
    gradient(layer, x, gy)
    assert layer.stats.evaluations - before == 16 + 32 + 8
    assert (tracker.steps, tracker.budget) == (1, 2)


def test_every_fourth_step_cannot_be_captured():
    layer = BlackBox(torch.sin, 2, structure="auto", policy=Fixed(1e-3), seed=0)
    gradient(layer, torch.randn(16, 2), torch.randn(16, 2))
    due = []
    for _ in range(4):
        due.append(layer.due())
        layer.tracker.step(32)  # as a replay counts
    assert due == [False] * 3 + [True]


def test_a_change_is_looked_at_again_at_once():
    box = Waking(0.5)
    layer = BlackBox(box, 10, structure="auto", policy=Fixed(1e-2), seed=0)
    x, gy = torch.randn(32, 10), torch.randn(32, 10)
    gradient(layer, x, gy)
    box.awake = True
    with pytest.warns(UserWarning, match="found 1 dependency .* of output 7 on input 2"):
        train_until(lambda: layer.structure.depends[7, 2], layer, x, gy)
    assert layer.tracker.due()
    before = layer.stats.evaluations
    gradient(layer, x, gy)
    assert layer.stats.evaluations - before == 32 + 32 * 2 * 2 + 16  # two groups now, and a large check
    assert not layer.tracker.due()


def train_until(done, layer, x, gy):
    for _ in range(400):
        gradient(layer, x, gy)
        if done():
            return
    raise AssertionError("nothing was noticed")


class Waking:
    """Two blocks; from some moment on the second depends on the first."""

    def __init__(self, strength):
        self.strength, self.awake = strength, False

    def __call__(self, x: torch.Tensor):
        y = torch.sin(x)
        if self.awake:
            y[:, 7] += self.strength * x[:, 2]
        return y


@pytest.mark.parametrize("noise", [0, 1e-4])
@pytest.mark.parametrize("max_rows", [None, 16])
def test_a_dependency_that_wakes_late(noise, max_rows):
    box = Waking(0.5)
    layer = BlackBox(
        noisy(box, noise) if noise else box,
        10,
        structure="auto",
        policy=Fixed(1e-2),
        evaluator=Local(max_rows=max_rows),
        seed=0,
    )
    x, gy = torch.randn(32, 10), torch.randn(32, 10)
    asleep = gy * x.cos()
    awake = asleep.clone()
    awake[:, 2] += 0.5 * gy[:, 7]
    for _ in range(20):
        assert close(gradient(layer, x, gy), asleep, 0.03)
    box.awake = True
    layer.tracker.steps = 0  # no check is due in the next step
    assert not close(gradient(layer, x, gy), awake, 0.03)
    before = layer.stats.evaluations
    with pytest.warns(UserWarning, match="found 1 dependency that its pattern did not have, of output 7"):
        train_until(lambda: layer.structure.depends[7, 2], layer, x, gy)
    assert layer.stats.evaluations - before < 10_000
    expected = torch.eye(10).bool()
    expected[7, 2] = True
    assert torch.equal(layer.structure.depends, expected)
    for _ in range(100):
        assert close(gradient(layer, x, gy), awake, 0.03)


def test_an_output_that_comes_to_depend_on_everything():
    awake = [False]

    def fn(x):
        y = torch.sin(x)
        if awake[0]:
            y[:, 5] += 0.3 * x.sum(1)
        return y

    layer = BlackBox(fn, 10, structure="auto", seed=0)
    x, gy = torch.randn(64, 10), torch.randn(64, 10)
    gradient(layer, x, gy)
    awake[0] = True
    with pytest.warns(UserWarning, match="of output 5"):
        train_until(lambda: layer.structure.depends[5].all(), layer, x, gy)
    assert layer.structure.depends.sum() == 19


def test_the_watch_of_a_box_that_writes_into_its_rows():
    awake, lowest = [False], [0.0]

    def fn(x: np.ndarray):
        lowest[0] = min(lowest[0], float(x.min()))
        y = np.sin(x)
        if awake[0]:
            y[:, 7] += 0.5 * x[:, 2]
        x -= 5
        return y

    layer = BlackBox(fn, 10, structure="auto", limits=(0.0, 1.0), seed=0)
    x, gy = torch.rand(32, 10), torch.randn(32, 10)
    gradient(layer, x, gy)
    awake[0] = True
    with pytest.warns(UserWarning, match="of output 7"):
        train_until(lambda: layer.structure.depends[7, 2], layer, x, gy)
    assert lowest[0] == 0


def test_noise_that_falls():
    sigma = [0.5]
    generator = torch.Generator().manual_seed(0)
    layer = BlackBox(
        lambda x: torch.sin(x) + sigma[0] * torch.randn(x.shape, generator=generator), 10, structure="auto", seed=0
    )
    x, gy = torch.randn(64, 10), torch.randn(64, 10)
    with pytest.warns(
        UserWarning, match=r"saw no output react to the inputs 0, 1, 2, 3, 4, 5, 6, 7, \.\.\.: no gradient"
    ):
        gradient(layer, x, gy)
    sigma[0] = 1e-4
    with pytest.warns(UserWarning, match="dependenc(y|ies) that its pattern did not have"):
        train_until(lambda: layer.structure.depends.diagonal().all(), layer, x, gy)


def test_inputs_that_do_nothing_are_named():
    layer = BlackBox(lambda x: x[:, [0, 2]], 4, structure="auto", seed=0)
    with pytest.warns(UserWarning, match="saw no output react to the inputs 1, 3: no gradient"):
        gradient(layer, torch.randn(16, 4), torch.randn(16, 2))
    assert layer.structure.depends.tolist() == [[True, False, False, False], [False, False, True, False]]
    layer = BlackBox(lambda x: x[:, :1], 9, structure="auto", seed=0)
    with pytest.warns(UserWarning, match="react to the inputs 1, 2, 3, 4, 5, 6, 7, 8: no gradient"):
        gradient(layer, torch.randn(16, 9), torch.randn(16, 1))


def test_another_box_in_its_place():
    layer = BlackBox(torch.sin, 4, structure="auto", seed=0)
    x, gy = torch.randn(16, 4), torch.randn(16, 4)
    gradient(layer, x, gy)
    layer.fn = lambda x: x.cumsum(1)
    assert close(gradient(layer, x, gy), gy.flip(1).cumsum(1).flip(1), 1e-2)


def test_a_dependency_on_two_inputs_at_once():
    """Neither input alone shows it at these rows, but both together do."""
    box = Sparse(torch.eye(8).bool())
    awake = [False]

    def fn(x):
        y = box(x)
        if awake[0]:
            both = (x[:, 0] > 0.5) & (x[:, 1] > 0.5)
            y[:, 6] += both * 1.0
        return y

    layer = BlackBox(fn, 8, structure="auto", seed=0)
    x = torch.rand(64, 8)
    x[:32, 0], x[32:, 1] = 0.1, 0.1
    gy = torch.randn(64, 8)
    gradient(layer, x, gy)
    awake[0] = True
    with pytest.warns(UserWarning, match="of output 6"):
        train_until(lambda: layer.structure.depends[6, :2].all(), layer, x, gy)


def test_noise_that_grows_is_no_dependency():
    sigma = [1e-5]
    box = Sparse(blocks(10, 2, 2))
    generator = torch.Generator().manual_seed(0)

    def fn(x):
        y = box(x)
        return y + sigma[0] * torch.randn(y.shape, generator=generator)

    layer = BlackBox(fn, 20, structure="auto", noise=1e-3, seed=0)
    x, gy = torch.randn(64, 20), torch.randn(64, 20)
    gradient(layer, x, gy)
    sigma[0] = 1e-2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(300):
            gradient(layer, x, gy)


def test_a_dense_box_stays_dense():
    layer = BlackBox(lambda x: torch.sin(x.cumsum(1) + x.flip(1).cumsum(1)), 6, policy="bond", structure="auto", seed=0)
    x, gy = torch.randn(8, 6), torch.randn(8, 6)
    for _ in range(50):
        before = layer.stats.evaluations
        gradient(layer, x, gy)
    assert layer.stats.evaluations - before == 8 * 13


def test_auto_with_a_device_that_keeps_its_state():
    class Device:
        def __init__(self):
            self.state = np.zeros((4, 6))

        def __call__(self, x: np.ndarray):
            self.state = 0.5 * self.state + np.sin(x)
            return self.state

        def snapshot(self):
            return self.state.copy()

        def restore(self, snapshot):
            self.state = snapshot.copy()

    layer = BlackBox(Device(), 6, structure="auto", policy=Fixed(1e-4), seed=0)
    for _ in range(5):
        x, gy = torch.randn(4, 6).double(), torch.randn(4, 6).double()
        assert close(gradient(layer, x, gy), gy * x.cos(), 1e-6)
    assert torch.equal(layer.structure.depends, torch.eye(6).bool())


def test_few_calls_of_a_small_batch():
    layer = BlackBox(torch.sin, 4, structure="auto", seed=0, policy="bond")
    gradient(layer, torch.randn(1, 4), torch.randn(1, 4))
    assert layer.stats.calls <= 5
