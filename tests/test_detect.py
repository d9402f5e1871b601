"""Finding out which outputs depend on which inputs, and noticing when that changes."""

import copy
import warnings

import numpy as np
import pytest
import torch

from bondgrad import BlackBox
from bondgrad.evaluators import Local
from bondgrad.policies import Fixed
from bondgrad.structure import Pattern, detect
from bondgrad.testing.boxes import Sparse
from tests.helpers import close, gradient, on_each_device, same_state
from tests.test_structure import PATTERNS, banded, blocks, shuffled


def noisy(box, sigma, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def fn(x):
        y = box(x)
        return y + sigma * torch.randn(y.shape, dtype=y.dtype, generator=generator)

    return fn


# ---- detect


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_boxes(name, dtype):
    pattern = PATTERNS[name]
    found = detect(Sparse(pattern), torch.randn(50, pattern.shape[1], dtype=dtype))
    assert torch.equal(found.depends, pattern)
    assert found.evaluations <= 50 + 16 * 8 + 8 * pattern.shape[1]
    assert found.groups >= found.lower_bound


def test_rates():
    """Over many boxes with noise: false alarms as rare as stated, and no dependency missed that is large enough."""
    alarms = missed = large = 0
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        pattern = torch.rand(40, 40, generator=generator) < 0.1
        strength = 10 ** (-4 * torch.rand(40, 40, generator=generator))  # down to far below the noise
        weights = torch.where(pattern, strength, 0)
        x = torch.randn(100, 40, generator=generator)
        found = detect(noisy(lambda x, weights=weights: x @ weights.T, 1e-3, seed), x, seed=seed)
        alarms += bool((found.depends & ~pattern).any())
        # Every input goes at least as far as from the middle of its range to the end.
        change = weights * (x.amax(0) - x.amin(0)) / 2
        surely = change > found.least[:, None]
        large += int(surely.sum())
        missed += int((surely & ~found.depends).sum())
    assert alarms <= 3  # one in a hundred is stated: more than three in forty come once in 2000 times
    assert large > 1000
    assert missed <= 0.01 * large


@pytest.mark.parametrize("noise", ["uniform", "heavy tails", "in one output only"])
def test_other_noise(noise):
    pattern = shuffled(blocks(10, 3, 3))
    box = Sparse(pattern)
    generator = torch.Generator().manual_seed(0)

    def fn(x):
        y = box(x)
        drawn = torch.rand(y.shape, generator=generator)
        if noise == "uniform":
            return y + 1e-2 * drawn
        if noise == "heavy tails":
            return y + 1e-3 * torch.tan(torch.pi * 0.499 * (2 * drawn - 1)).clamp(-20, 20)
        return y + 1e-2 * drawn * (torch.arange(30) == 4)

    found = detect(fn, torch.randn(60, 30))
    assert not ((box.a.abs() > 0.1) & ~found.depends).any()
    assert (found.depends & ~pattern).sum() <= (0 if noise != "heavy tails" else 20)


def test_drift_is_no_dependency():
    pattern = blocks(10, 2, 2)
    box, time = Sparse(pattern), [0]

    def fn(x):
        steps = torch.arange(time[0], time[0] + len(x))
        time[0] += len(x)
        return noisy(box, 1e-3, time[0])(x) + 1e-5 * steps[:, None]

    assert torch.equal(detect(fn, torch.randn(60, 20)).depends, pattern)


def test_dependencies_that_often_do_not_show():
    """Each output is the largest of a few inputs: one at a time decides."""
    members = torch.rand(30, 40, generator=torch.Generator().manual_seed(0)) < 0.15

    def fn(x):
        return torch.where(members, x.unsqueeze(1), -1e3).amax(2)

    found = detect(fn, torch.randn(500, 40))
    assert not (found.depends & ~members).any()
    assert (members & ~found.depends).sum() <= 0.02 * members.sum()


def test_the_estimate_of_what_is_hidden():
    """Gates that are open in one row of fifty: the rounds end before all is seen, and that is said."""
    members = torch.rand(60, 60, generator=torch.Generator().manual_seed(0)) < 0.2

    def fn(x):
        gate = (x.roll(1, 1) > 2.05).float()  # of each input
        return (gate * x) @ members.float().T

    found = detect(fn, torch.randn(2000, 60))
    hidden = int((members & ~found.depends).sum())
    assert hidden > 50
    assert found.unseen > 0.2 * hidden


def test_rounding_is_no_dependency():
    """A convolution by Fourier transform: far outputs change, but only in their last digits."""
    kernel = torch.zeros(32)
    kernel[:3] = torch.tensor([1.0, 0.5, 0.25])

    def fn(x):
        return torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(kernel), n=32)

    found = detect(fn, torch.randn(50, 32))
    assert found.groups <= 5
    assert found.depends.sum() == 3 * 32


@pytest.mark.parametrize("x", [torch.ones(1, 4), torch.zeros(3, 4), torch.ones(5, 4) * 1e6])
def test_rows_that_are_all_alike(x):
    found = detect(lambda x: torch.cat((x[:, :1] * x[:, 1:2], x[:, 2:]), 1) + x[:, :1], x)
    expected = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]).bool()
    if float(x[0, 0]) == 0:
        expected[0, 1] = False  # zero times anything
    assert torch.equal(found.depends, expected)


@pytest.mark.parametrize("limits", [(0.1, [1, 1, 2, 2, 2]), (1e-9, 1.0), (-0.3, 7.7), (0, 5e-3)])
@pytest.mark.filterwarnings("ignore:a BlackBox with")  # noise hides much within so narrow a range
@pytest.mark.parametrize("sigma", [0, 1e-3])
def test_limits_are_kept(limits, sigma):
    seen = []

    def fn(x: np.ndarray):
        seen.append(x.copy())
        return x + sigma * np.random.default_rng(len(seen)).normal(size=x.shape)

    x = torch.cat((3 * torch.randn(30, 5), torch.tensor(limits[0]) * torch.ones(10, 5)))
    found = detect(fn, x, limits=limits)
    layer = BlackBox(fn, 5, limits=limits, structure="auto", noise=sigma or None, seed=0)
    for _ in range(50):
        gradient(layer, x, torch.randn(40, 5))
    points = np.concatenate(seen).astype(np.float64)
    assert (points >= np.array(limits[0])).all()
    assert (points <= np.array(limits[1])).all()
    if sigma == 0:
        assert torch.equal(found.depends, torch.eye(5).bool())
        assert torch.equal(layer.structure.depends, torch.eye(5).bool())


def test_no_input_leaves_its_range():
    seen = []

    def fn(x: torch.Tensor):
        seen.append(x.clone())
        return x.cumsum(1)

    x = torch.randn(50, 10)
    detect(fn, x)
    points = torch.cat(seen)
    assert (points >= x.amin(0)).all()
    assert (points <= x.amax(0)).all()


@pytest.mark.parametrize("spread", [0, 1e-7, 1e-5])
def test_columns_that_hardly_vary(spread):
    seen = []

    def fn(x: torch.Tensor):
        seen.append(x.clone())
        return torch.sin(x)

    found = detect(fn, 1e-3 + 1e-3 * spread * torch.randn(32, 4))
    assert torch.equal(found.depends, torch.eye(4).bool())
    assert (torch.cat(seen) - 1e-3).abs().max() < 1e-4  # as far as a step, and no farther


@pytest.mark.parametrize(
    "noise",
    [
        lambda x, draw: 1e-2 * x.abs() * draw(x.shape),
        lambda x, draw: 1e-3 * torch.exp(2 * x) * draw(x.shape),
        lambda x, draw: 1e-2 * draw((1, x.shape[1])),  # in each call
    ],
    ids=["with the input", "very different", "by call"],
)
def test_noise_that_differs_between_rows(noise):
    generator = torch.Generator().manual_seed(0)

    def fn(x):
        return torch.sin(x) + noise(x, lambda shape: torch.randn(shape, generator=generator))

    alarms = sum(int(detect(fn, torch.randn(60, 20), seed=seed).depends.sum()) - 20 for seed in range(10))
    assert abs(alarms) <= 1


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_evaluations_that_fail_say_nothing(bad):
    def fn(x):
        return torch.where(x.abs().amax(1, keepdim=True) > 2.3, bad, torch.sin(x))

    assert torch.equal(detect(fn, torch.randn(200, 8).clamp(-2.4, 2.4)).depends, torch.eye(8).bool())


def test_a_box_that_answers_close_by_only_is_taken_for_dense():
    def fn(x):
        return torch.where((x.sum(1, keepdim=True) - 1).abs() > 1e-3, torch.nan, x * x)

    x = torch.rand(40, 5)
    x = x / x.sum(1, keepdim=True)
    assert detect(fn, x).depends.all()


def test_one_huge_row_does_not_hide_the_others():
    def fn(x):
        return torch.stack((x[:, 0], x[:, 1] + torch.exp(10 * x[:, 0])), 1)

    assert detect(fn, torch.randn(200, 2)).depends.tolist() == [[True, False], [True, True]]


def test_digits_that_the_answer_has():
    found = detect(lambda x: 1e4 + 0.01 * torch.sin(x.double()), torch.randn(50, 5))
    assert torch.equal(found.depends, torch.eye(5).bool())


def test_modules_are_left_as_they_were():
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Dropout(), torch.nn.Tanh())
    module[2].eval()
    before = copy.deepcopy(module.state_dict())
    assert torch.equal(detect(module, torch.randn(50, 4)).depends, torch.eye(4).bool())
    assert same_state(before, module.state_dict())
    assert [m.training for m in module] == [True, True, False]


def test_the_budget_of_memory():
    most = []

    def fn(x: torch.Tensor):
        most.append(len(x))
        return torch.sin(x)

    layer = BlackBox(fn, 200, structure="auto", evaluator=Local(memory=16_000), seed=0)  # ten rows with their answers
    x, gy = torch.randn(5, 200), torch.randn(5, 200)
    for _ in range(600):
        gradient(layer, x, gy)
    assert max(most) <= 10
    assert layer.findings.credit < 600 * 5 * 2  # there was a look


def test_context_and_portions():
    calls = []

    def fn(x, gain):
        calls.append(len(x))
        return x * gain

    found = detect(fn, torch.randn(20, 6), torch.ones(20, 1), evaluator=Local(max_rows=7))
    assert torch.equal(found.depends, torch.eye(6).bool())
    assert max(calls) <= 7
    assert found.calls == len(calls)
    assert found.evaluations == sum(calls)


@pytest.mark.parametrize(("x", "error"), [(torch.randn(3), ValueError), (np.ones((2, 3)), TypeError)])
def test_rows_that_are_none(x, error):
    with pytest.raises(error, match="x must"):
        detect(torch.sin, x)


# ---- structure="auto"


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
    layer = BlackBox(Sparse(blocks(5, 2, 2)), 10, structure="auto", seed=0).eval()
    x, gy = torch.randn(4, 10), torch.randn(4, 10)
    before = copy.deepcopy(layer.state_dict())
    gradient(layer, x, gy)
    assert same_state(before, layer.state_dict())
    assert layer.stats.evaluations == 4 * 21


def test_watching_costs_about_one_percent():
    layer = BlackBox(Sparse(blocks(10, 2, 2)), 20, structure="auto", seed=0)
    x, gy = torch.randn(64, 20), torch.randn(64, 20)
    gradient(layer, x, gy)
    before, steps = layer.stats.evaluations, 400
    for _ in range(steps):
        gradient(layer, x, gy)
    spent = layer.stats.evaluations - before
    needed = steps * 64 * 5
    assert 0.003 * needed < spent - needed < 0.012 * needed


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


def train_until(done, layer, x, gy):
    for _ in range(400):
        gradient(layer, x, gy)
        if done():
            return
    raise AssertionError("nothing was noticed")


class Waking:
    """Two blocks; from some moment on the second hears the first."""

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
    assert not close(gradient(layer, x, gy), awake, 0.03)
    before = layer.stats.evaluations
    with pytest.warns(UserWarning, match="found 1 dependencies that its pattern did not have, of the outputs 7"):
        train_until(lambda: layer.structure.depends[7, 2], layer, x, gy)
    assert layer.stats.evaluations - before < 30_000
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
    with pytest.warns(UserWarning, match="of the outputs 5"):
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
    with pytest.warns(UserWarning, match="of the outputs 7"):
        train_until(lambda: layer.structure.depends[7, 2], layer, x, gy)
    assert lowest[0] == 0


def test_noise_that_falls():
    sigma = [0.5]
    generator = torch.Generator().manual_seed(0)
    layer = BlackBox(
        lambda x: torch.sin(x) + sigma[0] * torch.randn(x.shape, generator=generator), 10, structure="auto", seed=0
    )
    x, gy = torch.randn(64, 10), torch.randn(64, 10)
    with pytest.warns(UserWarning, match="saw no output react to the inputs 0, 1, 2, 3, 4, 5, 6, 7, ..."):
        gradient(layer, x, gy)
    sigma[0] = 1e-4
    with pytest.warns(UserWarning, match="dependencies that its pattern did not have"):
        train_until(lambda: layer.structure.depends.diagonal().all(), layer, x, gy)


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
    with pytest.warns(UserWarning, match="of the outputs 6"):
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
    layer = BlackBox(lambda x: torch.sin(x.cumsum(1) + x.flip(1).cumsum(1)), 6, structure="auto", seed=0)
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
