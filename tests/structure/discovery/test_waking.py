"""structure="auto" where dependencies wake in the course of training: how soon they are found, and what is said."""

import warnings

import pytest
import torch

from bondgrad import BlackBox, sign_accuracy
from bondgrad.policies import Fixed
from tests.helpers import gradient, noisy
from tests.structure.discovery.test_watch import Waking, train_until


def test_health_says_how_many_dependencies_woke():
    box = Waking(0.5)
    layer = BlackBox(box, 10, structure="auto", seed=0)
    x, gy = torch.randn(32, 10), torch.randn(32, 10)
    gradient(layer, x, gy)
    assert layer.stats.health.woken == 0
    box.awake = True
    with pytest.warns(UserWarning, match="found 1 dependency"):
        train_until(lambda: layer.structure.depends[7, 2], layer, x, gy)
    assert layer.stats.health.woken == 1
    saved = BlackBox(box, 10, structure="auto", seed=1)
    saved.load_state_dict(layer.state_dict())
    assert saved.tracker.woken == 1


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("noise", [0, 1e-3])
@pytest.mark.parametrize("seed", range(3))
def test_an_input_that_comes_to_affect_all_outputs_while_it_drifts(eager, noise, seed):
    """With one group, a gradient costs 32 evaluations: one percent of that would pay for nothing."""
    box = lambda x: torch.tanh(x) + torch.relu(x[:, :1] - 3)  # noqa: E731
    fn = noisy(box, noise) if noise else box
    generator = torch.Generator().manual_seed(seed)
    layer, signs = BlackBox(fn, 40, structure="auto", eager=eager, seed=seed), []

    def drift():
        for step in range(100):
            x, gy = (torch.randn(16, 40, generator=generator) for _ in range(2))
            x[:, 0] += 5 * step / 100
            exact = gy * (1 - torch.tanh(x) ** 2)
            exact[:, 0] += gy.sum(1) * (x[:, 0] > 3)
            signs.append(float(sign_accuracy(gradient(layer, x, gy), exact)))

    with pytest.warns(UserWarning, match="did not have"):
        drift()
    assert layer.structure.depends[:, 0].all()
    assert layer.structure.depends.sum() == 79
    assert layer.stats.health.woken == 39
    assert min(torch.tensor(signs).unfold(0, 20, 1).mean(1)) > 0.97  # without the floor it is 0.7


def test_eager_evaluations_are_used_in_steps_with_a_check_that_finds_nothing():
    sizes = []

    def fn(x: torch.Tensor):
        sizes.append(len(x))
        return torch.sin(x)

    layer = BlackBox(fn, 6, structure="auto", policy=Fixed(1e-3), eager=True, seed=0)
    x, gy = torch.randn(16, 6), torch.randn(16, 6)
    gradient(layer, x, gy)
    sizes.clear()
    for _ in range(9):
        gradient(layer, x, gy)
    assert sizes == [48, 48, 48, 48, 8, 48, 48, 48, 48, 8, 48]
    assert layer.stats.wasted == 0


def test_eager_evaluations_are_dropped_where_the_pattern_has_changed():
    box = Waking(0.5)
    layers = [BlackBox(box, 10, structure="auto", policy=Fixed(1e-2), eager=eager, seed=0) for eager in (False, True)]
    x, gy = torch.randn(32, 10), torch.randn(32, 10)
    for layer in layers:
        gradient(layer, x, gy)
    box.awake = True
    for _ in range(40):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            one, other = (gradient(layer, x, gy) for layer in layers)
        assert torch.allclose(one, other, atol=1e-4)
        assert torch.equal(*(layer.structure.depends for layer in layers))
    assert layers[1].structure.depends[7, 2]
    assert layers[1].stats.wasted == 32 * 2  # of the step in which it was found


@pytest.mark.parametrize("varying", [False, True])
def test_noise_raises_no_alarm(varying):
    """Also where it differs from row to row by a factor of a hundred."""
    generator = torch.Generator().manual_seed(0)

    def fn(x):
        size = 1e-3 * (10 ** x[:, :1].clamp(-1, 1) if varying else 1)
        return torch.sin(5 * x) + size * torch.randn(x.shape, generator=generator)

    layer = BlackBox(fn, 30, structure="auto", policy=Fixed(1e-2), seed=0)
    for _ in range(1000):
        gradient(layer, torch.randn(16, 30), torch.randn(16, 30))
    assert layer.tracker.woken == 0


def test_states_that_were_saved_before_there_was_a_floor():
    layer, other = (BlackBox(torch.sin, 4, structure="auto", policy=Fixed(1e-3), seed=seed) for seed in (0, 1))
    x, gy = torch.randn(16, 4), torch.randn(16, 4)
    gradient(layer, x, gy)
    state = layer.tracker.get_extra_state()
    known = {"depends": state["known"]["depends"]}
    other.tracker.set_extra_state({"known": known, "credit": 3, "price": 48, "random": state["random"]})
    assert other.tracker.due()  # at once
    for _ in range(10):
        gradient(other, x, gy)
    assert torch.equal(other.structure.depends, torch.eye(4).bool())


def test_noise_that_a_seed_cancels_hides_no_dependency():
    awake = [False]

    def fn(x: torch.Tensor, seed: int):
        generator = torch.Generator().manual_seed(seed)
        y = torch.sin(x) + torch.randn(x.shape, generator=generator)
        if awake[0]:
            y[:, 3] += 0.3 * x[:, 5]
        return y

    layer = BlackBox(fn, 8, structure="auto", policy=Fixed(1e-2), seed=0)
    x, gy = torch.randn(16, 8), torch.randn(16, 8)
    gradient(layer, x, gy)
    assert torch.equal(layer.structure.depends, torch.eye(8).bool())
    for _ in range(20):
        gradient(layer, x, gy)
    awake[0] = True
    with pytest.warns(UserWarning, match="of output 3 on input 5"):
        train_until(lambda: layer.structure.depends[3, 5], layer, x, gy)
    assert layer.structure.depends.sum() == 9
