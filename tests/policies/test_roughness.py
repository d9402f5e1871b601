"""Roughness: whether slopes over shorter steps are better, and what `Calibrated` makes of it in training."""

import warnings

import pytest
import torch

from bondgrad import BlackBox
from bondgrad.policies import Calibrated, Differences
from bondgrad.policies._trial_sums import COUNT, SlopeErrors, TrialSums
from tests.helpers import gradient
from tests.policies.test_trial_sums import CENTRAL, FORWARD, drawn, each_kind, sums_of


def roughness(slopes, differences=CENTRAL):
    """Of slopes [3, r, d], the rows of which count alike."""
    half, one, two = slopes.double()
    sums = {"square": one**2, "change": (two - one) ** 2, "half_change": (half - one) ** 2}
    columns = {name: part.sum(0) for name, part in sums.items()}
    number = torch.full((slopes.shape[2],), float(slopes.shape[1]))
    counts = dict.fromkeys(("weight", "rows", "sound"), number)
    filled = {name: torch.zeros_like(number) for name in TrialSums._fields} | columns | counts
    return float(SlopeErrors.of(TrialSums(**filled), torch.zeros_like(number), differences).roughness)


@each_kind
def test_noise_makes_slopes_over_half_the_step_differ_four_times_as_much(differences):
    """Of variances 4, 1 and 1/4: 5 and 5/4. With an end in common they are 3 and 3/4."""
    assert drawn(differences, variance=0.1)["roughness"] == pytest.approx(4, rel=0.05)


@pytest.mark.parametrize(("differences", "part"), [(CENTRAL, 1 / 16), (FORWARD, 1 / 4), (Differences(4), 1 / 256)])
def test_bending_makes_them_differ_much_less(differences, part):
    """By T·(hᵖ - (h/2)ᵖ) and T·((2h)ᵖ - hᵖ): their squares differ by a factor of 4ᵖ."""
    assert drawn(differences, bent=0.3)["roughness"] == pytest.approx(part, rel=1e-3)
    assert drawn(differences, stretch=0.3)["roughness"] == pytest.approx(part, rel=1e-3)


@each_kind
def test_what_is_less_than_a_thousandth_of_the_squared_slopes_is_not_rough(differences):
    assert drawn(differences, variance=1e-4)["roughness"] == 0


@each_kind
def test_at_the_best_step_both_differences_are_nearly_alike(differences):
    bent, order = 1e-3, differences.order
    halves, twices = (5, 1.25) if differences == CENTRAL else (3, 0.75)
    expected = (halves * order + (1 - 0.5**order) ** 2) / (twices * order + (2**order - 1) ** 2)
    found = drawn(differences, bent=bent, variance=order * bent)["roughness"]
    assert found == pytest.approx(expected, rel=0.05)
    assert 0.9 < expected < 1.9


def jump_slopes(positions, sizes, h):
    """Slopes at zero of a staircase with jumps of such sizes at these positions [r, n], over h/2, h and 2h."""
    moves = [(step, torch.where(positions.abs() < step, sizes, 0).sum(1)) for step in (h / 2, h, 2 * h)]
    return torch.stack([(move / (2 * step))[:, None] for step, move in moves])


@pytest.mark.parametrize("h", [0.02, 0.3, 4.0])
def test_random_jumps_make_them_differ_twice_as_much(h):
    """Rare ones or many, as long as they go up and down: D(h)² is as the number of jumps, 2h, over (2h)²."""
    random = torch.Generator().manual_seed(0)
    positions = 20 * torch.rand(20_000, 60, generator=random, dtype=torch.float64) - 10
    sizes = torch.randn(20_000, 60, generator=random, dtype=torch.float64)
    assert roughness(jump_slopes(positions, sizes, h)) == pytest.approx(2, rel=0.1)


def test_inputs_count_alike_in_it_and_those_without_slopes_not_at_all():
    smooth = torch.tensor([0.9, 1.0, 1.4])[:, None, None].expand(3, 16, 1)
    rough = torch.tensor([2.0, 1.0, 0.8])[:, None, None].expand(3, 16, 1)
    expected = (0.1**2 + 1) / (0.4**2 + 0.2**2)
    for scale in (1.0, 1e6, 1e-6):
        assert roughness(torch.cat((smooth, scale * rough), 2)) == pytest.approx(expected, rel=1e-4)
        assert roughness(torch.cat((smooth, scale * rough, 0 * rough), 2)) == pytest.approx(expected, rel=1e-4)
    assert SlopeErrors.of(TrialSums(*torch.zeros(COUNT, 2)), torch.zeros(2), CENTRAL).roughness.isnan()


def test_roughness_follows_from_the_sums_of_trials():
    slopes = torch.tensor([1.3, 1.0, 0.6])[:, None, None].expand(3, 16, 1)
    assert float(SlopeErrors.of(sums_of(slopes), torch.zeros(1), CENTRAL).roughness) == pytest.approx(0.09 / 0.16)


# ---- in training

D = 4


@pytest.fixture
def often(monkeypatch):
    """More trials than usual, since there are fewer steps."""
    monkeypatch.setattr(Calibrated, "share", 0.2)


def train(layer, n, scales=(1.0, 1.0), rows=32, seed=1):
    """After n steps with inputs the deviation of which goes from one of these scales to the other."""
    random = torch.Generator().manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the box jumps
        for i in range(n):
            scale = scales[0] * (scales[1] / scales[0]) ** (i / max(n - 1, 1))
            x, gy = (torch.randn(rows, D, generator=random) for _ in range(2))
            gradient(layer, scale * x, gy)
    return layer


def layer_of(fn, seed=0):
    return BlackBox(fn, D, D, policy="calibrated", seed=seed)


def signs_right(layer, fn, seed=5):
    """The part of the signs that are right, over 640 rows."""
    random, right = torch.Generator().manual_seed(seed), []
    for _ in range(20):
        x, gy = torch.randn(32, D, generator=random), torch.randn(32, D, generator=random)
        exact = torch.autograd.grad(fn(at := x.clone().requires_grad_()), at, gy)[0]
        right.append((gradient(layer, x, gy).sign() == exact.sign()).float().mean())
    return float(torch.stack(right).mean())


def turned(x):
    """Outputs that depend on all inputs."""
    return torch.tanh(x @ torch.tensor([[1.0, 1, 0, 0], [-1, 1, 0, 1], [0, 0, 1, -1], [1, 0, 1, 1]]).to(x) / 2)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fn", [torch.tanh, turned])
def test_steps_grow_with_the_inputs_of_a_box_that_rounds(fn, seed, often):
    """Inputs begin within one level, and in the end they go over all of them."""
    layer = train(layer_of(lambda x: fn(x).mul(10).round().div(10), seed), 1, (0.03, 0.03))
    assert layer.policy_state.step.max() < 0.05
    train(layer, 150, (0.03, 1.0), seed=seed)
    train(layer, 150, seed=seed)
    assert layer.policy_state.step.min() > 0.2
    assert signs_right(layer, fn) > 0.85


def staircase(x):
    """Jumps up and down by random numbers at every fifth of a spread."""
    levels = torch.randn(1000, generator=torch.Generator().manual_seed(3))
    return levels[(5 * x).floor().long().clamp(-500, 499) + 500]


def tree(x):
    return torch.where(x < -0.7, -1.2, torch.where(x < 0.2, 0.4, torch.where(x < 0.9, -0.1, 1.3)))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("fn", [staircase, tree])
def test_boxes_that_jump_by_random_numbers_are_known_as_such_for_good(fn, seed, often):
    layer = train(layer_of(fn, seed), 1, seed=seed)
    layer.policy_state.jumps.fill_(2)  # with inputs as few as these, jumps may be missed at the first step
    train(layer, 400, seed=seed)
    assert float(layer.policy_state.round) > 8
    assert layer.policy_state.jumps > 0.6
    assert (layer.policy_state.step - 1).abs().max() < 0.15  # one standard deviation
    assert layer.health.last.jumps


@pytest.mark.parametrize("seed", range(3))
def test_a_box_that_rounds_a_sine_is_smooth_over_the_steps_it_gets(seed, often):
    """It seems to jump at first, as long as steps are a standard deviation or so and the sine is as rough as that."""

    def fn(x):
        return torch.sin(2 * x).mul(5).round().div(5)

    layer = train(layer_of(fn, seed), 1, seed=seed)
    assert layer.policy_state.jumps == 2
    train(layer, 400, seed=seed)
    assert layer.policy_state.jumps == 0
    assert 0.1 < layer.policy_state.step.min() < layer.policy_state.step.max() < 0.9
    assert not layer.health.last.jumps
    assert signs_right(layer, lambda x: torch.sin(2 * x)) > 0.9
