"""Inputs that are set in steps: every point is on the grid, and gradients are those of the points that were set."""

import copy

import numpy as np
import pytest
import torch

from bondgrad import BlackBox, GraphedStep, Simultaneous, check
from bondgrad.calling._inputs import Limits
from bondgrad.estimators import Estimator
from bondgrad.evaluators import Threads
from bondgrad.networks import ffnn
from bondgrad.policies import Bond, Calibrated, Fixed, Gaussian
from bondgrad.step._trials import TrialRows
from bondgrad.structure import Sequence
from bondgrad.testing import Subject
from bondgrad.testing.boxes import Linear, TanhNetwork
from bondgrad.testing.conformance import along, relative_error, slope
from tests.calling.test_memory import leaky
from tests.helpers import gradient, noisy, on_each_device, same_state
from tests.torch_support.test_graphs import Trainer, batches

LIMITS = {"without limits": None, "with limits": (-1.0, 1.3)}
ESTIMATORS = {"central": "central", "forward": "forward", "simultaneous": Simultaneous(3)}
POLICIES = {
    "calibrated": Calibrated,
    "bond": Bond,
    "error-terms": lambda: Bond("error-terms"),
    "short": lambda: Fixed(1e-6),
    "long": lambda: Fixed(0.33),
    "gaussian": lambda: Gaussian(0.1),
}


class OnGrid:
    """A box that is only ever asked at whole steps and inside its limits, and keeps the points."""

    def __init__(self, box, resolution, limits=None):
        self.box, self.resolution, self.limits = box, torch.as_tensor(resolution, dtype=torch.float64), limits
        self.asked = []

    def __call__(self, x: torch.Tensor):
        number = (x.double() - (self.limits[0] if self.limits else 0)) / self.resolution.to(x.device)
        assert float((number - number.round()).abs().max()) < 1e-3, "a point off the grid"
        if self.limits is not None:
            assert self.limits[0] <= float(x.min()), "a point below the limits"
            assert float(x.max()) <= self.limits[1], "a point above the limits"
        self.asked.append(x.clone())
        return self.box(x)


def settable(layer: BlackBox, x: torch.Tensor) -> torch.Tensor:
    """The points at which the layer evaluates its box for the rows x."""
    return Limits(layer.limits, layer.in_features, layer.resolution).clamped(x)


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_linear_box_has_its_exact_gradient(limits, policy, estimator, dtype):
    """At the first step and at later ones, with a resolution for each input."""
    box, data = Linear(), torch.Generator().manual_seed(0)
    resolution = torch.linspace(0.03, 0.2, box.in_features)
    fn = OnGrid(box, resolution, LIMITS[limits])
    options = {"resolution": resolution, "limits": LIMITS[limits], "estimator": ESTIMATORS[estimator], "seed": 0}
    layer = BlackBox(fn, box.in_features, policy=POLICIES[policy](), **options)
    for _ in range(6):
        due = layer.trial_due
        x = torch.randn(16, box.in_features, dtype=dtype, generator=data)
        x[:2] = torch.tensor([[-9.0], [9.0]])  # at both limits
        gy = torch.randn(16, box.out_features, dtype=dtype, generator=data)
        at = x.clone().requires_grad_()
        y = layer(at)
        fn.asked.clear()
        (g,) = torch.autograd.grad(y, at, gy)
        if estimator != "simultaneous":
            assert relative_error(g, box.vjp(x, gy)) < (3e-5 if dtype == torch.float32 else 1e-12)
        elif not due:
            points = torch.cat(fn.asked)
            assert relative_error(g, along(points, box, settable(layer, x), gy, None)) < 1e-4


@pytest.mark.parametrize("estimator", ["central", "forward"])
def test_the_order_of_accuracy_is_kept(estimator):
    """Steps are whole steps of the grid, which differ from those that were wanted."""
    box, sizes, errors = TanhNetwork(), (0.08, 0.04, 0.02), []
    x = torch.randn(64, box.in_features, dtype=torch.float64)
    gy = torch.randn(64, box.out_features, dtype=torch.float64)
    for size in sizes:
        layer = BlackBox(
            OnGrid(box, 0.02), box.in_features, resolution=0.02, estimator=estimator, policy=Fixed(size * 1.1)
        )
        at = settable(layer, x)
        errors.append(relative_error(gradient(layer, at, gy), box.vjp(at, gy)))
    assert abs(slope(sizes, errors) - (2 if estimator == "central" else 1)) < 0.1


def test_the_forward_pass_and_the_gradient_are_those_of_the_nearest_point():
    layer = BlackBox(lambda x: x**3, 1, resolution=0.5, policy=Fixed(1e-9))
    x = torch.tensor([[0.74], [0.76], [-0.74]], dtype=torch.float64, requires_grad=True)
    y = layer(x)
    assert y.flatten().tolist() == [0.125, 1.0, -0.125]
    y.sum().backward()
    assert torch.allclose(x.grad.flatten(), torch.tensor([1.0, 3.25, 1.0], dtype=torch.float64))  # (x+h)³ - (x-h)³


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_with_two_values_left_every_input_is_still_moved(estimator):
    fn = OnGrid(Linear(3, 2), 0.7, (0.0, 1.0))
    layer = BlackBox(fn, 3, resolution=0.7, limits=(0.0, 1.0), estimator=ESTIMATORS[estimator], policy=Fixed(1e-3))
    x, gy = torch.rand(20, 3, dtype=torch.float64), torch.randn(20, 2, dtype=torch.float64)
    g = gradient(layer, x, gy)
    assert bool((g != 0).all())
    if estimator != "simultaneous":
        assert relative_error(g, fn.box.vjp(x, gy)) < 1e-9


@pytest.mark.parametrize("resolution", [1e-9, 1e-3])
def test_a_grid_finer_than_the_rounding_of_x_changes_next_to_nothing(resolution):
    x, gy = 100 * torch.randn(16, 3), torch.randn(16, 3)
    plain, fine = (BlackBox(torch.sin, 3, seed=0, resolution=step) for step in (None, resolution))
    for _ in range(3):
        assert relative_error(gradient(fine, x, gy), gradient(plain, x, gy)) < 2e-2


@pytest.mark.parametrize("resolution", [0.01, 0.1])
@pytest.mark.parametrize("sigma", [0.0, 1e-3, 0.1])
def test_calibrated_is_not_led_astray(resolution, sigma):
    """Signs are as many as with a converter that sets anything, as far as one of its steps allows."""

    def share(step):
        layer = BlackBox(noisy(box, sigma), box.in_features, seed=0, resolution=step)
        data, right = torch.Generator().manual_seed(1), []
        for number in range(60):
            x = torch.randn(64, box.in_features, generator=data, dtype=torch.float64)
            gy = torch.randn(64, box.out_features, generator=data, dtype=torch.float64)
            g = gradient(layer, x, gy)
            exact = box.vjp(settable(layer, x), gy)
            if number >= 30:
                right.append(float((g.sign() == exact.sign()).double().mean()))
        size = layer.stats.step / (2 * (step or 1))
        assert step is None or torch.allclose(size, size.round().clamp_min(1), atol=1e-4)  # so that trials are exact
        return sum(right) / len(right)

    box = TanhNetwork()
    assert share(resolution) > share(None) - (0.01 if resolution > 0.05 else 0.005)


def test_the_trials_of_a_policy_are_at_half_once_and_twice_its_steps():
    trials = []

    class Watched(Calibrated):
        def summarize(self, state, seen):
            if seen.trial is not None:
                trials.append((state["step"], seen))
            return super().summarize(state, seen)

    fn = OnGrid(noisy(torch.sin, 1e-3), 0.05)
    layer = BlackBox(fn, 3, resolution=0.05, policy=Watched(), seed=0)
    for _ in range(10):
        gradient(layer, torch.randn(64, 3), torch.randn(64, 3))
    assert len(trials) >= 3
    for h, seen in trials:
        assert torch.equal(seen.steps.size[0, 0], h)
        assert torch.equal(seen.trial.step, h.expand_as(seen.trial.step))
        steps = h / 0.1
        assert torch.allclose(steps, steps.round().clamp_min(1))


@pytest.mark.parametrize("policy", ["calibrated", Fixed(0.1)])
@pytest.mark.parametrize("deviation", [1.0, 0.01])
def test_structure_is_found_on_the_grid(policy, deviation):
    """Also where all rows are the same point of the grid."""
    pattern = torch.eye(6).bool() | torch.eye(6).roll(1, 0).bool()

    def fn(x: torch.Tensor):
        return torch.sin(x) + 0.5 * torch.sin(x.roll(1, 1))

    box = OnGrid(fn, 0.1)
    layer = BlackBox(box, 6, structure="auto", resolution=0.1, policy=policy, seed=0)
    for _ in range(3):
        gradient(layer, 0.3 + deviation * torch.randn(32, 6), torch.randn(32, 6))
    assert torch.equal(layer.structure.depends, pattern)


def test_groups_contexts_and_threads():
    def fn(x: torch.Tensor, shift: torch.Tensor):
        return box(x) + shift

    box = OnGrid(lambda x: 3 * x, 0.1, (-1.0, 1.0))
    with Threads(2, max_rows=3) as evaluator:
        options = {"structure": torch.eye(4).bool(), "evaluator": evaluator, "policy": Fixed(0.01)}
        layer = BlackBox(fn, 4, limits=(-1, 1), resolution=0.1, **options)
        x, gy = torch.randn(9, 4), torch.randn(9, 4)
        assert torch.allclose(gradient(layer, x, gy, torch.randn(9, 4)), 3 * gy, atol=1e-4)
        assert layer.stats.evaluations == 9 * 3


@pytest.mark.parametrize("horizon", [None, 2, "auto"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_sequences(horizon, estimator):
    steps = torch.tensor([0.1, 0.25])
    box = OnGrid(lambda x: x.cumsum(1), steps)
    options = {"estimator": ESTIMATORS[estimator], "policy": "calibrated", "seed": 0}
    layer = BlackBox(box, 2, structure=Sequence(horizon), resolution=steps, **options)
    for _ in range(3):
        x, gy = torch.randn(8, 5, 2, dtype=torch.float64), torch.randn(8, 5, 2, dtype=torch.float64)
        g = gradient(layer, x, gy)
        if horizon is None and estimator != "simultaneous":
            assert torch.allclose(g, gy.flip(1).cumsum(1).flip(1))


def test_a_box_with_a_state_starts_in_the_middle():
    options = {"structure": Sequence(), "policy": Fixed(1e-3), "state": torch.zeros(1, 2)}

    def fn(x: torch.Tensor, state: torch.Tensor):
        number = x.double() / 0.1
        assert float((number - number.round()).abs().max()) < 1e-3
        y, state = zip(*(pair for pair in steps(x, state)), strict=True)
        return torch.stack(y, 1), state[-1]

    def steps(x, state):
        for row in x.unbind(1):
            y, state = leaky(row, state)
            yield y, state

    layer = BlackBox(fn, 2, resolution=0.1, **options)
    assert torch.isfinite(gradient(layer, torch.randn(4, 16, 2), torch.randn(4, 16, 2))).all()


class Careless(Estimator):
    """Asks at half the perturbations, and does not look at the grid."""

    def evaluations(self, groups):
        return 2

    def vjp(self, site, evaluate, max_rows):
        half = site.delta[0] / 2
        y, _ = evaluate(torch.stack((site.x + half, site.x - half), 1)[:, None], slice(0, len(site.x)))
        return (y[:, 0, 0] - y[:, 0, 1]) @ torch.ones(y.shape[3], site.x.shape[1], dtype=y.dtype)


@pytest.mark.parametrize("eager", [False, True])
def test_the_box_is_safe_from_estimators_that_do_not_look_at_the_grid(eager):
    box = OnGrid(torch.sin, 0.1, (-1.0, 1.0))
    options = {"estimator": Careless(), "policy": Fixed(0.1), "eager": eager}
    gradient(BlackBox(box, 3, 3, resolution=0.1, limits=(-1, 1), **options), torch.randn(8, 3), torch.randn(8, 3))


def test_steps_are_reported_as_they_were_set():
    layer = BlackBox(torch.sin, 2, resolution=[0.1, 0.25], policy=Fixed(0.33))
    gradient(layer, torch.randn(8, 2), torch.randn(8, 2))
    assert torch.allclose(layer.stats.step, torch.tensor([0.3, 0.25]))


def test_noise_is_measured_on_the_grid(monkeypatch):
    sizes, trial = [], TrialRows.trial

    def watched(self, steps, slopes=None):
        sizes.append(steps.size)
        return trial(self, steps, slopes)

    monkeypatch.setattr(TrialRows, "trial", watched)
    box = OnGrid(noisy(torch.sin, 0.01), 0.1)
    layer = BlackBox(box, 3, resolution=0.1, policy=Fixed(0.1), noise="auto", seed=0)
    gradient(layer, torch.randn(64, 3), torch.randn(64, 3))
    assert 0.005 < layer.policy_state.schedule.noise < 0.04  # half-width
    (size,) = sizes  # of which half can be set as well
    assert torch.allclose(size / 0.2, (size / 0.2).round().clamp_min(1))


def test_eager_is_the_same():
    x, gy, found = torch.randn(8, 8, 4), torch.randn(8, 8, 4), []
    for eager in (False, True):
        box = OnGrid(torch.sin, 0.1)
        layer = BlackBox(box, 4, 4, eager=eager, resolution=0.1, seed=0)
        found.append(torch.stack([gradient(layer, *pair) for pair in zip(x, gy, strict=True)]))
    assert torch.equal(*found)


def test_copies_states_and_numpy():
    def fn(x: np.ndarray):
        return np.sin(x)

    layer = BlackBox(OnGrid(torch.sin, 0.1), 3, resolution=0.1, seed=0)
    x, gy = torch.randn(16, 3), torch.randn(16, 3)
    gradient(layer, x, gy)
    other = BlackBox(fn, 3, resolution=0.1, seed=1)
    other.load_state_dict(layer.state_dict())
    twin = copy.deepcopy(layer)
    expected = gradient(layer, x, gy)
    assert torch.equal(gradient(twin, x, gy), expected)
    assert torch.allclose(gradient(other, x, gy), expected, atol=1e-4)


@pytest.mark.parametrize("resolution", [1e-3, 0.05])
def test_check_measures_on_the_grid(resolution):
    box = OnGrid(torch.sin, resolution)
    layer = BlackBox(box, 3, resolution=resolution, policy=Fixed(1e-6))
    assert check(layer, torch.randn(200, 3), budget=20_000).verdict == "right"

    class Wrong(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = BlackBox(box, 3, resolution=resolution, policy=Fixed(1e-6))
            self.limits, self.resolution = self.layer.limits, self.layer.resolution

        def forward(self, x):
            return self.layer(x + 0.1 * (x - x.detach()))  # slopes that are a tenth too large

    assert check(Wrong(), torch.randn(200, 3), budget=20_000).verdict == "wrong"


@on_each_device
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("policy", [Bond(), Calibrated()], ids=["bond", "calibrated"])
def test_graphed_steps_are_the_same(device, estimator, policy):
    def make_box():
        options = {"estimator": ESTIMATORS[estimator], "policy": policy, "seed": 0, "limits": (-2, 2)}
        return BlackBox(ffnn([5, 50, 4]), 5, 4, resolution=0.05, **options)

    data = batches(device, 20)
    eager, graphed = Trainer(device, make_box), Trainer(device, make_box)
    eager.run(eager.step, data)
    step = GraphedStep(graphed.step, graphed.model, graphed.optimizer)
    graphed.run(step, data)
    assert same_state(graphed.result(), eager.result())
    assert (step.replays > 0) == (device == "cuda")


def test_conformance_of_costs():
    """As many evaluations as without a resolution, and none at the row itself."""
    subject = Subject(lambda n: Simultaneous(n), lambda: Fixed(1e-3), torch.float64, 2, simultaneous=True)
    for estimator in ESTIMATORS.values():
        box = OnGrid(torch.sin, 0.1)
        layer = BlackBox(box, 3, resolution=0.1, estimator=estimator, policy=subject.policy())
        x = settable(layer, torch.randn(8, 3))
        layer(x)
        box.asked.clear()
        gradient(layer, x, torch.randn(8, 3))
        base, moved = box.asked
        assert len(moved) == 8 * layer.estimator.evaluations(3)
        rows = base.repeat_interleave(len(moved) // 8, 0)
        assert bool((moved != rows).any(1).all())
