"""States given as `state=`, which the layer carries from call to call: their form, saving, and what interrupts them."""

import io

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from bondgrad import BlackBox, BoxError
from bondgrad.evaluators import Local, Threads
from bondgrad.policies import Fixed
from bondgrad.structure import Sequence
from tests.calling.test_memory import carried, expected, leaky, stream
from tests.helpers import close, gradient


def test_kinds_of_numbers():
    """Counters that wrap, and complex amplitudes, stay what they are."""

    def fn(x: np.ndarray, state):
        return x * state["phase"].real, {"phase": state["phase"] * 1j, "count": state["count"] + np.uint8(200)}

    start = {"count": torch.zeros(1, 3, dtype=torch.uint8), "phase": torch.ones(1, 3, dtype=torch.complex128)}
    layer = BlackBox(fn, 3, state=start)
    x = torch.ones(2, 3).double()
    assert [float(layer(x)[0, 0]) for _ in range(5)] == [1, 0, -1, 0, 1]
    assert layer.memory.before(2, True, torch.device("cpu"))[0][0, 0] == 1000 % 256


def test_states_of_many_tensors_in_numpy():
    def fn(x: np.ndarray, state, gain: np.ndarray):
        position, (count, speed) = state["position"], state["rest"]
        speed = speed + gain * x
        position = position + speed
        position += 0  # writes into its own arrays only
        return position, {"rest": (count + 1, speed), "position": position}  # the order of names does not matter

    start = {"position": torch.zeros(1, 2), "rest": (torch.zeros(1, dtype=torch.long), np.ones((1, 2)))}
    layer = BlackBox(fn, 2, state=start, policy=Fixed(1e-2), seed=0)
    x, gain = torch.randn(3, 2), torch.rand(3, 1)
    assert torch.allclose(layer(x, gain), 1 + gain * x)
    assert torch.allclose(layer(x, gain), 2 + 3 * gain * x)
    gy = torch.randn(3, 2)
    assert close(gradient(layer, x, gy, gain), gy * gain, 1e-3)
    assert layer.memory.before(3, True, torch.device("cpu"))[1].tolist() == [3, 3, 3]


def test_a_function_that_writes_into_its_state():
    def fn(x, state):
        state.mul_(0.5).add_(x)
        return state.clone(), state

    layer = BlackBox(fn, 3, state=torch.ones(4, 3), policy=Fixed(1e-2), seed=0)
    x, gy = torch.randn(4, 3), torch.randn(4, 3)
    assert torch.allclose(layer(x), 0.5 + x)
    assert close(gradient(layer, x, gy), gy, 1e-3)
    layer.reset()
    assert torch.allclose(layer(x), 0.5 + x)


def test_a_box_that_answers_in_the_same_memory():
    y, state = torch.empty(4, 3).double(), torch.empty(4, 3).double()

    def fn(x, before):
        answer, after = leaky(x, before)
        y[: len(x)], state[: len(x)] = answer[:4], after[:4]
        return (y[: len(x)], state[: len(x)]) if len(x) <= 4 else (answer, after)

    for max_rows in (None, 1, 3):
        layer = BlackBox(fn, 3, state=torch.zeros(1, 3).double(), evaluator=Local(max_rows), policy=Fixed(1e-5), seed=0)
        xs, gys = stream()
        for x, gy, (_, g) in zip(xs, gys, expected(xs, gys), strict=True):
            assert close(gradient(layer, x, gy), g, 1e-8)


@pytest.mark.parametrize("after", ["other dtype", "other shape"])
def test_a_state_that_changes_its_kind(after):
    def fn(x, state):
        grown = state.double() if after == "other dtype" else torch.cat((state, state), 1)
        return x + state.sum(1, keepdim=True), grown + 1

    layer = BlackBox(fn, 3, state=torch.ones(1, 3))
    x = torch.zeros(2, 3)
    first = [layer(x).sum() for _ in range(3)]
    layer.reset()
    assert [layer(x).sum() for _ in range(3)] == first


def test_a_default_device_is_not_for_states():
    def fn(x: np.ndarray, state: np.ndarray):
        return x + state, state + 1

    layer = BlackBox(fn, 3, state=np.zeros((1, 3)))
    with torch.device("meta"):
        assert layer(torch.zeros(2, 3, device="cpu")).tolist() == [[0, 0, 0]] * 2
        assert layer(torch.zeros(2, 3, device="cpu")).tolist() == [[1, 1, 1]] * 2


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x, state: x, r"must return a pair \(y, state\)"),
        (lambda x, state: (x, (state, state)), "of the form it was given"),
        (lambda x, state: (x, state[:1]), "one entry per row"),
        (lambda x, state: (x, None), "of the form it was given"),
        (lambda x, state: (x[1:], state), "one row of outputs"),
    ],
)
def test_answers_that_are_wrong(fn, message):
    layer = BlackBox(fn, 3, state=torch.zeros(1, 2))
    with pytest.raises(BoxError, match=message):
        layer(torch.randn(4, 3))


def test_batches_of_other_sizes():
    layer = carried()
    layer(torch.randn(4, 3).double())
    with pytest.raises(BoxError, match=r"remembers 4 rows, but was given 3.*drop_last"):
        layer(torch.randn(3, 3).double())
    layer.reset()
    layer(torch.randn(3, 3).double())


def test_another_function_begins_anew():
    layer = carried()
    xs, gys = stream(2)
    layer(xs[0])
    layer.fn = lambda x, state: leaky(x, state)
    assert torch.allclose(layer(xs[0]), expected(xs, gys)[0][0])


def test_resets_leave_the_state_where_it_is():
    """Lest a captured graph be captured anew each time."""
    layer = carried()
    xs, gys = stream(2)
    layer(xs[0])
    before = layer.version
    layer.reset()
    assert layer.version == before
    assert torch.allclose(layer(xs[0]), expected(xs, gys)[0][0])
    assert layer.version == before


def test_a_saved_state_is_not_code():
    layer = carried()
    layer(torch.randn(4, 3, dtype=torch.float64))
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    carried().load_state_dict(torch.load(file, weights_only=True))


def test_loading_copies():
    first, second = carried(), carried()
    xs, gys = stream(3)
    first(xs[0])
    saved = first.state_dict()
    second.load_state_dict(saved)
    wanted = expected(xs, gys)[1][0]
    for _ in range(2):
        first.load_state_dict(saved)
        assert torch.allclose(first(xs[1]), wanted)
    assert torch.allclose(second(xs[1]), wanted)
    with pytest.raises(ValueError, match="does not fit"):
        BlackBox(leaky, 3, state=(torch.zeros(1, 3), torch.zeros(1, 3))).load_state_dict(saved)


@pytest.mark.parametrize("max_rows", [1, 3])
def test_rows_in_portions(max_rows):
    layer = carried(evaluator=Local(max_rows=max_rows))
    xs, gys = stream()
    for x, gy, (_, g) in zip(xs, gys, expected(xs, gys), strict=True):
        assert close(gradient(layer, x, gy), g, 1e-8)


def test_an_exception_leaves_it_where_it_was():
    broken = [False]

    def fn(x, state):
        if broken[0]:
            raise RuntimeError("no answer")
        return leaky(x, state)

    layer = BlackBox(fn, 3, state=torch.zeros(1, 3).double(), seed=0)
    xs, gys = stream(2)
    layer(xs[0])
    broken[0] = True
    with pytest.raises(BoxError, match="no answer"):
        layer(xs[1])
    broken[0] = False
    assert torch.allclose(layer(xs[1]), expected(xs, gys)[1][0])


@pytest.mark.parametrize("structure", [None, Sequence()])
def test_a_row_whose_output_and_state_are_not_finite_stays_where_it_was(structure):
    broken = [False]

    def fn(x, state):
        total, count = state
        y, total, count = (x if structure is None else x.flatten(1)) + total, total + 1, count + 1
        if broken[0]:
            y[1], total[1] = torch.nan, torch.nan
        return y.view(x.shape), (total, count)

    start = (torch.zeros(1, 3), torch.zeros(1, dtype=torch.long))
    layer = BlackBox(fn, 3, state=start, structure=structure, seed=0)
    x = torch.zeros(2, 3) if structure is None else torch.zeros(2, 1, 3)
    layer(x)
    broken[0] = True
    with pytest.warns(UserWarning, match="no finite output"):
        layer(x)
    broken[0] = False
    assert layer(x).flatten(1).tolist() == [[2, 2, 2], [1, 1, 1]]
    assert layer.memory.before(2, True, torch.device("cpu"))[1].tolist() == [3, 2]


def test_a_stream_goes_on_after_memory_ran_out():
    most = [100]

    def fn(x, state):
        if len(x) > most[0]:
            raise MemoryError
        return leaky(x, state)

    layer = BlackBox(fn, 3, state=torch.zeros(1, 3).double(), policy=Fixed(1e-5), seed=0)
    xs, gys = stream()
    for i, (x, gy, (_, g)) in enumerate(zip(xs, gys, expected(xs, gys), strict=True)):
        if i == 2:
            most[0] = 3
            with pytest.warns(UserWarning, match="out of memory"):
                assert close(gradient(layer, x, gy), g, 1e-8)
        else:
            assert close(gradient(layer, x, gy), g, 1e-8)


def test_no_call_has_more_rows_than_the_box_takes():
    sizes = []

    def fn(x, state):
        sizes.append(len(x))
        return leaky(x, state)

    state = torch.zeros(1, 3).double()
    layer = BlackBox(fn, 3, state=state, policy=Fixed(1e-5), evaluator=Local(max_rows=3), seed=0)
    xs, gys = stream()
    for x, gy, (_, g) in zip(xs, gys, expected(xs, gys), strict=True):
        assert close(gradient(layer, x, gy), g, 1e-8)
    assert max(sizes) == 3


def test_inference_mode():
    layer = carried()
    xs, gys = stream(3)
    with torch.inference_mode():
        layer(xs[0])
    assert close(gradient(layer, xs[1], gys[1]), expected(xs, gys)[1][1], 1e-8)
    with torch.inference_mode():
        assert torch.allclose(layer(xs[2]), expected(xs, gys)[2][0])


def test_a_step_that_was_skipped():
    layer = carried()
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    checkpoint(layer, x, use_reentrant=False)
    with pytest.raises(BoxError, match="without a backward pass"):
        checkpoint(layer, x, use_reentrant=False).sum().backward()
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    checkpoint(layer, x, use_reentrant=False)
    layer.reset()
    checkpoint(layer, x, use_reentrant=False).sum().backward()


def test_transforms_are_refused():
    layer = carried()
    with pytest.raises(BoxError, match=r"torch\.func"):
        torch.func.grad(lambda x: layer(x).sum())(torch.randn(4, 3).double())


def fragile(x, state):
    state += 1.0  # writes into its state, also where it fails
    if bool((x[:, 0] > 5).any()):
        raise RuntimeError("too high")
    state += x - 1.0
    return torch.tanh(state), state


@pytest.mark.filterwarnings("ignore:.*(got no finite output|were asked again)")
@pytest.mark.parametrize("evaluator", [Local(), Local(max_rows=1), Local(max_rows=7), Threads(2)], ids=str)
@pytest.mark.parametrize("structure", [None, Sequence()])
def test_a_row_that_raises_keeps_its_state_and_the_others_go_on(evaluator, structure):
    def fn(x, state):
        y, state = fragile(x.flatten(1), state)
        return y.view(x.shape), state

    start = torch.zeros(1, 2)
    layer = BlackBox(fn, 2, state=start, structure=structure, evaluator=evaluator, policy=Fixed(1e-2), seed=0)
    expected, ok = torch.zeros(64, 2), torch.ones(64, dtype=torch.bool)
    for step in range(3):
        x = torch.randn(64, 2)
        x[[5, 40], 0] = 9.0 if step == 1 else 1.0
        ok[[5, 40]] = step != 1
        expected[ok] += x[ok]
        shape = x.shape if structure is None else (64, 1, 2)
        g = gradient(layer, x.view(shape), torch.ones(shape)).view(64, 2)
        assert torch.equal(layer.last_ok, ok)
        assert close(g, torch.where(ok[:, None], 1 - torch.tanh(expected).square(), 0), 1e-2)
        after = layer.memory.before(64, True, torch.device("cpu"))[0]
        assert torch.allclose(after, expected, atol=1e-6)
    evaluator.close()


def test_a_box_that_is_broken_is_found_out_with_a_few_rows():
    calls = []

    def fn(x, state):
        calls.append(len(x))
        raise RuntimeError("broken")

    layer = BlackBox(fn, 2, state=torch.zeros(1, 2), evaluator=Local(retries=0))
    with pytest.raises(BoxError, match="broken"):
        layer(torch.randn(64, 2))
    assert calls == [64] + 8 * [8] + 8 * [1]
    assert layer.memory.get_extra_state()["train"] is None


def test_without_errors_there_is_one_call():
    calls = []

    def fn(x, state):
        calls.append(len(x))
        return leaky(x, state)

    BlackBox(fn, 3, state=torch.zeros(1, 3))(torch.randn(20, 3))
    assert calls == [20]
