"""What a round of trials makes of the steps of `Calibrated`, by numbers."""

import math

import pytest
import torch

from bondgrad.policies import Calibrated, Differences
from bondgrad.policies._best_step import FACTORS
from bondgrad.policies._calibrated import NOT_LIMITED
from bondgrad.policies._new_steps import ROUNDS, mean_noise, next_round
from bondgrad.policies._trial_sums import COUNT, TrialSums
from tests.policies.test_best_step import by_search
from tests.policies.test_slope_errors import certain

CENTRAL, FORWARD, TOGETHER = Differences(), Differences(1, True), Differences(together=True)


# ---- noise


def state_of(d, step=0.1, noise=0.01, spread=1.0, **values):
    given = {"step": step, "noise": noise, "spread": spread} | values
    state = Calibrated().init(d)
    return state | {n: torch.as_tensor(v, dtype=torch.float32).expand_as(state[n]) for n, v in given.items()}


def test_noise_is_the_median_over_inputs_with_answers_and_is_averaged_with_the_past():
    state, nothing = state_of(4), TrialSums(*torch.zeros(COUNT, 4))
    found = nothing._replace(sound=torch.tensor([8.0, 8.0, 8.0, 0.0]), noise=8 * torch.tensor([2.0, 3.0, 50.0, 0.0]))
    assert float(mean_noise(state, found)) == pytest.approx((0.03 + 0.01) / 2)  # 3 · h², and 0.01 before
    for before, after in ((0.03 / 4.1, 0.03), (0.03 / 3.9, 0.03 * 4.9 / 7.8), (0.117, 0.147 / 2), (0.123, 0.03)):
        assert float(mean_noise(state | {"noise": torch.tensor(before)}, found)) == pytest.approx(after)
    assert float(mean_noise(state, nothing)) == pytest.approx(0.01)  # no row had all its answers


# ---- a round


def round_of(
    square, growth=0.0, noise=1.0, bent=0.0, half=-0.5, differences=CENTRAL, rows=16.0, batch=64, rough=0.0, **more
):
    """The state after a round with mean squares of slopes, one of each input, that grow by such parts from h to 2h.

    They grow as the fit has it, and all but `bent` that it leaves is noise. From h/2 to h they do not shrink. They
    differ by `rough` times as much from h/2 to h as from h to 2h, of which repeated answers explain the part `random`.
    """
    most, random = more.pop("most", 1), more.pop("random", 0.0)
    counted = {name: more.pop(name, rows) for name in ("known", "sound")}
    common, common_half = (0.25, 1.0) if differences.shared_base else (0.0, 0.0)
    square = torch.tensor(square, dtype=torch.float64)
    growth, bent, known, sound = (
        torch.as_tensor(value, dtype=torch.float64).expand_as(square)
        for value in (growth, bent, counted["known"], counted["sound"])
    )
    ratio, drawn = 1 + growth, square + 2 * noise  # twice the noise draws growth to zero
    cross = growth * drawn - noise * (1 - common)
    left = noise * (0.25 - 2 * ratio * common + ratio**2) + bent
    change = left + 2 * growth * cross - growth**2 * (square + noise)
    half_cross = torch.full_like(square, half) * drawn - noise * (1 - common_half)
    one = torch.ones_like(square)
    shorter = rough * (change + 1e-3)
    means = (one, square + noise, cross, change, half_cross, shorter, change, random * shorter.clamp(max=1e30))
    sums = torch.stack((*(rows * mean for mean in means), known, sound, noise * sound)).float()
    step = more.setdefault("step", [0.1] * len(square))
    state = state_of(len(square), sums=sums, **({"noise": noise * float(step[0]) ** 2} | more))
    return next_round(state, batch < 8, differences, most)


def steps_after(*args, **values):
    return round_of(*args, **values)["step"].tolist()


@pytest.mark.parametrize("differences", [CENTRAL, FORWARD, Differences(4)])
@pytest.mark.parametrize("growth", [0.0, 0.2, 0.5, -0.2, -0.5])
def test_the_step_of_an_input_with_a_signal_changes_by_the_best_factor(growth, differences):
    # Fits leave (2ᵖ - 1)² times the bending and noise, of which more than there is on average is subtracted.
    order, common, ratio = differences.order, 0.25 if differences.shared_base else 0, 1 + growth
    at_best = order * (0.25 - 2 * common + 1)
    scale = ((2**order - 1) ** 2 - certain(16) * at_best) / max(1 + min(growth, 0), 1 / 1.5) ** -8
    by_noise = ratio**2 + 0.25 - 2 * ratio * common
    for square in (30.0, 100.0):
        bent = certain(16) * by_noise + 40.0
        expected, _ = by_search(1.0, 40.0 / scale, growth / (2**order - 1), square, order=order)
        assert steps_after([square], growth, bent=bent, differences=differences) == pytest.approx([0.1 * expected])


def test_steps_change_eightfold_a_round_at_most_from_a_quarter_to_twice():
    assert steps_after([100.0]) == pytest.approx([0.2])
    assert steps_after([100.0], bent=1e6) == pytest.approx([0.025])


def test_where_slopes_shrink_too_soon_they_may_shrink_a_tenth_only():
    # By 0.051 over h, a third of that from h to 2h: nearly six times as much is accepted, or nearly twice.
    assert steps_after([100.0], -0.153, half=-0.5) == pytest.approx([0.2])
    assert steps_after([100.0], -0.153, half=0.5) == pytest.approx([0.1 * 2**0.375])  # below sqrt(2), which is 2^0.5


@pytest.mark.parametrize(("rows", "threshold"), [(16.0, 3 / 4), (4.0, 3 / 2)])
def test_a_signal_is_three_standard_errors_of_the_mean_square_of_slopes(rows, threshold):
    """With a signal an input goes its own way: twice as far. Without it, from there half the way to its spread."""
    assert steps_after([1.01 * threshold], rows=rows) == pytest.approx([0.2])
    assert steps_after([0.99 * threshold], rows=rows) == pytest.approx([math.sqrt(0.2)])


def test_inputs_that_exceed_the_noise_by_chance_have_no_signal():
    """One of twelve with 0.9, where sqrt(16) times 0.75 is three; all of them must exceed 3 / sqrt(12 · 16) in mean."""
    one, many = [0.9] + [0.0] * 11, [0.9] + [0.2] * 11
    short = {"step": [0.01] * 12, "half": 0.0}
    assert steps_after(one, **short) == pytest.approx([math.sqrt(0.02)] * 12)
    assert steps_after(many, **short) == pytest.approx([0.02] * 12)
    assert steps_after([3.0] + [0.0] * 11, **short) == pytest.approx([0.02] * 12)


def test_without_any_signal_steps_go_half_way_to_the_spread():
    assert steps_after([0.0], step=[0.125]) == pytest.approx([math.sqrt(2 * 0.125)])
    assert steps_after([0.0], step=[0.125], spread=4.0) == pytest.approx([4 * math.sqrt(2 * 0.125 / 4)])


def test_where_rows_are_few_each_input_goes_its_own_way_without_a_signal():
    assert steps_after([0.0], batch=7) == pytest.approx([0.2])
    assert steps_after([0.0], batch=8) == pytest.approx([math.sqrt(0.2)])


def test_an_input_without_a_signal_goes_half_way_to_the_others():
    assert steps_after([100.0, 100.0, 0.0], bent=[1e6, 1e6, 0.0]) == pytest.approx(
        [0.025] * 2 + [math.sqrt(0.2 * 0.025)]
    )


@pytest.mark.parametrize(("batch", "farthest"), [(64, 4.0), (8, 4.0), (7, 64.0)])
def test_no_step_is_longer_than_four_spreads_or_sixty_four_of_few_rows(batch, farthest):
    long = [0.6 * farthest, 0.4 * farthest]  # both want to double
    assert steps_after([1e4, 1e4], step=long, batch=batch) == pytest.approx([farthest, 0.8 * farthest])
    wide = [7 * step for step in long]
    assert steps_after([1e4, 1e4], step=wide, spread=7.0, batch=batch)[0] == pytest.approx(7 * farthest)


@pytest.mark.parametrize("batch", [64, 7])
def test_inputs_at_which_evaluations_fail_go_no_farther_than_their_spread(batch):
    sound = [16.0, 11.3, 11.1, 0.0]  # seven tenths of the rows are 11.2
    found = steps_after([1e4] * 4, step=[0.9] * 4, sound=sound, batch=batch, spread=1.25)
    assert found == pytest.approx([1.8, 1.8, 1.25, 1.25])


def test_inputs_that_got_hardly_any_slopes_go_back_to_half_their_step():
    known = [16.0, 4.9, 4.7, 0.0]  # three tenths of the rows are 4.8
    found = steps_after([1e4] * 4, step=[0.2] * 4, known=known, sound=[16.0, 4.9, 4.7, 0.0])
    assert found == pytest.approx([0.4, 0.4, 0.1, math.sqrt(0.1 * 0.4)])  # without any slope there is no signal


def test_steps_are_no_longer_than_fits_between_limits():
    found = steps_after([1e4] * 3, farthest=[NOT_LIMITED, 0.15, 0.05])
    assert found == pytest.approx([0.2, 0.15, 0.05])


def test_inputs_that_move_together_have_the_same_length_relative_to_their_spreads():
    case = {"bent": [1e6, 0.0, 0.0], "spread": [1.0, 2.0, 5.0]}
    apart = steps_after([1e4] * 3, **case)
    assert apart == pytest.approx([0.025, 0.2, 0.2])  # of spreads 1/40, 1/10 and 1/25
    mean = (0.025 * 0.1 * 0.04) ** (1 / 3)
    assert steps_after([1e4] * 3, **case, differences=TOGETHER) == pytest.approx([mean, 2 * mean, 5 * mean])


def test_a_round_is_counted_and_its_sums_are_forgotten():
    found = round_of([100.0, 100.0], bent=5.0, round=3.0)
    assert float(found["round"]) == 4
    assert not found["sums"].any()
    assert float(found["noise"]) == pytest.approx(0.01)
    assert found["step"].dtype == found["jumps"].dtype == torch.float32


@pytest.mark.parametrize("before", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("bent", [0.0, 1e6])
def test_a_round_after_which_most_steps_change_much_is_counted_only_if_it_is_the_first(bent, before):
    """They double, and get shorter by a factor of four; with a little bending they stay."""
    assert float(round_of([100.0] * 3, bent=[bent, bent, 5.0], round=before)["round"]) == max(before, 1)
    assert float(round_of([100.0] * 3, bent=[bent, 5.0, 5.0], round=before)["round"]) == before + 1


# ---- roughness


@pytest.mark.parametrize(
    ("rough", "expected"), [(0.99, 0.25), (1.01, 1.0), (1.49, 1.0), (1.51, 2.0), (4.0, 2.0), (math.inf, 2.0)]
)
def test_steps_get_no_shorter_where_shorter_ones_are_no_better_and_longer_where_they_are_worse(rough, expected):
    """Bending asks for a quarter."""
    assert steps_after([100.0], bent=1e6, rough=rough) == pytest.approx([0.1 * expected])


@pytest.mark.parametrize(
    ("random", "expected"), [(0.0, 0.2), (0.49, 0.2), (0.51, 0.1 * 2**0.375), (1.2, 0.1 * 2**0.375)]
)
def test_where_repeated_answers_explain_most_of_that_they_grow_as_far_as_noise_and_stretch_ask(random, expected):
    """What looks like bending is none there; slopes that shrink by a third over the next longer step are the limit."""
    shrinking = {"growth": -0.5, "rough": 3.0, "random": random}
    for bent in (0.0, 1e6):
        assert steps_after([100.0], bent=bent, **shrinking) == pytest.approx([expected])
        assert steps_after([100.0], bent=bent, rough=3.0, random=random) == pytest.approx([0.2])


@pytest.mark.parametrize(("half", "factor"), [(0.5, 2.0), (0.99, 2.0), (1.01, 0.5), (2.5, 0.5), (-1.2, 0.5)])
def test_steps_that_are_too_long_are_halved_however_rough_the_box_is(half, factor):
    """They are where slopes are more than twice as large over h/2, or have other signs."""
    for rough in (0.1, 3.0):
        assert steps_after([1e6] * 2, half=half, rough=rough) == pytest.approx([0.1 * factor] * 2)
    assert steps_after([1e6], bent=1e9, half=2.5) == pytest.approx([0.025])  # or more than halved for their errors


@pytest.mark.parametrize("rough", [1.2, 3.0])
@pytest.mark.parametrize(("step", "expected"), [(0.7, 1.0), (1.0, 1.0), (1.5, 1.0), (3.5, 1.0), (8.0, 2.0)])
def test_they_grow_to_their_spread_at_most_and_shrink_to_it(step, expected, rough):
    if rough < 1.5:
        expected = max(expected, min(step, 1.0)) if step >= 1 else step
    case = {"bent": 1e6, "rough": rough}
    assert steps_after([100.0], **case, step=[step]) == pytest.approx([expected])
    assert steps_after([100.0], **case, step=[7 * step], spread=7.0) == pytest.approx([7 * expected])


def test_a_step_that_gets_longer_for_other_reasons_does_so_beyond_the_spread():
    for rough in (0.1, 1.2, 3.0):
        assert steps_after([1e4], rough=rough, step=[0.9]) == pytest.approx([1.8])
        assert steps_after([1e4], rough=rough, step=[1.5]) == pytest.approx([3.0])


def test_each_input_grows_to_its_own_spread():
    case = {"bent": 1e6, "rough": 3.0, "step": [0.1] * 3}
    assert steps_after([1e4] * 3, **case, spread=[1.0, 0.15, 0.05]) == pytest.approx([0.2, 0.15, 0.05])
    assert steps_after([1e4] * 3, **case, farthest=[NOT_LIMITED, 0.15, 0.05]) == pytest.approx([0.2, 0.15, 0.05])


def test_with_jumps_steps_are_the_spread_whatever_the_errors_say():
    case = {"jumps": 2.0, "spread": [0.3, 4.0], "farthest": [NOT_LIMITED, 2.5]}
    for bent in (0.0, 1e6):
        assert steps_after([1e4, 1e4], rough=2.0, bent=bent, **case) == pytest.approx([0.3, 2.5])
    assert steps_after([100.0], bent=1e6, rough=0.1, jumps=1.0) == pytest.approx([0.025])  # those of a smooth box


def roughness_after(*rough, jumps=2.0):
    for value in rough:
        jumps = float(round_of([100.0], jumps=jumps, rough=value)["jumps"])
    return jumps


def test_the_roughness_of_a_box_with_jumps_is_a_mean_of_which_the_last_round_is_half():
    assert roughness_after(1.0) == pytest.approx(1.5)
    assert roughness_after(3.0, 1.0, 2.0) == pytest.approx(2 / 8 + 3 / 8 + 1 / 4 + 2 / 2)
    assert roughness_after(0.1, 0.2) == pytest.approx(2 / 4 + 0.1 / 4 + 0.2 / 2)


def test_a_box_does_not_jump_any_more_where_that_falls_below_six_tenths():
    assert roughness_after(0.21, jumps=1.0) == pytest.approx(0.605)
    assert roughness_after(0.19, jumps=1.0) == -1  # for good
    assert roughness_after(0.1, 0.1, jumps=2.0) == -1
    assert roughness_after(3.0, 3.0, 3.0, jumps=0.0) == 0  # none are found later


@pytest.mark.parametrize("half_change", [0.0, 3.0])
def test_slopes_that_are_the_same_over_h_and_2h_in_every_row_are_those_of_jumps(half_change):
    """There are none where outputs do not change; and resolutions may be such that moves match the jumps."""
    sums = torch.zeros(COUNT, 1)
    sums[TrialSums._fields.index("rough_half")] = half_change
    for name in ("rows", "sound", "weight"):
        sums[TrialSums._fields.index(name)] = 16.0
    for before in (2.0, 1.0):
        found = next_round(state_of(1, sums=sums, jumps=before, step=1.0), False, CENTRAL)
        assert float(found["jumps"]) == (before + 2) / 2
        assert float(found["step"]) == 1


def test_the_constants_of_these_numbers():
    assert (ROUNDS.farthest, ROUNDS.farthest_few, ROUNDS.farthest_failing) == (4, 64, 1)
    assert FACTORS.flatten().tolist() == pytest.approx([2 ** (k / 8) for k in range(-16, 9)])
