"""`Calibrated(readings=k)`: the noise that is left at the best steps is averaged, as far as that is worth it."""

import io
import math
import warnings

import pytest
import torch

from bondgrad import BlackBox
from bondgrad.evaluators import Threads
from bondgrad.policies import Calibrated, Differences, Fixed, Observation, Steps, StepTrial
from bondgrad.policies._best_step import least_readings
from bondgrad.policies._trial_sums import SlopeErrors
from tests.helpers import gradient, noisy, same_state
from tests.policies.test_calibrated import D, K, exact_gradient, layer_of, problems, signs_right, waves
from tests.policies.test_new_steps import by_search, round_of


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """More trials than usual, since there are fewer steps."""
    monkeypatch.setattr(Calibrated, "share", 0.2)


@pytest.mark.parametrize("readings", [0, -1, 1.5, "two", None, True])
def test_a_number_that_is_none_is_refused(readings):
    with pytest.raises((ValueError, TypeError), match="readings"):
        Calibrated(readings=readings)


def test_what_it_is_called():
    assert repr(Calibrated()) == repr(Calibrated(readings=1)) == "Calibrated()"
    assert repr(Calibrated(readings=8)) == "Calibrated(readings=8)"


# ---- how many, by numbers


def errors_of(noise, bending=0.0, square=1.0):
    noise, bending, square = (
        torch.as_tensor(value, dtype=torch.float64).expand(3) for value in (noise, bending, square)
    )
    zero = torch.zeros(3, dtype=torch.float64)
    return SlopeErrors(noise, bending, zero, square, zero > 0, zero, zero, zero, zero > 0, zero + 100)


def by_doubling(noise, bending, square, now, most, order):
    """The same by plain arithmetic, of one input."""
    readings = 1
    while readings < most and by_search(noise * now / readings, bending, square=square, order=order)[1] > 0.01 * square:
        readings = min(2 * readings, most)
    return readings


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("most", [1, 2, 5, 8, 64])
@pytest.mark.parametrize("now", [1, 2, 8])
def test_readings_are_doubled_until_a_hundredth_of_the_squared_slopes_is_wrong(now, most, order):
    for noise in (0.0, 1e-3, 0.011, 0.03, 0.1, 1.0, 10.0):
        for bending in (0.0, 1e-3, 0.1):
            found = least_readings(errors_of(noise, bending, 2.0), torch.tensor(float(now)), most, order)
            assert found.dtype == torch.float32
            assert int(found) == by_doubling(noise, bending, 2.0, now, most, order)


@pytest.mark.parametrize(("noise", "readings"), [(0.039, 1), (0.041, 2), (0.079, 2), (0.081, 4), (0.31, 8), (9.0, 8)])
def test_longer_steps_come_first(noise, readings):
    """Without bending, steps twice as long leave a quarter of the noise."""
    assert int(least_readings(errors_of(noise), torch.ones(()), 8, 2)) == readings
    assert int(least_readings(errors_of(noise / 4), torch.full((), 4.0), 8, 2)) == readings  # with four there are now


def test_the_input_in_the_middle_decides_and_those_without_any_slope_or_noise_have_no_say():
    noise = torch.tensor([1e-6, 0.07, 100.0])
    assert int(least_readings(errors_of(noise), torch.ones(()), 8, 2)) == 2
    some = errors_of(torch.tensor([0.0, 0.0, 0.07]), square=torch.tensor([0.0, 0.0, 1.0]))
    assert int(least_readings(some, torch.ones(()), 8, 2)) == 2


@pytest.mark.parametrize("rough", [0.1, 3.0])
def test_after_a_round_noise_is_that_of_as_many_readings_as_there_will_be(rough):
    """Noise of a tenth, of which a quarter is left over twice the step: so it needs four readings to be a hundredth."""
    usual = round_of([10.0], rough=rough)
    assert float(usual["readings"]) == 1
    found = round_of([10.0], most=8, rough=rough)
    assert float(found["readings"]) == 4
    assert float(found["noise"]) == pytest.approx(float(usual["noise"]) / 4)
    fewer = round_of([10.0], noise=0.25, most=8, readings=8.0)  # as it would be 2 with a single one, of a slope of 10
    assert float(fewer["readings"]) == 8
    assert float(fewer["noise"]) == pytest.approx(0.25 * 0.1**2)
    none = round_of([10.0], noise=0.01, most=8, readings=8.0)  # 0.08, and a quarter of it is 1/500 of the square
    assert float(none["readings"]) == 1
    assert float(none["noise"]) == pytest.approx(8 * 0.01 * 0.1**2)


def test_boxes_that_jump_have_one_reading():
    assert float(round_of([10.0], most=8, jumps=2.0, rough=2.0)["readings"]) == 1
    assert float(round_of([10.0], most=8, jumps=1.0, rough=0.1)["readings"]) == 4  # it does not any more
    assert float(round_of([10.0] * 4, most=8, jumps=[2.0] * 3 + [0.0], rough=2.0)["readings"]) == 4  # for the last one


@pytest.mark.parametrize(("repeated", "readings"), [(0.0, 1), (0.1, 8)])
def test_readings_are_for_boxes_that_answer_at_random(repeated, readings):
    policy, step, one = Calibrated(readings=8), torch.tensor([0.5]), torch.ones(1)
    state = policy.init(1) | {"step": step, "spread": one}
    slopes = (
        torch.randn(3, 16, 1, generator=torch.Generator().manual_seed(0)) * torch.tensor([2, 1, 0.5])[:, None, None]
    )
    sound, g = torch.full((16, 1), True), torch.zeros(16, 1)
    trial = StepTrial(Differences(), one, one, step.expand(16, 1), slopes, sound, torch.full((16, 1), repeated), one[0])
    summary = policy.summarize(state, Observation(g, g, Steps(step, step, step, step), Differences(), trial))
    found = policy.observe(state, summary, 16, Differences())
    assert float(found["round"]) == 1
    assert policy.readings(found) == readings
    assert Calibrated().readings(found) is None


# ---- in training


def taken(fn, n=200, readings=8, rows=32, k=K, **settings):
    """The layer after n steps, and how many readings there were in each of them."""
    layer, found = layer_of(fn, k=k, policy=Calibrated(readings=readings), **settings), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for x, gy in problems(n, rows=rows, k=k, dtype=torch.float32):
            gradient(layer, x, gy)
            found.append(layer.repeats)
    return layer, found


def test_where_noise_is_small_one_reading_is_enough():
    assert set(taken(noisy(waves, 1e-4))[1]) == {1}


def test_where_it_is_large_there_are_more_but_not_more_than_allowed():
    for readings in (2, 5, 8):
        layer, found = taken(noisy(waves, 0.3), readings=readings)
        assert found[0] == 1
        assert set(found[50:]) == {readings}
        assert layer.policy_state.readings == readings


def test_between_them_there_are_some():
    assert 1 < sum(taken(noisy(waves, 0.015))[1][50:]) / 150 < 8


@pytest.mark.parametrize(
    "fn",
    [
        waves,
        lambda x: waves(x).mul(3).round().div(3),
        lambda x: (2 * waves(x)).round(),
        lambda x: waves(x) + 0.05 * torch.sin(1e4 * x.sum(1, keepdim=True)),
    ],
    ids=["smooth", "rounded", "staircase", "rough"],
)
def test_boxes_that_always_answer_alike_are_asked_once(fn):
    assert set(taken(fn)[1]) == {1}


def test_a_noisy_box_that_jumps_is_asked_once():
    layer, found = taken(noisy(lambda x: torch.round(2 * x), 1e-2), k=D)
    assert layer.policy_state.jumps.all()
    assert set(found) == {1}


@pytest.mark.parametrize("settings", [{}, {"eager": True}], ids=["usual", "eager"])
def test_every_reading_is_counted(settings):
    rows = []

    def fn(x: torch.Tensor):
        rows.append(len(x))
        return noisy_waves(x)

    noisy_waves = noisy(waves, 0.3)
    layer, _ = taken(fn, 50, **settings)
    assert layer.stats.evaluations == sum(rows)
    while layer.trial_due:
        gradient(layer, *next(problems(1, dtype=torch.float32)))
    before = layer.stats.evaluations
    gradient(layer, *next(problems(1, dtype=torch.float32)))
    assert layer.stats.evaluations - before == 8 * 32 * (1 + 2 * D)


@pytest.mark.parametrize("settings", [{}, {"eager": True}], ids=["usual", "eager"])
def test_readings_in_threads(settings):
    """The order of random numbers differs there, so that the gradients are only as good as these readings make them."""
    right = {}
    for readings in (1, 8):
        with Threads(2) as threads:
            layer, found = taken(noisy(waves, 0.3), 150, readings, evaluator=threads, **settings)
            assert found[-1] == readings
            (x, gy), *_ = problems(1, rows=300, seed=4, dtype=torch.float32)
            right[readings] = signs_right(gradient(layer, x, gy), exact_gradient(waves, x, gy))
    assert right[8] > right[1] + 0.03


class Remembering:
    """A noisy box with random numbers that depend on how many rows it was asked alone."""

    def __init__(self, sigma, asked=0):
        self.sigma, self.asked = sigma, asked

    def __call__(self, x: torch.Tensor):
        numbers = torch.arange(self.asked, self.asked + len(x), dtype=torch.float64)[:, None] + torch.arange(K) / K
        self.asked += len(x)
        return waves(x) + self.sigma * (2**0.5 * torch.sin(1e4 * numbers**1.5)).to(x)


@pytest.mark.parametrize("n", [3, 20, 60])
def test_training_is_resumed_bit_for_bit(n):
    box = Remembering(0.3)
    layer, _ = taken(box, n)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    again = layer_of(Remembering(0.3, box.asked), policy=Calibrated(readings=8))
    again.load_state_dict(torch.load(file))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for x, gy in problems(40, seed=2, dtype=torch.float32):
            assert torch.equal(gradient(layer, x, gy), gradient(again, x, gy))
            assert layer.repeats == again.repeats
    assert again.repeats == 8
    assert same_state(layer.state_dict(), again.state_dict())


def test_the_standard_error_is_that_of_the_mean_ofleast_readings():
    """A plane, of which steps may be as long as one likes: what is left is noise alone."""
    weight = torch.randn(D, K, generator=torch.Generator().manual_seed(0))
    for readings in (1, 8):
        layer, found = taken(noisy(lambda x: x @ weight.to(x), 3.0), 200, readings)
        assert found[-1] == readings
        ratios, sizes = [], []

        def look(layer, step, ratios=ratios, sizes=sizes):
            error = layer.standard_error(step)
            ratios.append((step.g - step.gy @ weight.T) / error)
            sizes.append(error * layer.policy_state.step / step.gy.norm(dim=1, keepdim=True))

        layer.register_step_hook(look)
        for x, gy in problems(60, seed=2, dtype=torch.float32):
            gradient(layer, x, gy)
        assert float(torch.stack(ratios).square().mean().sqrt()) == pytest.approx(1, abs=0.15)
        assert float(torch.stack(sizes).median()) == pytest.approx(3 * math.sqrt(0.5 / readings), rel=0.15)


@pytest.mark.parametrize("settings", [{}, {"eager": True}], ids=["usual", "eager"])
def test_the_layer_knows_at_once_how_many_readings_the_policy_wants(settings):
    """A captured step is captured again then, and not only after the next trial."""
    layer, readings, versions = layer_of(noisy(waves, 0.3), policy=Calibrated(readings=8), **settings), [], []
    for x, gy in problems(10, dtype=torch.float32):
        gradient(layer, x, gy)
        readings.append(int(layer.policy_state.readings))
        versions.append(layer.version)
        assert layer.repeats == readings[-1]
    changed = [i for i in range(1, 10) if readings[i] != readings[i - 1]]
    assert changed
    assert all(versions[i] != versions[i - 1] for i in changed)


def test_gradients_that_are_accumulated_when_readings_change():
    """All forward passes come before the backward pass with the trial that asks for more readings."""
    layer = layer_of(noisy(waves, 0.3), policy=Calibrated(readings=8))
    for _ in range(10):
        passes = [(x.requires_grad_(), gy) for x, gy in problems(3, dtype=torch.float32)]
        outputs = [(layer(x), x, gy) for x, gy in passes]
        for y, x, gy in outputs:
            assert torch.autograd.grad(y, x, gy)[0].isfinite().all()
    assert layer.repeats == 8
    assert 0.5 < float(layer.policy_state.noise.sqrt() * layer.policy_state.unit) / (0.3 * math.sqrt(0.5 / 8)) < 2


def test_without_a_say_of_the_policy_it_is_as_the_layer_is_told():
    layer = BlackBox(noisy(waves, 0.3), D, K, policy=Calibrated(), repeats=3, seed=0)
    for x, gy in problems(30, dtype=torch.float32):
        gradient(layer, x, gy)
    assert layer.repeats == 3
    assert layer.policy_state.readings == 1


def test_readings_are_said_in_one_place():
    with pytest.raises(ValueError, match="not both"):
        BlackBox(waves, D, K, policy=Calibrated(readings=8), repeats=4)
    layer = BlackBox(noisy(waves, 0.3), D, K, policy=Calibrated(readings=8), seed=0)
    with pytest.raises(ValueError, match="not both"):
        layer.repeats = 2
    layer.driver.repeats = 8  # as the policy might have chosen
    layer.policy = Fixed(0.1)
    assert layer.repeats == 1
    layer.repeats = 3
    with pytest.raises(ValueError, match="not both"):
        layer.policy = Calibrated(readings=2)
    assert isinstance(layer.policy, Fixed)
    layer.policy = "calibrated"
    assert layer.repeats == 3
