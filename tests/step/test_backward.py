"""The pieces of a backward pass, by numbers."""

import copy
import math

import pytest
import torch

from bondgrad import BlackBox, estimators
from bondgrad.policies import Fixed
from bondgrad.step._backward import assumed_noise, normalized, rows_of, take_step, usable
from bondgrad.step._health import HealthReport
from bondgrad.step._neighbourhood import Neighbourhood
from bondgrad.step._perturbations import perturbations
from bondgrad.step._records import ForwardRecord, StepInputs
from bondgrad.step._trials import TrialRows, half_width, measured_noise
from bondgrad.torch_support._ranks import JointBatch
from tests.helpers import same_state


def test_perturbations_have_their_sign_and_some_units_of_rounding_more():
    x = torch.tensor([[1000.0, 0.0]])
    size, sign = torch.tensor([[[0.5, 0.25]]]), torch.tensor([[[-3.0, 0.1]]])
    more = 4 * torch.finfo(torch.float32).eps * 1000
    expected = torch.tensor([[[-(0.5 + more), 0.25]]])
    assert torch.equal(perturbations(x, size, sign, 4.0), expected)
    assert torch.equal(perturbations(x, size, sign, 0.0), torch.tensor([[[-0.5, 0.25]]]))


def test_what_could_not_be_estimated_is_zero():
    slopes = torch.tensor([[1.0, math.nan], [math.inf, -2.0], [-math.inf, 3.0]])
    assert usable(slopes, torch.ones(3, 3)).tolist() == [[1, 0], [0, -2], [0, 3]]


def test_where_the_loss_has_no_finite_gradient_neither_has_the_box():
    gy = torch.tensor([[1.0, 2.0], [math.inf, 0.0]])
    found = usable(torch.tensor([[1.0, 2.0], [3.0, math.nan]]), gy)
    assert found[0].tolist() == [1, 2]
    assert found[1].isnan().all()


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_rows_of_norm_one_whatever_their_scale(scale):
    g = normalized(torch.tensor([[3.0, -4.0], [0.0, 0.0]]) * scale)
    assert torch.allclose(g, torch.tensor([[0.6, -0.8], [0.0, 0.0]]))


@pytest.mark.parametrize(
    ("noise", "measured", "expected"),
    [(0.5, 0.1, 0.5), (None, 0.1, 1e-7), ("auto", 0.1, 0.1), ("auto", 1e-9, 1e-7), ("auto", 0.0, 1e-7)],
)
def test_the_noise_that_is_reckoned_with(noise, measured, expected):
    assert half_width(noise, measured, rounding=1e-7) == expected


def test_without_a_number_the_noise_is_the_coarser_rounding_of_inputs_and_outputs():
    single, double = (torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64))
    for given, answered, expected in [
        (torch.float64, torch.float64, double),
        (torch.float64, torch.float32, single),
        (torch.float32, torch.float64, single),
    ]:
        layer = BlackBox(lambda x, dtype=answered: x.to(dtype), 3)
        step = step_of(layer, torch.randn(4, 3, dtype=given), torch.ones(4, 3), ForwardRecord(True))
        assert assumed_noise(step, 0.0) == expected


def report(noise, rough):
    return HealthReport(alike=False, noise=noise, rough=rough, signal=0, drowned=0, dead=False)


def test_measured_noise_is_the_half_width_of_a_uniform_distribution():
    # Its standard deviation is the half-width over the square root of three.
    assert measured_noise(report(0.1, 0.1), 0.0, seeded=False) == pytest.approx(0.1 * math.sqrt(3))


def test_differences_say_it_where_answers_repeat_themselves_or_share_a_seed():
    assert measured_noise(report(0.0, 0.2), 0.0, seeded=False) == pytest.approx(0.2 * math.sqrt(3))
    assert measured_noise(report(0.1, 0.2), 0.0, seeded=True) == pytest.approx(0.2 * math.sqrt(3))
    assert measured_noise(report(0.1, 0.9), 0.0, seeded=False) == pytest.approx(0.9 * math.sqrt(3))  # 9 times rougher


def test_noise_is_averaged_with_what_was_known_and_small_changes_are_none():
    known = 0.4 / math.sqrt(3)
    assert measured_noise(report(known, known), 0.1, seeded=False) == pytest.approx(0.2)  # the geometric mean
    little = 0.12 / math.sqrt(3)
    assert measured_noise(report(little, little), 0.1, seeded=False) == 0.1
    assert measured_noise(report(math.inf, math.inf), 0.1, seeded=False) == 0.1


def step_of(layer, x, gy, forward):
    """The record that a layer gives to `take_step`."""
    state = layer.policy_state
    generator, noise = torch.Generator().manual_seed(0), None
    rest = (state.read(x.device), generator, layer.tracker, state.schedule, noise, None, None, False)
    return StepInputs(layer.parts(), forward, x, layer(x), gy, (), *rest)


def test_in_several_processes_normalised_rows_are_made_for_wrappers_that_average():
    layer = BlackBox(torch.sin, 3, policy=Fixed(1e-3), estimator=estimators.Central(normalize_rows=True))
    x, gy = torch.randn(4, 3), torch.randn(4, 3)
    for ranks in (1, 4):
        forward = ForwardRecord(True, part=JointBatch(ranks, rows=4 * ranks))
        g = take_step(step_of(layer, x, gy, forward)).g
        assert torch.allclose(g.norm(dim=1), torch.full((4,), float(ranks)))


class Listening(Fixed):
    """Remembers the sum of the gradients that it was told of."""

    def init(self, in_features):
        return {"total": torch.zeros(in_features)}

    def summarize(self, state, seen):
        return seen.g.sum(0)

    def observe(self, state, summary, rows, differences):
        return {"total": summary / rows}


def test_in_several_processes_the_policy_is_told_of_the_gradient_that_wrappers_leave():
    layer = BlackBox(torch.sin, 3, policy=Listening(1e-3))
    x, gy = torch.randn(4, 3), torch.randn(4, 3)
    alone = take_step(step_of(layer, x, gy, ForwardRecord(True)))
    assert alone.summary is None
    assert torch.allclose(alone.state["total"], alone.g.mean(0))
    together = take_step(step_of(layer, x, gy, ForwardRecord(True, part=JointBatch(4, rows=16))))
    assert together.state is None  # until all have said what they saw
    assert torch.allclose(together.summary, alone.g.sum(0) / 4)


def test_a_step_changes_nothing_by_itself():
    layer = BlackBox(torch.sin, 3, seed=0)
    x, gy = torch.randn(16, 3), torch.randn(16, 3)
    step = step_of(layer, x, gy, ForwardRecord(True))
    before = copy.deepcopy(layer.policy_state.state_dict()), vars(layer.policy_state.schedule).copy(), layer.trace.last
    result = take_step(step)
    assert torch.allclose(result.g, gy * x.cos(), atol=1e-3)
    assert same_state(layer.policy_state.state_dict(), before[0], but=["requests"])
    assert (vars(layer.policy_state.schedule), layer.trace.last) == before[1:]
    assert result.state is not None
    assert result.trial is not None


@pytest.mark.parametrize(("estimator", "gain"), [("central", 0.5), ("forward", 2.0)])
def test_the_noise_at_the_start_is_that_of_slopes_over_a_step_of_one(estimator, gain):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 5000, generator=generator)

    def fn(x):
        return x @ weight + 0.1 * torch.randn(len(x), 5000, generator=generator)

    layer = BlackBox(fn, 3, estimator=estimator, seed=0)
    x, gy = torch.randn(32, 3, generator=generator), torch.randn(32, 5000, generator=generator)
    step = step_of(layer, x, gy, ForwardRecord(True))
    box = Neighbourhood(step.parts, step.x, step.y)
    start = TrialRows(step, box, rows_of(step)).starting_point()
    assert float(start.noise) == pytest.approx(0.1**2 * gain, rel=0.05)
    assert box.evaluations == {"trial": 8}  # rows that were asked about once more
