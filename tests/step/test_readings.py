"""A layer that takes several readings of every point: noise, costs, boxes with seeds and with memory."""

import copy
import math

import numpy as np
import pytest
import torch

from bondgrad import BlackBox, GraphedStep, Simultaneous, check
from bondgrad.evaluators import Local, Threads
from bondgrad.networks import ffnn
from bondgrad.policies import Calibrated, Fixed
from bondgrad.structure import Sequence
from bondgrad.testing import Subject
from bondgrad.testing.boxes import Linear, Waves
from bondgrad.testing.conformance import check_cost, check_failures, check_limits, trials
from tests.calling.test_memory import Device, expected, leaky, stream
from tests.helpers import close, gradient, noisy, on_each_device, same_state
from tests.torch_support.test_graphs import Trainer, batches

ESTIMATORS = {"central": "central", "forward": "forward", "simultaneous": Simultaneous(4)}


def deviation(repeats, estimator, sigma=0.1, **options):
    """The deviations of gradients and of outputs from those of the box without its noise."""
    layers = (
        BlackBox(fn, 4, estimator=estimator, policy=Fixed(0.1), seed=0, **options)
        for fn in (noisy(torch.sin, sigma), torch.sin)
    )
    x, gy = torch.randn(400, 4, generator=torch.Generator().manual_seed(1)), torch.ones(400, 4)
    found = []
    for layer, readings in zip(layers, (repeats, 1), strict=True):
        layer.repeats = readings
        at = x.clone().requires_grad_()
        y = layer(at)
        found.append((torch.autograd.grad(y, at, gy)[0], y.detach()))
    return [float((noisy - clean).square().mean().sqrt()) for noisy, clean in zip(*found, strict=True)]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_noise_falls_with_the_root_of_the_readings(estimator):
    once, often = (deviation(repeats, ESTIMATORS[estimator]) for repeats in (1, 16))
    for one, many in zip(once, often, strict=True):
        assert abs(one / many / 4 - 1) < 0.12


def test_each_reading_of_a_box_with_a_seed_has_other_noise_that_cancels():
    """Both ends have the same noise, so that a sine has its slope; the outputs have less noise the more readings."""

    def fn(x: torch.Tensor, seed: int):
        return torch.sin(x) + torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))

    x = torch.randn(500, 3)
    layer = BlackBox(fn, 3, policy=Fixed(1e-2), seed=0, repeats=9)
    assert close(gradient(layer, x, torch.ones_like(x)), x.cos(), 1e-3)
    assert abs(float((layer(x) - x.sin()).std()) * 3 - 1) < 0.1


class Drifting:
    """Its answer rises with every row that it is asked, one at a time."""

    def __init__(self, drift):
        self.drift, self.asked = drift, 0

    def __call__(self, x: torch.Tensor):
        assert len(x) == 1
        self.asked += 1
        return torch.sin(x) + self.drift * self.asked


def test_a_steady_drift_comes_in_once_however_many_readings():
    """A pair is one row apart. Were all readings of one end before those of the other, it would be `repeats` rows."""
    x, gy = torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)
    gy[:, 0] = 1
    for repeats in (1, 8):
        layer = BlackBox(Drifting(1e-4), 3, policy=Fixed(0.01), seed=0, repeats=repeats, evaluator=Local(max_rows=1))
        g = gradient(layer, x, gy)
        assert torch.allclose(g[:, 1:].abs(), torch.full((2, 2), 1e-4 / 0.02, dtype=torch.float64))


def test_costs_are_counted():
    requests = []

    class Counting(Local):
        def evaluate(self, request):
            requests.append((request.purpose, len(request.points)))
            return super().evaluate(request)

    layer = BlackBox(torch.sin, 3, policy=Fixed(0.1), repeats=5, evaluator=Counting())
    gradient(layer, torch.randn(8, 3), torch.randn(8, 3))
    assert requests == [("base", 40), ("gradient", 240)]
    assert layer.stats.evaluations == 280 == layer.gradient_evaluations(8)
    assert layer.policy_state.schedule.credit == 0  # nothing is measured
    assert layer.stats.calls == 2


def test_trials_and_searches_are_counted_with_all_their_readings():
    layers = [BlackBox(noisy(torch.sin, 1e-3), 6, 6, structure="auto", seed=0, repeats=repeats) for repeats in (1, 4)]
    for layer in layers:
        for _ in range(3):
            gradient(layer, torch.randn(16, 6), torch.randn(16, 6))
    once, often = (layer.policy_state.schedule for layer in layers)
    assert often.spent == 4 * once.spent > 0
    assert often.credit == 4 * once.credit > 0
    assert layers[0].structure.groups(6, 6).count == layers[1].structure.groups(6, 6).count == 1


def test_the_watch_over_a_structure_looks_as_often_and_costs_what_its_readings_cost():
    once, often = (
        BlackBox(torch.sin, 6, 6, structure="auto", seed=0, repeats=repeats, policy=Fixed(0.1)) for repeats in (1, 4)
    )
    for _ in range(50):
        x, gy = torch.randn(16, 6), torch.randn(16, 6)
        assert torch.equal(gradient(once, x, gy), gradient(often, x, gy))
        assert often.stats.evaluations == 4 * once.stats.evaluations
    assert (often.tracker.steps, often.tracker.budget) == (once.tracker.steps, once.tracker.budget)
    assert once.stats.evaluations > 50 * 16 * 3  # some were spent on watching


def test_what_measures_noise_sees_that_of_the_mean():
    found = []
    for repeats in (1, 16):
        layer = BlackBox(noisy(torch.sin, 0.02), 3, seed=0, repeats=repeats)
        for _ in range(40):
            x = torch.randn(64, 3)
            gradient(layer, x, torch.randn(64, 3))
        auto = BlackBox(noisy(torch.sin, 0.02), 3, policy="bond", noise="auto", seed=0, repeats=repeats)
        gradient(auto, torch.randn(64, 3), torch.randn(64, 3))
        found.append(
            (layer.stats.health.noise, float(layer.policy_state.noise) ** 0.5, auto.policy_state.schedule.noise)
        )
    for once, often in zip(*found, strict=True):
        assert 2.5 < once / often < 6.5


def test_repeats_can_be_assigned_and_read():
    layer = BlackBox(torch.sin, 3, policy=Fixed(0.1))
    before = layer.version
    assert layer.repeats == 1
    layer.repeats = 4
    assert layer.version != before
    layer.evaluator = Threads(2)
    assert layer.repeats == 4
    assert copy.deepcopy(layer).repeats == 4
    gradient(layer, torch.randn(2, 3), torch.randn(2, 3))
    assert layer.stats.evaluations == 4 * 2 * 7
    for wrong in (0, 1.5, "many"):
        with pytest.raises(ValueError, match="repeats must be"):
            layer.repeats = wrong
        with pytest.raises(ValueError, match="repeats must be"):
            BlackBox(torch.sin, 3, repeats=wrong)
    assert layer.repeats == 4


@pytest.mark.parametrize("make", [Local, lambda: Threads(3, max_rows=1)])
@pytest.mark.parametrize("batch", [7, 8])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_eager_is_the_same(make, batch, estimator):
    x, gy, found = torch.randn(3, batch, 4), torch.randn(3, batch, 4), []
    for eager in (False, True):
        with make() as evaluator:
            options = {"estimator": ESTIMATORS[estimator], "seed": 0, "policy": "bond"}
            layer = BlackBox(torch.sin, 4, 4, eager=eager, repeats=3, evaluator=evaluator, **options)
            found.append((torch.stack([gradient(layer, *pair) for pair in zip(x, gy, strict=True)]), layer.stats))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1].evaluations == found[1][1].evaluations


def test_what_eager_wasted_is_counted_with_all_readings():
    layer = BlackBox(torch.sin, 4, 4, eager=True, repeats=3, policy="bond")
    layer(torch.randn(5, 4, requires_grad=True))
    assert layer.stats.wasted == 3 * 5 * 8


def test_sequences_contexts_and_limits():
    asked = []

    def fn(x: torch.Tensor, shift: torch.Tensor):
        asked.append(x)
        return x.cumsum(1).sin() + shift

    x, shift, gy = torch.randn(4, 6, 2), torch.randn(4, 6, 2), torch.randn(4, 6, 2)
    options = {"structure": Sequence(), "policy": Fixed(1e-3), "seed": 0, "limits": (-1, 1)}
    once, often = (gradient(BlackBox(fn, 2, repeats=repeats, **options), x, gy, shift) for repeats in (1, 4))
    assert torch.allclose(once, often, atol=1e-3)
    assert max(float(points.abs().max()) for points in asked) <= 1


@pytest.mark.parametrize("repeats", [2, 3])
@pytest.mark.parametrize("make", ["explicit", "internal"])
def test_boxes_with_memory(make, repeats):
    if make == "explicit":
        layer = BlackBox(leaky, 3, state=torch.zeros(1, 3, dtype=torch.float64), policy=Fixed(1e-5), repeats=repeats)
    else:
        layer = BlackBox(Device(), 3, policy=Fixed(1e-5), repeats=repeats)
    xs, gys = stream()
    for x, gy, (y, g) in zip(xs, gys, expected(xs, gys), strict=True):
        at = x.clone().requires_grad_()
        answer = layer(at)
        assert torch.allclose(answer, y)
        assert close(torch.autograd.grad(answer, at, gy)[0], g, 1e-8)
    assert layer.stats.evaluations == 5 * 4 * 7 * repeats


def test_a_box_with_memory_goes_on_from_the_last_reading_that_came():
    calls = []

    def fn(x: torch.Tensor, state: torch.Tensor):
        calls.append(len(x))
        new = state + 10.0 ** len(calls)
        y = x + new
        if len(calls) == 2:  # the last reading of the first row, and both tries of it
            y[0], new[0] = math.nan, math.nan
        return y, new

    layer = BlackBox(fn, 1, state=torch.zeros(1, 1), repeats=2, evaluator=Local(retries=0))
    with torch.no_grad():
        y = layer(torch.zeros(3, 1))
        assert y.flatten().tolist() == [10, 55, 55]  # the first row has one reading
        assert layer(torch.zeros(3, 1)).flatten().tolist() == [10 + 5500, 100 + 5500, 100 + 5500]


def test_a_box_that_keeps_its_state_is_asked_at_both_ends_in_turns():
    rows = []

    class Watched(Device):
        def __call__(self, x: np.ndarray):
            rows.append(float(x[0, 0]))
            return super().__call__(x)

    device = Watched()
    layer = BlackBox(device, 1, policy=Fixed(0.1), repeats=3)
    gradient(layer, torch.zeros(2, 1), torch.ones(2, 1))
    assert np.sign(rows[:3]).tolist() == [0, 0, 0]
    signs = np.sign(rows[3:])
    assert signs.tolist() in ([1, -1] * 3, [-1, 1] * 3)


@pytest.mark.filterwarnings("ignore:.* rows? (was|were) asked again")
def test_failures_that_other_readings_make_up_for_cost_nothing():
    generator = torch.Generator().manual_seed(0)

    def fn(x: torch.Tensor):
        return torch.sin(x).masked_fill(torch.rand(len(x), 1, generator=generator) < 0.2, math.nan)

    x, gy = torch.randn(50, 3), torch.randn(50, 3)
    layer = BlackBox(fn, 3, policy=Fixed(1e-2), repeats=8, evaluator=Local(retries=0))
    assert close(gradient(layer, x, gy), x.cos() * gy, 1e-3)
    assert layer.stats.failures == 0


def test_a_module_that_always_fails_costs_the_others_nothing():
    def fn(x: torch.Tensor):
        return torch.cat((torch.sin(x[:, :1]), x[:, 1:] * math.nan), 1)

    x = torch.randn(8, 2)
    layer = BlackBox(fn, 2, policy=Fixed(1e-2), repeats=3, structure=torch.eye(2).bool())
    with pytest.warns(UserWarning, match="got no finite output"):
        g = gradient(layer, x, torch.ones(8, 2))
    assert torch.equal(g[:, 1], torch.zeros(8))


@pytest.mark.parametrize("policy", [lambda: Fixed(1e-3), Calibrated])
def test_conformance(policy):
    subject = Subject(lambda n: Simultaneous(n), policy, torch.float64, 2, simultaneous=True)
    for box in (Linear(), Waves()):
        for once, often in zip(trials(subject, box), trials(subject, box, repeats=2), strict=True):
            assert torch.allclose(once.g, often.g, rtol=1e-6, atol=1e-8)
            assert len(often.asked) == 2 * len(once.asked)
    for checked in (check_cost, check_limits, check_failures):
        checked(subject)


def test_check_keeps_to_its_budget():
    layer = BlackBox(torch.sin, 3, policy=Fixed(1e-3), repeats=3)
    found = check(layer, torch.randn(100, 3), budget=10_000)
    assert found.verdict == "right"
    assert found.evaluations <= 10_000
    least = []
    for repeats in (1, 3):
        layer.repeats = repeats
        with pytest.raises(ValueError, match="budget must be at least") as error:
            check(layer, torch.randn(100, 3), budget=50)
        least.append(int(str(error.value).split()[5]))
    assert least[1] == 3 * least[0]


@pytest.mark.filterwarnings("ignore")  # the compiler itself uses what it calls deprecated
def test_compiled_steps_are_the_same():
    def make():
        torch._dynamo.reset()
        return BlackBox(noisy(torch.sin, 0.1), 3, 3, policy=Fixed(0.1), repeats=4, seed=0)

    x, gy = torch.randn(5, 3), torch.randn(5, 3)
    assert torch.equal(
        gradient(make(), x, gy), gradient(torch.compile(make(), backend="aot_eager", fullgraph=True), x, gy)
    )


@on_each_device
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_graphed_steps_are_the_same_and_are_captured_again_with_other_readings(device, estimator):
    def make_box():
        options = {"estimator": ESTIMATORS[estimator], "policy": "bond", "seed": 0}
        return BlackBox(ffnn([5, 50, 4]), 5, 4, repeats=3, **options)

    eager, graphed = Trainer(device, make_box), Trainer(device, make_box)
    step = GraphedStep(graphed.step, graphed.model, graphed.optimizer)
    for data, repeats in ((batches(device, 8), 3), (batches(device, 8), 2)):
        eager.box.repeats = graphed.box.repeats = repeats
        eager.run(eager.step, data)
        graphed.run(step, data)
    assert same_state(graphed.result(), eager.result())
    assert graphed.box.stats[:3] == eager.box.stats[:3]
    assert step.captures == (2 if device == "cuda" else 0)
