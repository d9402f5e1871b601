"""What a layer says of its own costs, when a captured step would miss something, and its random numbers."""

import math

import numpy as np
import pytest
import torch

from bondgrad import BlackBox, Forward, Simultaneous
from bondgrad.evaluators import Local
from bondgrad.policies import Calibrated, Fixed
from bondgrad.torch_support._ranks import ALONE
from tests.helpers import gradient, noisy


@pytest.mark.parametrize("policy", ["calibrated", "bond"])
@pytest.mark.parametrize("estimator", ["central", "forward", "simultaneous"])
def test_a_gradient_costs_no_more_than_the_layer_says(estimator, policy):
    layer = BlackBox(torch.sin, 3, estimator=estimator, policy=policy, seed=0).eval()
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        most, before = layer.gradient_evaluations(16), layer.stats.evaluations
        gradient(layer, x, torch.ones(16, 3))
        assert layer.stats.evaluations - before <= most
    assert most == 16 * (1 + layer.estimator.evaluations(3))  # once a first step is known, not one less


def test_other_random_numbers_are_gone_after_a_measurement():
    layer = BlackBox(torch.sin, 3, estimator="simultaneous", policy="bond", seed=0).eval()
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    before = gradient(layer, x, torch.ones(4, 3))
    with layer.without_trace():
        layer.reseed(1)
        assert not torch.equal(gradient(layer, x, torch.ones(4, 3)), before)
    assert torch.equal(gradient(layer, x, torch.ones(4, 3)), before)


@pytest.mark.filterwarnings("error")
def test_failures_in_a_measurement_are_neither_counted_nor_warned_of():
    layer = BlackBox(lambda x: torch.where(x > 0, torch.nan, x), 3, policy=Fixed(0.01)).eval()
    with layer.without_trace():
        gradient(layer, torch.zeros(4, 3), torch.ones(4, 3))
        assert layer.stats.failures == 4 * 3
    assert layer.stats.failures == 0


def test_due_until_the_function_is_known():
    box = BlackBox(lambda x: x.sin(), 3, policy="bond")
    assert box.due()
    box(torch.randn(4, 3))
    assert not box.due()
    assert box.eval().due()
    box.train().on_failure = "raise"
    assert box.due()
    assert BlackBox(torch.sin, 3, 3, on_failure="raise", policy="bond").due()

    def fn(x: np.ndarray):
        return np.sin(x)

    box = BlackBox(fn, 3, policy="bond")
    box(torch.randn(4, 3))
    assert box.due()


def test_the_version_changes_with_what_a_graph_would_miss():
    box = BlackBox(torch.sin, 3, seed=0, policy="bond")
    gradient(box, torch.randn(4, 3), torch.randn(4, 3))
    seen = [box.version]

    def changed():
        seen.append(box.version)
        return seen[-1] != seen[-2]

    assert not changed()
    gradient(box.eval(), torch.randn(4, 3), torch.randn(4, 3))
    assert changed()
    box.train()
    assert changed()
    box.noise = 1e-3
    assert changed()
    box.policy = Fixed(0.1)
    assert changed()
    box.estimator = Forward()
    assert changed()
    box.evaluator = Local(max_rows=2)
    assert changed()
    box.fn = torch.cos
    assert changed()
    box.full_precision = False
    assert changed()
    box.limits = None
    assert not changed()


def test_a_trial_is_due_at_the_first_step_of_a_layer_that_measures():
    assert BlackBox(torch.sin, 3).trial_due
    assert BlackBox(torch.sin, 3, policy="bond", noise="auto").trial_due
    assert not BlackBox(torch.sin, 3, policy="bond").trial_due


def test_a_box_that_looks_at_its_structure_or_exchanges_is_not_captured():
    box = BlackBox(torch.sin, 3, policy="bond", structure="auto", seed=0)
    box(torch.randn(4, 3))
    assert box.due()
    gradient(box, torch.randn(8, 3), torch.ones(8, 3))
    assert not box.due()


def test_a_box_that_keeps_its_state_to_itself_is_not_captured():
    class Counter:
        def __init__(self):
            self.calls = 0

        def __call__(self, x):
            self.calls += 1
            return torch.sin(x)

        def snapshot(self):
            return self.calls

        def restore(self, calls):
            self.calls = calls

    box = BlackBox(Counter(), 3, policy="bond", seed=0)
    box(torch.randn(4, 3))
    assert box.due()
    carried = BlackBox(lambda x, state: (x + state, state), 3, state=torch.zeros(1, 3), policy="bond", seed=0)
    assert carried.due()  # until it is known where its state is
    carried(torch.randn(4, 3))
    assert not carried.due()


def test_the_first_gradient_of_a_measuring_policy_costs_so_much_at_most():
    layer = BlackBox(torch.sin, 3, seed=0).eval()
    # Sixteen rows and six points near each; a ladder of 24 steps at eight rows, which are asked about twice.
    assert layer.gradient_evaluations(16) == 16 * 7 + 8 * (24 * 6 + 2)
    assert BlackBox(torch.sin, 3, policy="bond").gradient_evaluations(16) == 16 * 7
    assert layer.policy.start_slopes == 24


def test_seeds_of_calls_are_in_the_range_that_every_library_takes():
    seeds = []

    def fn(x, seed):
        seeds.append(seed)
        return torch.sin(x)

    layer = BlackBox(fn, 3, policy=Fixed(0.1), seed=2**31 - 1)
    layer.eval()(torch.ones(1, 3))
    layer(torch.ones(1, 3))
    layer.train()(torch.ones(1, 3))
    layer(torch.ones(1, 3))
    assert seeds == [2**31 - 1, 2**31 - 1, 1_000_002, 2_000_005]


def test_sums_that_overflow_are_no_failures():
    layer = BlackBox(lambda x: 1e38 + 1e30 * x, 3, policy=Fixed(1.0), on_failure="raise")
    gradient(layer, torch.randn(64, 3), torch.ones(64, 3))
    assert layer.stats.failures == 0


def test_a_trial_takes_a_quarter_of_a_small_batch_and_sixteen_rows_of_a_large_one():
    for rows, used, start in ((3, 1, 1), (8, 2, 2), (40, 10, 8), (200, 16, 8)):
        layer = BlackBox(torch.sin, 3, policy=Calibrated(), seed=0)
        x, gy = torch.randn(rows, 3), torch.randn(rows, 3)
        gradient(layer, x, gy)
        spent = layer.policy_state.schedule.spent
        again = -(-8 // start) * start  # answers to the same questions, eight at least
        ladder, rest = divmod(spent - used * (2 * 6 + 1) - again, start * 6)
        assert rest == 0
        assert ladder == 9


def test_trials_leave_out_rows_at_which_the_loss_has_no_gradient():
    seen = []

    def fn(x):
        seen.append(x.clone())
        return torch.sin(x)

    layer = BlackBox(fn, 1, policy=Calibrated(), seed=0)
    x, gy = torch.arange(16.0).view(16, 1), torch.zeros(16, 1)
    gy[12:] = 1
    gy[15] = math.nan
    gradient(layer, x, gy)
    trial = torch.cat(seen[1:3])  # the first calls after the forward pass ask again about rows of the trial
    assert set(trial.round().flatten().tolist()) <= {12.0, 13.0, 14.0}


def test_the_standard_error_is_that_of_the_gradient():
    weight = torch.randn(3, 2)
    layer = BlackBox(noisy(lambda x: x @ weight, 0.01), 3, seed=0)
    x, gy = torch.randn(64, 3), torch.randn(64, 2)
    ratios = []

    def hook(layer, step):
        ratios.append((step.g - step.gy @ weight.T) / layer.standard_error(step))

    for _ in range(60):
        gradient(layer, x, gy)
    handle = layer.register_step_hook(hook)
    for _ in range(20):
        gradient(layer, x, gy)
    assert float(torch.stack(ratios).square().mean().sqrt()) == pytest.approx(1.0, rel=0.35)
    handle.remove()
    gradient(layer, x, gy)
    assert len(ratios) == 20


def test_the_standard_error_is_for_policies_that_measure():
    layer = BlackBox(torch.sin, 3, policy="bond")
    with pytest.raises(Exception, match="does not measure the noise"):
        layer.standard_error(None)


def test_alone_outside_of_checkpoints_and_groups_nothing_is_kept_or_exchanged():
    layer = BlackBox(torch.sin, 3, seed=0)
    forward = layer.evaluate_rows(torch.randn(4, 3), (), None, graded=True)[1]
    assert (forward.ticket, forward.part) == (0, ALONE)
    state, differences = layer.policy_state, layer.estimator.differences
    assert state.joint_batch(layer.policy, differences, None, torch.randn(4, 3), learns=True) == ALONE


def test_statistics_of_steps():
    layer = BlackBox(torch.sin, 3, policy=Fixed(0.25), estimator=Simultaneous(2), seed=0)
    assert (layer.stats.step, layer.stats.lower, layer.stats.upper) == (None, None, None)
    gradient(layer, torch.randn(4, 3), torch.ones(4, 3))
    stats = layer.stats
    assert (stats.calls, stats.evaluations, stats.failures) == (2, 4 + 4 * 4, 0)
    assert stats.step.tolist() == stats.lower.tolist() == stats.upper.tolist() == [0.25] * 3
