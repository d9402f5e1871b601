"""Finding out which outputs depend on which inputs, and noticing when that changes."""

import copy

import numpy as np
import pytest
import torch

from bondgrad import BlackBox
from bondgrad.evaluators import Answer, Local
from bondgrad.structure import colour, detect, lower_bound
from bondgrad.testing.boxes import Sparse
from tests.calling.test_memory import Device
from tests.helpers import gradient, noisy, same_state
from tests.patterns import PATTERNS, blocks, shuffled

# ---- detect


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_boxes(name, dtype):
    pattern = PATTERNS[name]
    found = detect(Sparse(pattern), torch.randn(50, pattern.shape[1], dtype=dtype))
    assert torch.equal(found.depends, pattern)
    assert found.evaluations <= 50 + 16 * 8 + 8 * pattern.shape[1]
    assert found.groups == int(colour(pattern).max()) + 1
    assert found.lower_bound == lower_bound(pattern)


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
    assert 0.2 * hidden < found.unseen < 5 * hidden


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
@pytest.mark.filterwarnings("ignore:a BlackBox with", "ignore:noise on the outputs")  # within so narrow a range
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
    assert layer.tracker.steps < 600  # there was a look


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


def test_the_least_change_that_is_seen():
    """Four standard deviations of a difference are suspected; 2.326 more are missed by one in a hundred."""
    found = detect(noisy(torch.sin, 1e-2), torch.randn(50, 3))
    assert torch.allclose(found.least, found.noise * 2**0.5 * (4 + 2.3263), rtol=1e-4)
    assert (found.false_alarm, found.miss) == (0.01, 0.01)
    assert torch.allclose(found.noise, torch.tensor(1e-2), rtol=0.4)


def test_requests_fit_into_the_memory_that_there_is():
    """A row has two inputs, two outputs and a context, of four bytes each: ten rows."""
    calls = []

    def fn(x, gain):
        calls.append(len(x))
        return x * gain

    detect(fn, torch.randn(20, 2), torch.ones(20, 1), evaluator=Local(memory=200))
    assert max(calls[1:]) == 10


def test_one_row_with_its_context():
    found = detect(lambda x, gain: x * gain, torch.ones(1, 3), torch.ones(1, 1))
    assert torch.equal(found.depends, torch.eye(3).bool())


@pytest.mark.parametrize(("dtype", "eps"), [(torch.float32, 2**-23), (torch.float64, 2**-52)])
def test_inputs_that_do_not_vary_move_as_far_as_rounding_asks_for(dtype, eps):
    """By (3 eps)^(1/3), of x or of the answers, whichever have fewer digits."""
    for answers in (torch.float32, torch.float64):
        seen = []

        def fn(x, seen=seen, answers=answers):
            seen.append(x.clone())
            return x.to(answers)

        assert detect(fn, torch.ones(2, 1, dtype=dtype)).depends.all()
        step = (3 * max(eps, torch.finfo(answers).eps)) ** (1 / 3)
        assert float((torch.cat(seen) - 1).abs().max()) == pytest.approx(step, rel=1e-4)


def test_a_device_with_memory_is_refused():
    with pytest.raises(ValueError, match="without memory"):
        detect(Device(), torch.randn(5, 3))


@pytest.mark.parametrize(
    ("x", "error"), [(torch.randn(3), ValueError), (torch.randn(2, 3, 4), ValueError), (np.ones((2, 3)), TypeError)]
)
def test_rows_that_are_none(x, error):
    with pytest.raises(error, match="x must"):
        detect(torch.sin, x)


def test_rows_that_were_not_answered():
    generator = torch.Generator().manual_seed(0)

    class Forgetful(Local):
        def evaluate(self, request):
            y = super().evaluate(request).y
            ok = torch.rand(len(y), generator=generator) > 0.2
            return Answer(torch.where(ok[:, None], y, 1e3), ok)

    assert torch.equal(detect(torch.sin, torch.randn(50, 5), evaluator=Forgetful()).depends, torch.eye(5).bool())


def test_arithmetic_is_that_of_the_layer():
    weight = torch.eye(8) + 1e-4 * torch.eye(8).roll(1, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = detect(lambda x: x @ weight.T, torch.randn(50, 8))
    assert torch.equal(found.depends, weight != 0)
