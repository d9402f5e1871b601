"""Trials: rows measured at other steps, by numbers worked out by hand."""

import math

import pytest
import torch

from bondgrad import BlackBox
from bondgrad.policies import Fixed, Steps
from bondgrad.step._backward import rows_of
from bondgrad.step._neighbourhood import Neighbourhood
from bondgrad.step._records import ForwardRecord
from bondgrad.step._trials import RowSubset, TrialRows, result_of
from bondgrad.structure import Sequence
from tests.helpers import close, gradient
from tests.step.test_backward import step_of


def square(x):
    return x.square()


def trial_rows(layer, x, gy):
    step = step_of(layer, x, gy, ForwardRecord(True))
    box = Neighbourhood(step.parts, step.x, step.y)
    return step, box, TrialRows(step, box, rows_of(step))


def steps_of(size, x, sign=1.0):
    sizes = torch.full((1, *x.shape), size, dtype=x.dtype)
    return Steps(sizes, torch.full_like(sizes, sign), sizes[0, 0], sizes[0, 0])


def test_an_output_of_no_weight_does_not_set_the_scale_of_the_loss():
    x = torch.arange(1.0, 9.0, dtype=torch.float64).view(4, 2)
    gy = torch.tensor([[0.0, 1e30]], dtype=torch.float64).expand(4, 2)
    rows = RowSubset(trial_rows(BlackBox(square, 2, policy=Fixed(0.1)), x, gy)[2], 16)
    assert rows.gy.tolist() == [[0.0, 1.0]]
    assert rows.size.tolist() == [[1e30]]
    assert rows.norm.tolist() == [[1.0]]


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("known", [True, False])
def test_a_trial_has_slopes_at_half_the_step_at_the_step_and_at_twice_the_step(sign, known):
    """A forward difference of x² is 2 x + h; weights and the scale of the loss are taken out."""
    layer = BlackBox(square, 2, estimator="forward", policy=Fixed(0.1))
    layer.policy.least_ulps = 0.0
    x = torch.arange(1.0, 17.0, dtype=torch.float64).view(8, 2)
    gy = torch.tensor([[6.0, 8.0]], dtype=torch.float64).expand(8, 2)
    _, box, rows = trial_rows(layer, x, gy)
    steps = steps_of(0.1, x, sign)
    slopes = gy * (2 * x + sign * 0.1) if known else None
    trial = rows.trial(steps, slopes)
    used = x[[0, 4]]  # a quarter of the batch, evenly spaced
    expected = [(2 * used + sign * h) * torch.tensor([0.6, 0.8], dtype=torch.float64) for h in (0.05, 0.1, 0.2)]
    assert torch.allclose(trial.slopes, torch.stack(expected), rtol=1e-9)
    assert torch.equal(trial.step, torch.full((2, 2), 0.1, dtype=torch.float64))
    assert trial.sound.all()
    assert trial.repeated.abs().max() == 0
    assert box.evaluations["trial"] == 2 * (2 * 2 + 1) + (0 if known else 2 * 2)


def test_several_perturbations_have_their_root_mean_square_as_step():
    layer = BlackBox(square, 2, policy=Fixed(0.1))
    x = torch.randn(8, 2, dtype=torch.float64)
    _, _, rows = trial_rows(layer, x, torch.ones(8, 2, dtype=torch.float64))
    one, other = steps_of(0.3, x), steps_of(0.4, x)
    both = Steps(torch.cat((one.size, other.size)), torch.cat((one.sign, other.sign)), one.lower, one.upper)
    trial = rows.trial(both, torch.zeros(8, 2))
    assert torch.allclose(trial.step, torch.full((2, 2), math.sqrt((0.09 + 0.16) / 2), dtype=torch.float64))


def test_where_one_end_fails_a_slope_is_not_sound_and_the_other_end_is_used():
    layer = BlackBox(torch.sqrt, 1, policy=Fixed(0.5))
    layer.policy.least_ulps = 0.0
    x = torch.full((4, 1), 1.0, dtype=torch.float64)
    _, _, rows = trial_rows(layer, x, torch.ones(4, 1, dtype=torch.float64))
    trial = rows.trial(steps_of(0.75, x), torch.zeros(4, 1))
    assert not trial.sound.any()  # 1 - 1.5 is below zero
    assert float(trial.slopes[2]) == pytest.approx((math.sqrt(2.5) - 1) / 1.5)
    assert float(trial.slopes[0]) == pytest.approx((math.sqrt(1.375) - math.sqrt(0.625)) / 0.75)


@pytest.mark.parametrize("later", [math.nan, 1e30])
def test_noise_that_cannot_be_told_is_none(later):
    """The square of the difference of answers is not finite, or there is no answer."""
    answers = iter([0.0] * 1 + [later] * 100)
    layer = BlackBox(lambda x: torch.full_like(x, next(answers)), 2, 2)
    _, _, rows = trial_rows(layer, torch.randn(8, 2), torch.ones(8, 2))
    assert float(RowSubset(rows, 8).noise()) == 0


def test_steps_reach_no_further_than_a_quarter_of_what_limits_leave():
    x = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [-1.0, 8.0], [1.0, 8.0]])
    _, _, rows = trial_rows(BlackBox(square, 2, limits=((-1, -50), (1, 50))), x, torch.ones(4, 2))
    deviation = math.sqrt(4 / 3)  # of ±1 at four rows
    assert rows.reach.tolist() == pytest.approx([0.5, 4 * deviation])
    point = rows.starting_point()
    assert point.room.tolist() == [0.75, 37.5]  # half as far again: where most moves to one side fit
    assert point.typical.tolist() == pytest.approx([0.5, 4 * deviation])
    free = trial_rows(BlackBox(square, 2), x, torch.ones(4, 2))[2]
    assert free.reach.tolist() == pytest.approx([deviation, 4 * deviation])
    assert free.starting_point().room is None


@pytest.mark.parametrize(("estimator", "together"), [("central", False), ("forward", False), ("simultaneous", True)])
def test_a_first_step_is_one_length_where_all_inputs_move_at_once(estimator, together):
    _, _, rows = trial_rows(BlackBox(square, 2, estimator=estimator), torch.randn(8, 2), torch.ones(8, 2))
    assert rows.starting_point().together == together
    assert rows.box.parts.estimator.differences.together == together


def test_a_trial_has_the_typical_moves_of_inputs_within_limits():
    x = torch.tensor([[9.0, 5.0], [10.0, 5.0], [11.0, 5.0], [10.0, 5.0]])
    _, _, rows = trial_rows(BlackBox(square, 2, policy=Fixed(0.1), limits=((0, 4), (40, 6))), x, torch.ones(4, 2))
    trial = rows.trial(steps_of(0.1, x), torch.zeros(4, 2))
    # Half the size of the first input is more than its deviation; a quarter of the range of the second is less.
    assert trial.spread.tolist() == pytest.approx([math.sqrt(402 / 4) / 2, 0.5])
    assert trial.typical.tolist() == pytest.approx([math.sqrt(2 / 3), 0.5])


def test_the_norm_of_the_losss_gradient_is_that_at_outputs_that_depend_on_an_input():
    gy = torch.tensor([[3.0, 4.0], [0.0, 0.0], [3e30, 4e30]])
    box = Neighbourhood(BlackBox(square, 2).parts(), torch.zeros(3, 2), torch.zeros(3, 2))
    assert box.output_norm(gy).flatten().tolist() == pytest.approx([5, 0, 5e30])
    sparse = BlackBox(square, 2, structure=torch.tensor([[True, False], [True, True]]))
    box = Neighbourhood(sparse.parts(), torch.zeros(3, 2), torch.zeros(3, 2))
    found = box.output_norm(gy)
    assert found.tolist() == [pytest.approx(row) for row in ([5, 4], [0, 0], [5e30, 4e30])]


def test_of_sequences_whole_ones_are_used_and_their_time_steps_count_as_rows():
    layer = BlackBox(square, 2, structure=Sequence(horizon=1))
    layer(torch.zeros(1, 10, 2))
    x, gy = torch.randn(40, 20), torch.randn(40, 20)
    step = step_of_sequences(layer, x, gy)
    box = Neighbourhood(step.parts, step.x, step.y)
    rows = RowSubset(TrialRows(step, box, rows_of(step)), 16)
    assert rows.which.tolist() == [0]  # sixteen rows are one and a half sequences
    assert rows.x.shape == (10, 2)
    values = torch.arange(800.0).view(1, 400, 2)
    assert torch.equal(rows.of(values), values[:, :10])


def step_of_sequences(layer, x, gy):
    step = step_of(layer, x.view(40, 10, 2), gy, ForwardRecord(True))
    return step._replace(x=x, y=step.y.flatten(1))


def test_a_box_that_does_not_answer_leaves_no_report_and_the_noise_as_it_was():
    layer = BlackBox(lambda x: x * math.nan, 2, 2, policy=Fixed(0.1))
    x = torch.ones(8, 2)
    with pytest.warns(UserWarning, match="8 rows got no finite output"):
        step, _, rows = trial_rows(layer, x, torch.ones(8, 2))
    step.schedule.noise = 0.25
    result = result_of(rows.trial(steps_of(0.1, x), torch.zeros(8, 2)), step, 7, {})
    assert (result.evaluations, result.report, result.noise) == (7, None, 0.25)


@pytest.mark.parametrize("jumps", [(), (1,), (0, 1)])
def test_a_report_says_along_which_inputs_the_policy_found_jumps(jumps):
    x, ones = torch.randn(8, 2), torch.ones(8, 2)
    layer = BlackBox(square, 2, policy="calibrated")
    step, _, rows = trial_rows(layer, x, ones)
    state = layer.policy.init(2) | {"jumps": torch.tensor([1.5 * (i in jumps) for i in range(2)])}
    assert result_of(rows.trial(steps_of(0.1, x)), step, 7, state).report.jumps == jumps
    step, _, rows = trial_rows(BlackBox(square, 2, policy=Fixed(0.1)), x, ones)
    assert result_of(rows.trial(steps_of(0.1, x)), step, 7, {}).report.jumps == ()  # nobody looked


def test_noise_that_both_ends_have_in_common_is_none_at_the_start():
    layer = BlackBox(lambda x, seed: x + torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)), 2)
    assert float(trial_rows(layer, torch.randn(32, 2), torch.ones(32, 2))[2].starting_point().noise) == 0


@pytest.mark.filterwarnings("ignore:out of memory with")
@pytest.mark.parametrize("call", range(1, 16))
def test_memory_may_run_out_in_any_call_of_a_first_step(call):
    calls = []

    def fn(x: torch.Tensor):
        calls.append(len(x))
        if len(calls) == call:
            raise MemoryError
        return torch.sin(x)

    layer, x = BlackBox(fn, 2, seed=0), torch.randn(16, 2)
    assert close(gradient(layer, x, torch.ones(16, 2)), x.cos(), 1e-2)
    assert len(calls) >= call
