"""Looks for jumps in the course of training: slopes over long steps, measured beside those of a trial."""

import math

import pytest
import torch

from bondgrad.policies._trial_sums import TrialSums
from tests.policies.test_calibrated_rounds import LONGER, POLICY, after, alike, state_of

# Slopes over 1/1024, 1/64, 1/16, 1/4 and all of the spread: one that falls again, one that does not change, one that
# is begun at a kink, and one of which little can be said.
JUMP, LINE, KINK, UNCLEAR = (1, 20, 6, 2, 1.2), (1, 1, 1, 1, 1), (0, 0, 1, 3, 5), (1, 4, 1, 4, 4)


def looked(state, *far, times=1, rows=None, slope=1.0):
    for _ in range(times):
        trial = {"far": torch.tensor(far).T, "typical": 0.7}
        state = after(state, alike(d=len(far), slope=slope), rows, **trial)
    return state


def test_jumps_that_a_look_finds_are_given_the_typical_move_and_trials_before_count_no_more():
    found = looked(state_of(3, step=1e-4, **LONGER), JUMP, LINE, KINK)
    assert POLICY.jumps(found).tolist() == [True, False, False]
    assert found["step"].tolist() == pytest.approx([0.7, 1e-4, 1e-4])
    assert found["spread"].tolist() == pytest.approx([0.7, 1, 1])
    assert TrialSums(*found["sums"]).rows.tolist() == [0, 16, 16]
    assert found["jumps"].tolist() == [2, 0, 0]


def test_an_input_of_which_looks_say_little_follows_the_others():
    assert POLICY.jumps(looked(state_of(3, step=1e-4, **LONGER), JUMP, UNCLEAR, JUMP)).tolist() == [True] * 3
    assert (
        POLICY.jumps(looked(state_of(4, step=1e-4, **LONGER), JUMP, UNCLEAR, LINE, LINE)).tolist()
        == [True] + [False] * 3
    )


def test_looks_add_up_and_earlier_ones_are_forgotten():
    one = looked(state_of(step=1e-4, round=7.0), LINE)["evidence"][0]
    assert float(one) == 16
    two = looked(state_of(step=1e-4, round=7.0), LINE, times=2)["evidence"][0]
    assert float(two) == pytest.approx(16 + 16 * math.exp(-16 / 80))
    rows = looked(state_of(step=1e-4, round=7.0), LINE, times=400)["evidence"][0]
    assert float(rows) == pytest.approx(16 / (1 - math.exp(-16 / 80)), rel=0.01)
    without = after(looked(state_of(step=1e-4, round=7.0), LINE), alike())
    assert float(without["evidence"][0]) == 16  # no look, nothing is forgotten


def test_an_input_that_seemed_to_jump_and_is_smooth_over_its_steps_is_not_said_to_jump_again():
    state = state_of(step=1.0, jumps=[2.0], round=7.0)
    for _ in range(30):
        state = after(state, alike())
    assert state["jumps"].tolist() == [-1]
    assert not POLICY.jumps(state).any()
    assert not POLICY.jumps(looked(state, JUMP, times=5)).any()


def test_the_trial_s_own_slopes_count_where_its_steps_are_short():
    """A jump within 1/1024 of the spread hides those that are farther off, but seldom is one within 1e-4 as well."""
    near = (900, 57, 15, 4.5, 2)
    assert POLICY.jumps(looked(state_of(step=1e-4, **LONGER), near)).all()
    assert not POLICY.jumps(looked(state_of(step=0.5, **LONGER), near)).any()


def test_jumps_are_looked_for_until_twenty_rows_are_seen_and_in_every_fourth_round():
    def looks(rows, number, trials=0):
        evidence = torch.tensor([[rows], [0.0], [0.0], [0.0]])
        state = state_of(step=0.1) | {"round": torch.tensor(float(number)), "evidence": evidence}
        for _ in range(trials):
            state = after(state, alike(r=1))
        return POLICY.looks_for_jumps(state)

    assert not looks(8.0, 0)  # the ladder of the first step has just done so
    assert looks(8.0, 0, trials=1)
    assert looks(19.0, 7, trials=1)
    assert not looks(21.0, 7, trials=1)
    assert [number for number in range(1, 10) if looks(21.0, number)] == [1, 5, 9]
