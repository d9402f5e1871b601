"""What a captured step leaves in its layer, which a replay leaves again. No graph is needed to look at that."""

import torch

from bondgrad import BlackBox
from bondgrad.policies import Fixed
from tests.helpers import gradient


def test_a_recorded_step_counts_from_its_first_replay_on():
    layer = BlackBox(torch.sin, 3, policy=Fixed(0.01))
    x, gy = torch.randn(4, 3), torch.ones(4, 3)
    gradient(layer, x, gy)
    once, seen = layer.stats, []
    layer.register_step_hook(lambda _, step: seen.append(step))
    layer.start_recording()
    g = gradient(layer, x, gy)
    gradient(layer, x, gy)
    recording = layer.stop_recording()
    assert (layer.stats.calls, layer.stats.evaluations, len(seen)) == (once.calls, once.evaluations, 0)
    layer.replay(recording)
    assert (layer.stats.calls, layer.stats.evaluations) == (3 * once.calls, 3 * once.evaluations)
    assert len(seen) == 2
    assert all(torch.equal(step.g, g) and torch.equal(step.x, x) for step in seen)
    assert seen[0].g is not recording.changes[0].seen.g  # the next replay overwrites what a hook may keep


def test_evaluations_of_replays_pay_for_trials_and_for_looking_at_the_structure():
    layer = BlackBox(torch.sin, 3, policy="calibrated", structure="auto")
    x, gy = torch.randn(16, 3), torch.ones(16, 3)
    gradient(layer, x, gy)  # with a search for the structure and a trial
    layer.start_recording()
    gradient(layer, x, gy)
    recording = layer.stop_recording()
    schedule, tracker = layer.policy_state.schedule, layer.tracker
    before = schedule.steps, schedule.credit, tracker.steps, tracker.budget
    layer.replay(recording)
    evaluations = 16 * 2  # in a box of three blocks all inputs move together
    assert (schedule.steps, schedule.credit) == (before[0] + 1, before[1] + evaluations)
    assert (tracker.steps, tracker.budget) == (before[2] + 1, before[3] + 2)
