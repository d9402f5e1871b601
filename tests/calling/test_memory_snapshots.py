"""Boxes that keep their state to themselves, and hand it out by `snapshot()` and take it back by `restore()`."""

import numpy as np
import pytest
import torch

from bondgrad import BlackBox, BoxError
from bondgrad.evaluators import Local
from bondgrad.policies import Fixed
from tests.calling.test_memory import Device, expected, own, stream
from tests.helpers import close, gradient


def test_another_box_in_its_place():
    layer, device = own(), Device()
    xs, gys = stream(2)
    gradient(layer, xs[0], gys[0])
    layer.fn = device
    for x, gy, (_, g) in zip(xs, gys, expected(xs, gys), strict=True):
        assert close(gradient(layer, x, gy), g, 1e-8)
    layer.reset()
    assert device.state == 0.0
    layer.eval()
    other = Device()
    layer.fn = other
    layer(xs[0])
    layer.train()
    assert other.state == 0.0  # evaluation does not reach into training


def test_a_method_of_a_device():
    device = Device()
    layer = BlackBox(device.__call__, 3, policy=Fixed(1e-5), seed=0)
    xs, gys = stream(3)
    for x, gy, (_, g) in zip(xs, gys, expected(xs, gys), strict=True):
        assert close(gradient(layer, x, gy), g, 1e-8)


def test_two_layers_around_one_device():
    device = Device()
    layers = torch.nn.ModuleList([BlackBox(device, 3), BlackBox(device, 3)])
    xs, _ = stream(2)
    layers[0](xs[0])
    state = device.state.copy()
    layers.eval()
    layers[1](xs[1])
    layers.train()
    assert np.array_equal(device.state, state)
    layers[0].eval()
    layers[0](xs[1])
    BlackBox(device, 3)(xs[1])  # made while another evaluates, and training none the less
    assert np.array_equal(device.state, 0.5 * state + np.sin(xs[1].numpy()))


def test_a_first_call_that_fails_is_undone():
    class Counter:
        n = 0

        def __call__(self, x):
            self.n += 1
            return x.astype("float64") + self.n  # not of a tensor

        def snapshot(self):
            return self.n

        def restore(self, snapshot):
            self.n = snapshot

    counter = Counter()
    assert BlackBox(counter, 3)(torch.zeros(1, 3))[0, 0] == counter.n == 1


def test_a_device_is_put_back_after_an_exception():
    class Failing(Device):
        calls, fails_at = 0, 5

        def __call__(self, x: np.ndarray):
            self.calls += 1
            y = super().__call__(x)
            if self.calls == self.fails_at:
                raise RuntimeError("no answer")
            return y

    device = Failing()
    layer = BlackBox(device, 3, policy=Fixed(1e-5), evaluator=Local(retries=0), seed=0)
    xs, gys = stream(2)
    x = xs[0].clone().requires_grad_()
    y = layer(x)
    state = device.state.copy()
    with pytest.raises(BoxError, match="no answer"):
        y.backward(gys[0])
    assert np.array_equal(device.state, state)
    device.fails_at = device.calls + 1  # in a forward pass
    with pytest.raises(BoxError, match="no answer"):
        layer(xs[1])
    assert np.array_equal(device.state, state)
    assert torch.allclose(layer(xs[1]), expected(xs, gys)[1][0])


@pytest.mark.parametrize("kind", ["raises", "answers nothing finite"])
def test_a_device_is_put_back_when_no_attempt_brought_an_output(kind):
    class Failing(Device):
        broken = False

        def __call__(self, x: np.ndarray):
            y = super().__call__(x)
            if self.broken and kind == "raises":
                raise RuntimeError("no answer")
            return y * np.nan if self.broken else y

    device = Failing()
    layer = BlackBox(device, 3, seed=0)
    xs, gys = stream(2)
    layer(xs[0])
    state, device.broken = device.state.copy(), True
    said = pytest.raises(BoxError, match="no answer") if kind == "raises" else pytest.warns(UserWarning, match="finite")
    with said:
        layer(xs[1])
    assert np.array_equal(device.state, state)
    device.broken = False
    assert torch.allclose(layer(xs[1]), expected(xs, gys)[1][0])


def test_a_device_that_ran_out_of_memory_once():
    class Greedy(Device):
        calls = 0

        def __call__(self, x: np.ndarray):
            self.calls += 1
            if self.calls == 3:
                raise torch.OutOfMemoryError
            return super().__call__(x)

    layer = BlackBox(Greedy(), 3, policy=Fixed(1e-5), seed=0)
    xs, gys = stream(2)
    with pytest.raises(torch.OutOfMemoryError):
        gradient(layer, xs[0], gys[0])
    assert close(gradient(layer, xs[1], gys[1]), expected(xs, gys)[1][1], 1e-8)


def test_a_device_is_not_asked_about_parts_of_a_batch():
    with pytest.raises(BoxError, match="all rows of a batch, but max_rows=2"):
        own(evaluator=Local(max_rows=2))(torch.randn(4, 3))
    assert own(evaluator=Local(max_rows=4))(torch.randn(4, 3)).shape == (4, 3)
    assert own(evaluator=Local(max_rows=2))(torch.randn(2, 3)).shape == (2, 3)


def test_two_kinds_of_state():
    with pytest.raises(ValueError, match="keeps its own state"):
        BlackBox(Device(), 3, state=torch.zeros(1, 3))
