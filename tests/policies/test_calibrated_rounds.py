"""What `Calibrated` makes of trials, seen from outside: what it remembers, when steps change, when all begins anew."""

import math

import pytest
import torch

from bondgrad.measuring._spread import Spread
from bondgrad.policies import Calibrated, Differences, Observation, StartingPoint, Steps, StepTrial
from bondgrad.policies._calibrated import SUMS
from bondgrad.policies._trial_sums import COUNT, TrialSums

POLICY, CENTRAL = Calibrated(), Differences()
LONGER = {"round": 7.0}  # a round that does not end with one trial


def state_of(d=1, step=0.5, **values):
    """Steps and a spread of one, and what else is given."""
    given = {"step": [step] * d, "spread": [1.0] * d} | values
    return POLICY.init(d) | {name: torch.as_tensor(value, dtype=torch.float32) for name, value in given.items()}


def observation(state, slopes, rows=None, spread=1.0, sound=True, typical=None, repeated=0.0, far=None):
    """A trial in which D(h/2), D(h), D(2h) were these slopes [3, r, d], in a batch of so many rows.

    It looks for jumps if slopes `far` [5] over 1/1024, 1/64, 1/16, 1/4 and all of the spread are given.
    """
    slopes = torch.as_tensor(slopes, dtype=torch.float64)
    _, r, d = slopes.shape
    step, g = state["step"].double(), torch.zeros(r if rows is None else rows, d, dtype=torch.float64)
    spreads, sound = torch.full((d,), spread, dtype=torch.float64), torch.as_tensor(sound).expand(r, d)
    typical = spreads if typical is None else torch.full_like(spreads, typical)
    far = None if far is None else torch.as_tensor(far, dtype=torch.float64).reshape(5, 1, -1).expand(5, r, d)
    repeated, random = torch.full((r, 1), repeated), torch.tensor(repeated**2 / 4, dtype=torch.float64)
    trial = StepTrial(CENTRAL, spreads, typical, step.expand(r, d), slopes, sound, repeated, random, far)
    return Observation(g, g, Steps(step, step, step, step), CENTRAL, trial)


def after(state, slopes, rows=None, **trial):
    seen = observation(state, slopes, rows, **trial)
    return POLICY.observe(state, POLICY.summarize(state, seen), len(seen.g), CENTRAL)


def alike(r=16, d=1, slope=1.0, odd=0.0):
    """Slopes that are all the same, but for those over half the step."""
    slopes = torch.full((3, r, d), slope, dtype=torch.float64)
    slopes[0] += torch.as_tensor(odd)
    return slopes


def noise_of(odd):
    """The variance in D(h) that half-step slopes off by so much are taken for: D(h/2) - 5/4 D(h) + 1/4 D(2h) = odd."""
    return odd**2 / (4 + 25 / 16 + 1 / 16 / 4)


# ---- one trial


def test_a_summary_has_the_sums_of_a_trial_and_what_a_joint_start_needs():
    """The last nine rows are weighted by that of rows: longest and typical move, randomness, one; start and one."""
    state = state_of(unit=2.0, farthest=[3.0])
    seen = observation(state, [[[6.0], [2.0]], [[4.0], [2.0]], [[2.0], [2.0]]], rows=5, spread=0.7, typical=0.3)
    summary = POLICY.summarize(state, seen)
    assert summary.shape == (SUMS + 9, 1)
    assert summary.dtype == torch.float32
    assert torch.equal(summary[:COUNT], TrialSums.of(seen.trial, state["unit"], state["step"]))
    assert not summary[COUNT:SUMS].any()  # it did not look for jumps
    values = [0.7, 0.3, 0, 1, math.log(0.5), math.log(2), math.log(3), 0, 1]
    assert summary[SUMS:, 0].tolist() == pytest.approx([5 * value for value in values])
    jumping = POLICY.summarize(state | {"jumps": torch.tensor([1.5])}, seen)[SUMS:, 0].tolist()
    assert jumping == pytest.approx([5 * value for value in (*values[:-2], 1.5, 1)])


@pytest.mark.parametrize(("repeated", "random"), [(0.0, 0), (1e-30, 1), (-2.0, 1), (math.nan, 0)])
def test_a_box_answers_at_random_where_repeated_answers_differ_at_all(repeated, random):
    state = state_of()
    seen = observation(state, alike(2), rows=5, repeated=repeated)
    assert float(POLICY.summarize(state, seen)[SUMS + 2]) == 5 * random
    one_row = seen._replace(trial=seen.trial._replace(repeated=torch.tensor([[0.0], [repeated]])))
    assert float(POLICY.summarize(state, one_row)[SUMS + 2]) == 5 * random


def test_a_summary_without_a_trial_or_a_step_is_zero_there():
    g, h = torch.zeros(3, 2), torch.tensor([0.1, 0.0])
    state = state_of(2, step=0.1)
    summary = POLICY.summarize(state, Observation(g, g, Steps(h, h, h, h), CENTRAL))
    assert not summary[: SUMS + 4].any()
    assert summary[SUMS + 4 :, 0].tolist() == pytest.approx([3 * math.log(0.1), 0, 3 * math.log(1e30), 0, 3])
    assert not summary[:, 1].any()


def test_sums_of_trials_add_up_in_a_round():
    state, first, second = state_of(**LONGER), alike(slope=2.0, odd=0.1), alike(slope=1.0, odd=0.3)
    both = after(after(state, first), second)["sums"]
    expected = sum(POLICY.summarize(state, observation(state, slopes))[:COUNT] for slopes in (first, second))
    assert torch.allclose(both, expected)
    assert float(TrialSums(*both).rows) == 32


# ---- several processes


def test_processes_that_started_by_themselves_go_on_with_the_mean_of_their_steps():
    """Three rows with steps 0.1 and one row with 0.4, in one and four units; their geometric means."""
    summary = torch.zeros(SUMS + 9, 1)
    for rows, step, unit, farthest in ((3, 0.1, 1.0, 2.0), (1, 0.4, 4.0, 32.0)):
        state = state_of(step=step, unit=unit, farthest=[farthest])
        g, h = torch.zeros(rows, 1), state["step"]
        summary += POLICY.summarize(state, Observation(g, g, Steps(h, h, h, h), CENTRAL))
    joint = POLICY.observe(POLICY.init(1), summary, 4, CENTRAL)
    assert float(joint["step"]) == pytest.approx((0.1**3 * 0.4) ** 0.25)
    assert float(joint["unit"]) == pytest.approx(4**0.25)
    assert float(joint["farthest"]) == pytest.approx(2 * 16**0.25)
    assert not joint["jumps"].any()
    assert not joint["spread"].any()
    assert not joint["sums"].any()
    later = POLICY.observe(state_of(step=2.0), summary, 4, CENTRAL)  # once there are steps, they stay
    assert float(later["step"]) == 2


@pytest.mark.parametrize(
    ("rows", "jumps", "joint"),
    [((3, 2), (2, 0), 1.2), ((2, 3), (2, 0), 0.8), ((3, 7), (2, 0), 0), ((5, 0), (1.5, 2), 1.5), ((0, 5), (2, 0), 0)],
)
def test_they_agree_on_whether_there_are_jumps_by_the_mean_roughness_over_their_rows(rows, jumps, joint):
    """Below six tenths there are none."""
    summary = 0
    for count, roughness in zip(rows, jumps, strict=True):
        g, state = torch.zeros(count, 2), state_of(2, jumps=[roughness, 0.0])
        summary = summary + POLICY.summarize(state, Observation(g, g, Steps(*[state["step"]] * 4), CENTRAL))
    found = POLICY.observe(POLICY.init(2), summary, sum(rows), CENTRAL)["jumps"]
    assert found.tolist() == pytest.approx([joint, 0])


def test_they_wait_for_a_process_that_has_not_started():
    state, g = state_of(2, step=0.1), torch.zeros(3, 2)
    h = torch.tensor([0.1, 0.0])
    summary = POLICY.summarize(state, Observation(g, g, Steps(h, h, h, h), CENTRAL))
    joint = POLICY.observe(POLICY.init(2), summary, 3, CENTRAL)
    assert all(torch.equal(joint[name], value) for name, value in POLICY.init(2).items())


def test_spreads_of_processes_are_averaged_over_their_rows():
    state = state_of(spread=[0.0])
    summaries = [
        POLICY.summarize(state, observation(state, alike(2), rows, spread)) for rows, spread in ((3, 1.0), (1, 5.0))
    ]
    joint = POLICY.observe(state, sum(summaries), 4, CENTRAL)
    assert float(joint["spread"]) == pytest.approx(2)
    assert float(TrialSums(*joint["sums"]).rows) == 4


# ---- the first steps


@pytest.mark.parametrize(("slope", "unit"), [(3.0, 3.0), (1e-40, 1e-30), (1e40, 1e30), (1e60, 1e30)])
def test_the_unit_of_slopes_stays_within_single_precision(slope, unit):
    reach = torch.ones(1, dtype=torch.float64)
    start = StartingPoint(Spread(reach, reach), reach, torch.zeros(()), lambda h: slope * (1 + 1e-5 * h.expand(4, 1)))
    found = POLICY.start(POLICY.init(1), start)
    assert float(found["unit"]) == pytest.approx(unit, rel=1e-4)
    assert float(found["step"]) == 4.0**-7 / 2  # where the first two rungs agree
    assert float(found["spread"]) == 1
    assert not POLICY.jumps(found).any()
    assert all(value.dtype == torch.float32 and value.isfinite().all() for value in found.values())


def staircase(h):
    """Slopes over steps h of boxes that jump by one at the rows' distances, in units of the reach."""
    return torch.where(torch.tensor([0.01, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0])[:, None] <= h, 0.5 / h, 0)


def test_a_box_with_jumps_starts_with_typical_moves():
    reach, deviation = torch.tensor([2.0, 3.0]), torch.tensor([1.0, 2.0])
    point = StartingPoint(Spread(deviation, 2 * reach), reach, torch.zeros(()), lambda h: staircase(h))
    found = POLICY.start(POLICY.init(2), point)
    assert POLICY.jumps(found).all()
    assert found["step"].tolist() == found["spread"].tolist() == [1, 2]
    assert found["jumps"].tolist() == [2, 2]  # the roughness that is supposed of it
    smooth = POLICY.start(POLICY.init(2), point._replace(slopes=lambda h: (1 + 1e-3 * h).expand(8, 2)))
    assert smooth["spread"].tolist() == [2, 3]
    assert not POLICY.jumps(smooth).any()


def test_inputs_without_jumps_start_with_the_steps_of_smooth_boxes_beside_those_that_have_some():
    reach, deviation = torch.tensor([2.0, 3.0]), torch.tensor([1.0, 2.0])

    def slopes(h):
        return torch.stack((staircase(h)[:, 0], 1 + 1e-3 * h[1].expand(8)), 1)

    found = POLICY.start(POLICY.init(2), StartingPoint(Spread(deviation, 2 * reach), reach, torch.zeros(()), slopes))
    assert POLICY.jumps(found).tolist() == [True, False]
    assert found["spread"].tolist() == [1, 3]
    assert found["step"][0] == 1
    assert found["step"][1] < 1e-3


def test_the_longest_step_is_the_one_that_fits_between_limits():
    reach = torch.ones(2)
    point = StartingPoint(Spread(reach, reach), reach, torch.zeros(()), lambda h: (1 + 1e-3 * h).expand(8, 2))
    assert torch.equal(POLICY.start(POLICY.init(2), point)["farthest"], torch.full((2,), 1e30))
    room = torch.tensor([1.5, 0.5])
    assert torch.equal(POLICY.start(POLICY.init(2), point._replace(room=room))["farthest"], room)


def test_slopes_that_are_too_large_for_their_unit_count_as_failures():
    """In single precision; 1e60 in units of 1e30 is such a slope, too, and 1e40 is not."""
    state = state_of(unit=1e30, **LONGER)
    for size, rows in ((1e40, 16), (1e60, 0)):
        found = after(state, alike(slope=size))
        assert all(value.isfinite().all() for value in found.values())
        assert float(TrialSums(*found["sums"]).rows) == rows


@pytest.mark.parametrize(("step", "wanted"), [([0.1, 0.2], False), ([0.1, 0.0], True), ([0.1, math.nan], True)])
def test_first_steps_are_wanted_until_all_inputs_have_one(step, wanted):
    assert POLICY.needs_start(POLICY.init(2) | {"step": torch.tensor(step)}) == wanted


def test_the_standard_error_is_known_after_a_round():
    size = torch.tensor([[0.5, 0.25]], dtype=torch.float64)
    known = POLICY.standard_error(state_of(2, noise=0.04, unit=3.0, round=1.0), size)
    assert known.dtype == torch.float64
    assert known.tolist() == [pytest.approx([1.2, 2.4])]
    assert POLICY.standard_error(state_of(2, noise=0.04, round=0.0), size).isnan().all()


# ---- when steps change


def trials_until_changes(r, trials):
    """After which trials of r rows a round ended."""
    state, changes = state_of(), []
    for trial in range(1, trials + 1):
        before = float(state["round"])
        state = after(state, alike(r))
        if state["round"] > before:
            changes.append(trial)
            assert not state["sums"].any()
    return changes


def test_rounds_get_longer():
    assert trials_until_changes(16, 35) == [1, 2, 4, 6, 9, 13, 19, 27, 35]  # by 1, 1, 2, 2, 3, 4, 6, 8, 8


@pytest.mark.parametrize(("r", "changes"), [(1, [4, 8, 16]), (3, [4, 8, 16]), (5, [4, 8, 15])])
def test_trials_of_few_rows_count_as_a_quarter_of_one_at_least(r, changes):
    assert trials_until_changes(r, 16) == changes


def test_the_input_with_the_most_rows_decides():
    slopes = alike(16, 2)
    slopes[1, :, 1] = math.nan
    assert float(after(state_of(2), slopes)["round"]) == 1
    nothing = after(state_of(2), alike(16, 2) * math.nan)
    assert float(nothing["round"]) == 0


# ---- the spread of inputs


def test_spreads_are_averaged_with_the_past():
    assert float(after(state_of(**LONGER), alike(), spread=3.0)["spread"]) == pytest.approx(0.9 * 1 + 0.1 * 3)
    assert float(after(state_of(spread=[0.0], **LONGER), alike(), spread=3.0)["spread"]) == 3


@pytest.mark.parametrize(
    ("rows", "spread", "step", "new_spread", "trial_rows"),
    [
        (8, 0.2, 0.4, 0.2, 4),  # eight times less is let pass, ten times less is not
        (7, 0.2, 0.5, 0.9 * 2 + 0.1 * 0.2, 20),  # too few rows to tell
        (8, 0.25, 0.5, 0.9 * 2 + 0.1 * 0.25, 20),
    ],
)
def test_where_inputs_vary_much_less_steps_shrink_and_trials_are_forgotten(rows, spread, step, new_spread, trial_rows):
    sums = torch.full((COUNT, 1), 16.0)
    found = after(state_of(sums=sums, spread=[2.0], **LONGER), alike(4), rows, spread=spread)
    assert float(found["step"]) == pytest.approx(step)
    assert float(found["spread"]) == pytest.approx(new_spread)
    assert float(TrialSums(*found["sums"]).rows) == trial_rows


# ---- another box


ODD = math.sqrt(0.1005 / noise_of(1.0))  # slopes with noise of variance 0.1005


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        ({}, True),
        ({"before": 0.001006}, False),  # less than a hundred times the noise there was
        ({"slope": 1.003}, False),  # less than a tenth of the slopes' square
        ({"r": 3}, False),  # rows that are too few to tell
        ({"round": 0.0}, False),  # nothing is known of the noise yet
        ({"odd": [ODD, ODD, 0.0]}, True),  # of most inputs
        ({"odd": [ODD, 0.0, 0.0]}, False),
    ],
)
def test_with_much_more_noise_all_begins_anew(change, lost):
    case = {"before": 0.001, "slope": 1.0, "r": 4, "round": 7.0, "odd": ODD} | change
    state = state_of(3, noise=case["before"] * 0.5**2, round=case["round"])
    found = after(state, alike(case["r"], 3, case["slope"], case["odd"]))
    assert POLICY.needs_start(found) == lost
    if lost:
        assert all(torch.equal(found[name], value) for name, value in POLICY.init(3).items())


def test_jumps_are_not_taken_for_noise():
    state = state_of(3, noise=0.001 * 0.5**2, round=7.0)
    for jumps, odd, lost in [
        ((0.0, 0.0, 2.0), [ODD, ODD, 0.0], True),
        ((0.0, 2.0, 2.0), [0.0, ODD, ODD], False),  # only the first says anything of the noise
        ((2.0, 2.0, 2.0), [ODD, ODD, ODD], False),
    ]:
        found = after(state | {"jumps": torch.tensor(jumps)}, alike(4, 3, odd=odd))
        assert POLICY.needs_start(found) == lost


def test_noise_is_judged_by_the_inputs_whose_rows_had_all_their_answers():
    state = state_of(3, noise=0.001 * 0.5**2, round=7.0)
    sound = torch.tensor([[True, False, False]])
    assert POLICY.needs_start(after(state, alike(4, 3, odd=[ODD, 0.0, 0.0]), sound=sound))
