"""Roughness: whether slopes over shorter steps are better, and what `Calibrated` makes of it in training."""

import math
import warnings

import pytest
import torch

from bondgrad import BlackBox
from bondgrad.policies import Calibrated, Differences
from bondgrad.policies._trial_sums import SlopeErrors, roughness_at_best
from tests.helpers import gradient
from tests.policies.test_slope_errors import drawn
from tests.policies.test_trial_sums import CENTRAL, FORWARD, each_kind, sums_of


def roughness(slopes, jumps=()):
    """Of slopes [3, r, d], for each input, the numbers of those with jumps given."""
    d = slopes.shape[2]
    some = torch.tensor([i in jumps for i in range(d)])
    found = SlopeErrors.of(sums_of(slopes), torch.zeros(d), CENTRAL, some)
    return found.roughness.tolist(), found.rough.tolist()


@each_kind
def test_noise_makes_slopes_over_half_the_step_differ_four_times_as_much(differences):
    """Of variances 4, 1 and 1/4: 5 and 5/4. With an end in common they are 3 and 3/4."""
    assert drawn(differences, variance=0.1)["roughness"] == pytest.approx(4, rel=0.05)


@pytest.mark.parametrize(("differences", "part"), [(CENTRAL, 1 / 16), (FORWARD, 1 / 4), (Differences(4), 1 / 256)])
def test_bending_makes_them_differ_much_less(differences, part):
    """By T·(hᵖ - (h/2)ᵖ) and T·((2h)ᵖ - hᵖ): their squares differ by a factor of 4ᵖ."""
    assert drawn(differences, bent=0.3)["roughness"] == pytest.approx(part, rel=0.02)
    assert drawn(differences, stretch=0.3)["roughness"] == pytest.approx(part, rel=0.02)


@each_kind
def test_what_is_less_than_a_thousandth_of_the_squared_slopes_hardly_counts(differences):
    """A thousandth of them is added to the difference of D(h) and D(2h)."""
    halves, twices = (5, 1.25) if differences == CENTRAL else (3, 0.75)
    for variance in (1e-6, 1e-4):
        expected = halves * variance / (twices * variance + 1e-3)
        assert drawn(differences, variance=variance)["roughness"] == pytest.approx(expected, rel=0.05)


@each_kind
def test_at_the_best_step_both_differences_are_nearly_alike(differences):
    bent, order = 1e-3, differences.order
    halves, twices = (5, 1.25) if differences == CENTRAL else (3, 0.75)
    half, twice = halves * order + (1 - 0.5**order) ** 2, twices * order + (2**order - 1) ** 2
    found = drawn(differences, bent=bent, variance=order * bent)["roughness"]
    assert found == pytest.approx(half * bent / (twice * bent + 1e-3), rel=0.05)
    assert roughness_at_best(differences) == pytest.approx(half / twice)
    assert 0.9 < half / twice < 1.9


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
    assert roughness(jump_slopes(positions, sizes, h))[0] == pytest.approx([2], rel=0.1)


def constant(*slopes, rows=16):
    """The same three slopes in every row, [3, rows, 1]."""
    return torch.tensor(slopes)[:, None, None].expand(3, rows, 1)


SMOOTH, ROUGH = constant(0.9, 1.0, 1.4), constant(2.0, 1.0, 0.8)
# Relative to the largest move, over 2h in both: (D(h/2) - D(h))² and (D(2h) - D(h))²
PARTS = {"smooth": (0.1**2 / 1.4**2, 0.4**2 / 1.4**2 + 1e-3), "rough": (1 / 0.8**2, 0.2**2 / 0.8**2 + 1e-3)}


def of_parts(*names):
    shorter, longer = zip(*(PARTS[name] for name in names), strict=True)
    return sum(shorter) / sum(longer)


def test_inputs_count_alike_in_it_whatever_their_units_and_those_without_slopes_hardly():
    both = of_parts("smooth", "rough")
    for scale in (1.0, 1e6, 1e-6):
        slopes = torch.cat((SMOOTH, scale * ROUGH), 2)
        assert roughness(slopes)[0] == pytest.approx([both] * 2, rel=0.01)
        assert roughness(torch.cat((slopes, 0 * SMOOTH), 2))[0] == pytest.approx([both] * 3, rel=0.02)
    assert all(math.isnan(value) for value in roughness(torch.zeros(3, 16, 2))[0])


def test_inputs_with_jumps_and_others_are_judged_apart():
    slopes = torch.cat((SMOOTH, ROUGH, SMOOTH, ROUGH), 2)
    smooth, rough = of_parts("smooth"), of_parts("rough")
    assert roughness(slopes, jumps=(1, 3))[0] == pytest.approx([smooth, rough] * 2, rel=0.01)
    mixed = of_parts("smooth", "smooth", "rough")
    assert roughness(slopes, jumps=(3,))[0] == pytest.approx([mixed] * 3 + [rough], rel=0.01)
    found = roughness(torch.cat((slopes, 0 * SMOOTH), 2), jumps=(4,))[0]
    assert math.isnan(found[-1])
    assert not any(math.isnan(value) for value in found[:-1])


@pytest.mark.parametrize("rows", [4, 16, 64])
def test_an_input_is_less_rough_than_the_others_as_far_as_its_own_rows_show(rows):
    """The logarithm of its own ratio has a standard error of sqrt(4 / rows), of which two are allowed for."""
    slopes = torch.cat([part.expand(3, 16, 1)[:, :1].expand(3, rows, 1) for part in (SMOOTH, ROUGH)], 2)
    both, smooth = of_parts("smooth", "rough"), of_parts("smooth")
    assert roughness(slopes)[1] == pytest.approx([min(both, smooth * math.exp(4 / rows**0.5)), both], rel=0.01)


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
    assert layer.policy_state.step.min() > 0.15
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
    assert layer.policy_state.jumps.min() > 0.6
    assert (layer.policy_state.step - 1).abs().max() < 0.15  # one standard deviation
    assert layer.health.last.jumps


@pytest.mark.parametrize("seed", range(3))
def test_a_box_that_rounds_a_sine_is_smooth_over_the_steps_it_gets(seed, often):
    """It seems to jump at first, as long as steps are a standard deviation or so and the sine is as rough as that."""

    def fn(x):
        return torch.sin(2 * x).mul(5).round().div(5)

    layer = train(layer_of(fn, seed), 1, seed=seed)
    assert layer.policy_state.jumps.tolist() == [2] * D
    train(layer, 400, seed=seed)
    assert not (layer.policy_state.jumps > 0).any()
    assert 0.1 < layer.policy_state.step.min() < layer.policy_state.step.max() < 0.9
    assert not layer.health.last.jumps
    assert signs_right(layer, lambda x: torch.sin(2 * x)) > 0.9


def one_coarse(x, levels=1.5):
    """Three smooth inputs, and one that is rounded to so many levels a unit."""
    coarse = torch.tanh((levels * x[:, 3]).round() / levels)
    return torch.stack((4 * torch.tanh(x[:, 0]), torch.sin(x[:, 1]), x[:, 2] ** 2, coarse), 1)


def not_rounded(x):
    return torch.stack((4 * torch.tanh(x[:, 0]), torch.sin(x[:, 1]), x[:, 2] ** 2, torch.tanh(x[:, 3])), 1)


@pytest.mark.parametrize("seed", range(8))
def test_an_input_that_is_rounded_beside_smooth_ones_gets_long_steps_and_they_short_ones(seed, often):
    layer = train(layer_of(one_coarse, seed), 200, seed=seed)
    assert layer.policy_state.step[3] > 0.5
    assert layer.policy_state.step[:2].max() < 0.05  # of a square all steps are right
    assert signs_right(layer, not_rounded) > 0.95
    assert layer.health.last.jumps in ((), (3,))


@pytest.mark.filterwarnings("ignore:the box jumps")
@pytest.mark.parametrize("seed", range(4))
def test_an_input_that_reaches_the_next_level_later_beside_smooth_ones_gets_long_steps_then(seed, often):
    """At first nothing moves along it, and it cannot be told from one that does nothing."""
    layer = train(layer_of(one_coarse, seed), 1, (0.03, 0.03))
    assert layer.policy_state.step[3] < 0.05
    train(layer, 150, (0.03, 1.0), seed=seed)
    train(layer, 150, seed=seed)
    assert layer.policy_state.step[3] > 0.2
    assert layer.policy_state.step[:2].max() < 0.05  # of a square all steps are right
    assert signs_right(layer, not_rounded) > 0.9


def test_an_input_that_does_nothing_is_moved_by_its_spread_and_is_no_reason_to_speak_of_jumps(often):
    layer = train(layer_of(lambda x: torch.sin(x[:, :3]) @ torch.ones(3, D)), 200)
    assert layer.policy_state.step[3] > 0.5
    assert layer.policy_state.step[:3].max() < 0.05
    assert layer.health.last.jumps == ()
