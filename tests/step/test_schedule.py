"""When trials come: often at first, then as a share of the evaluations of training pays for them."""

import itertools

import pytest

from bondgrad.step._state import Schedule


def taken(schedule, share, steps, evaluations=10, price=40, early=True):
    """The steps, of so many, at which there was a trial."""
    found = []
    for step in range(steps):
        due = schedule.due(share, early)
        schedule.step(evaluations)
        if due:
            schedule.tried(price, 0.0)
            found.append(step)
    return found


def test_the_first_trials_come_at_growing_distances_whatever_they_cost():
    # The first at once; the next ones, five in all, when 1, 2, 4 and 8 steps have gone by since the last.
    assert taken(Schedule(), 1e-6, 100) == [0, 2, 5, 10, 19]


def test_later_trials_cost_their_share():
    schedule = Schedule()
    trials = taken(schedule, 0.04, 5000)
    # 40 evaluations each, of ten a step: one in 100 steps pays for one, and five gradients are free.
    assert len(trials) == pytest.approx(5000 * 10 * 0.04 / 40, abs=3)
    assert schedule.spent <= 0.04 * schedule.credit + 5 * 10 + 40
    assert all(later - earlier >= 100 for earlier, later in itertools.pairwise(trials[5:]))


def test_without_early_trials_the_second_waits_until_the_first_is_paid():
    assert taken(Schedule(), 0.04, 300, early=False)[:3] == [0, 101, 202]


def test_it_begins_anew_with_all_counters_but_that_of_seeds():
    schedule = Schedule()
    taken(schedule, 0.04, 50)
    schedule.seeds, schedule.noise = 7, 0.1
    schedule.begin()
    nothing = {"trials": 0, "steps": 0, "credit": 0, "spent": 0, "last": (0, 0, 0), "noise": 0}
    assert vars(schedule) == nothing | {"seeds": 7}
    assert vars(Schedule()) == nothing | {"seeds": 0}
    assert schedule.due(0.04, early=True)
