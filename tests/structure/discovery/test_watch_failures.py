"""structure="auto" where the box fails, or where what was saved is about another box."""

import copy

import pytest
import torch

from bondgrad import BlackBox, BoxError
from bondgrad.structure import Pattern, Sequence
from tests.helpers import close, gradient, same_state
from tests.structure.discovery.test_watch import train_until


def test_an_exception_leaves_nothing_found():
    fails = [False]
    failing = [16 * 2]  # rows in a call: those of the gradient, after the look

    def fn(x):
        if fails[0] and len(x) in failing:
            failing.append(1)  # nor does it answer single rows of these
            raise RuntimeError("no answer")
        return torch.sin(x)

    layer = BlackBox(fn, 6, structure="auto", seed=0)
    before = copy.deepcopy(layer.state_dict())
    fails[0] = True
    with pytest.raises(BoxError, match="no answer"):
        gradient(layer, torch.randn(16, 6), torch.randn(16, 6))
    assert same_state(before, layer.state_dict(), but=["progress"])
    assert layer.progress.steps == 0


def test_a_first_batch_without_an_answer():
    failing = [True]
    layer = BlackBox(
        lambda x: torch.full_like(x, torch.nan) if failing[0] else torch.sin(x), 4, structure="auto", seed=0
    )
    x, gy = torch.randn(16, 4), torch.randn(16, 4)
    with pytest.warns(UserWarning, match="no finite output"):
        gradient(layer, x, gy)
    failing[0] = False
    for _ in range(200):
        assert close(gradient(layer, x, gy), gy * x.cos(), 0.01)
    assert torch.equal(layer.structure.depends, torch.eye(4).bool())


def test_a_pattern_of_another_width_is_not_loaded():
    layer = BlackBox(torch.sin, 4, structure="auto", seed=0)
    gradient(layer, torch.randn(16, 4), torch.randn(16, 4))
    saved = layer.tracker.state_dict()
    with pytest.raises(ValueError, match="pattern in structure must be"):
        BlackBox(torch.sin, 6, structure="auto").tracker.load_state_dict(saved)


@pytest.mark.parametrize("out_features", [None, 6])
def test_a_pattern_of_another_height_is_not_used(out_features):
    saved = BlackBox(torch.sin, 3, structure="auto", seed=0)
    gradient(saved, torch.randn(16, 3), torch.randn(16, 3))
    layer = BlackBox(lambda x: torch.cat((x, x), 1), 3, out_features, structure="auto", seed=0)
    layer.load_state_dict(saved.state_dict())
    with pytest.raises(ValueError, match=r"\[6, 3\], got \[3, 3\]"):
        gradient(layer, torch.randn(4, 3), torch.randn(4, 6))
    with pytest.raises(ValueError, match="what was saved is not about"):
        BlackBox(torch.sin, 3, structure=Sequence("auto")).load_state_dict(saved.state_dict())


def test_an_outage_in_the_first_look():
    failing = [False]
    layer = BlackBox(
        lambda x: torch.full_like(x, torch.nan) if failing[0] else torch.sin(x), 20, structure="auto", seed=0
    )
    x, gy = torch.randn(16, 20, requires_grad=True), torch.randn(16, 20)
    y = layer(x)
    failing[0] = True
    with pytest.warns(UserWarning, match="no finite output"):
        y.backward(gy)
    failing[0] = False
    train_until(lambda: isinstance(layer.structure, Pattern), layer, x, gy)
    assert torch.equal(layer.structure.depends, torch.eye(20).bool())


@pytest.mark.parametrize(("failing", "used"), [(4, True), (5, False)])
def test_half_of_the_pattern_must_have_been_answered(failing, used):
    """Of eight outputs, so many never come."""

    def fn(x):
        y = torch.sin(x).repeat(1, 4)
        y[:, :failing] = torch.nan
        return y

    layer = BlackBox(fn, 2, structure="auto", seed=0)
    with pytest.warns(UserWarning, match="no finite output"):
        gradient(layer, torch.randn(16, 2), torch.randn(16, 8))
    assert isinstance(layer.structure, Pattern) is used
