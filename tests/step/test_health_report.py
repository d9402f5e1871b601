"""What a trial says of a box, by numbers."""

import math

import pytest
import torch

from bondgrad.measuring._step_trial import Differences, StepTrial
from bondgrad.step._health import examine


def trial(slopes=None, repeated=None, step=0.1, spread=1.0, sound=True, differences=None, rows=4, d=3):
    slopes = torch.ones(3, rows, d) if slopes is None else slopes
    rows, d = slopes.shape[1:]
    repeated = torch.zeros(rows, 2) if repeated is None else repeated
    flags = torch.full((rows, d), sound)
    differences = Differences() if differences is None else differences
    spreads, steps = torch.full((d,), spread), torch.full((rows, d), step)
    return StepTrial(differences, spreads, spreads, steps, slopes, flags, repeated, repeated.sum())


def test_answers_are_alike_up_to_rounding_of_the_largest_of_an_output():
    y = torch.tensor([[1000.0, 1.0], [0.0, 1.0]])
    eps = torch.finfo(torch.float32).eps
    assert examine(trial(repeated=torch.tensor([[0.0, 0.0], [15_000 * eps, 15 * eps]]), rows=2), y).alike
    assert not examine(trial(repeated=torch.tensor([[0.0, 0.0], [17_000 * eps, 0.0]]), rows=2), y).alike
    assert not examine(trial(repeated=torch.tensor([[0.0, 17 * eps], [0.0, 0.0]]), rows=2), y).alike
    assert examine(trial(rows=2), torch.zeros(2, 2)).alike  # no rounding at all is allowed, and there is none


def test_noise_is_half_the_variance_of_what_repeated_answers_differ_by():
    found = examine(trial(repeated=torch.tensor([[0.3, -0.4], [math.nan, 0.0]]), rows=2), torch.ones(2, 2))
    assert found.noise == pytest.approx(math.sqrt((0.09 + 0.16) / 4 / 2))


@pytest.mark.parametrize("differences", [Differences(), Differences(order=1, shared_base=True)])
def test_roughness_is_the_standard_deviation_of_the_outputs(differences):
    generator = torch.Generator().manual_seed(0)
    ends = 0.01 * torch.randn(3, 2, 5000, 3, dtype=torch.float64, generator=generator)
    steps = torch.tensor([0.05, 0.1, 0.2], dtype=torch.float64)[:, None, None]
    base, span = (ends[0, 1], steps) if differences.shared_base else (ends[:, 1], 2 * steps)
    noise = (ends[:, 0] - base) / span
    found = examine(trial(1000 * noise, differences=differences), torch.ones(4, 2))
    assert found.rough == pytest.approx(1000 * 0.01, rel=0.05)
    expected = differences.noise_gain * 1e-4 / 0.1**2  # the variance of D(h)
    assert found.drowned == pytest.approx(1, rel=0.1)
    assert not found.dead
    clear = examine(trial(noise + 5, differences=differences), torch.ones(4, 2))
    assert clear.drowned == pytest.approx(expected / 25, rel=0.1)
    assert clear.signal > 100 > found.signal


def test_boxes_that_do_not_move():
    y = torch.ones(4, 2)
    assert examine(trial(), y).rows == 4
    assert examine(trial(sound=False), y).rows == 4
    assert not examine(trial(), y).dead
    assert examine(trial(torch.zeros(3, 4, 3)), y).dead
    assert not examine(trial(torch.zeros(3, 4, 3), sound=False), y).dead  # there were no answers


def test_answers_that_did_not_come_say_nothing_of_rounding():
    y = torch.tensor([[math.nan, 1.0], [1e-6, math.inf]])
    assert not examine(trial(repeated=torch.tensor([[0.0, 0.0], [1e-8, 0.0]]), rows=2), y).alike
    assert not examine(trial(repeated=torch.tensor([[0.0, 1e-5], [0.0, 0.0]]), rows=2), y).alike
    assert examine(trial(repeated=torch.tensor([[math.nan, 0.0], [0.0, math.inf]]), rows=2), y).alike


@pytest.mark.parametrize("smallest", [1e-6, 0.0])
def test_a_report_does_not_depend_on_the_scale_of_slopes(smallest):
    generator = torch.Generator().manual_seed(0)
    slopes = 1 + 0.1 * torch.randn(3, 50, 3, generator=generator)
    slopes[:, 0, 0] = smallest
    usual, large = (examine(trial(slopes * scale), torch.ones(4, 2)) for scale in (1.0, 1e30))
    assert (large.signal, large.drowned) == pytest.approx((usual.signal, usual.drowned), rel=1e-3)
    assert large.rough == pytest.approx(usual.rough * 1e30, rel=1e-3)


def test_slopes_that_agree_are_a_signal_in_units_of_what_noise_would_give():
    # In D(h/2), D(h), D(2h) = 2 + (e, 0, 0) the noise has the variance e² / (4 + 25/16 + 1/64), from 1, -1.25, 0.25.
    e = 0.1
    noise = e**2 / (4 + 1.25**2 + 0.25**2 / 4)
    slopes = torch.full((3, 25, 4), 2.0, dtype=torch.float64)
    slopes[0] += e
    found = examine(trial(slopes), torch.ones(4, 2))
    assert found.signal == pytest.approx(4 * 25 * 4 / (noise / 2) / math.sqrt(100), rel=1e-3)
    assert found.drowned == pytest.approx(noise / 4, rel=1e-3)
    assert found.rough == pytest.approx(math.sqrt(2 * noise) * 0.1, rel=1e-3)


def noisy_slopes(signals, rows=4000):
    """Slopes with noise of variance 1 in D(h), and inputs with such slopes beside that."""
    generator = torch.Generator().manual_seed(0)
    amplitude = torch.tensor([2.0, 1.0, 0.5], dtype=torch.float64)[:, None, None]
    noise = amplitude * torch.randn(3, rows, len(signals), dtype=torch.float64, generator=generator)
    return noise + torch.tensor(signals, dtype=torch.float64)


@pytest.mark.parametrize(
    ("signals", "drowned"),
    [
        ((0.0, 0.0, 0.0), 1),
        ((2.0, 0.0, 0.0), 1 / 5),  # 1 / (1 + 2²), of the only one with a signal
        ((2.0, 3.0, 9.0, 0.0, 0.0, 0.0, 0.0), 1 / 10),  # the median of those three
        ((0.7, 0.7, 5.0), 1 / 1.49),  # just less than seven tenths: two of three
        ((0.6, 0.6, 5.0), 1 / 26),  # 1 / 1.36 is more
    ],
)
def test_the_part_that_is_noise_is_that_of_inputs_with_a_signal(signals, drowned):
    assert examine(trial(noisy_slopes(signals)), torch.ones(4, 2)).drowned == pytest.approx(drowned, rel=0.1)


def test_inputs_whose_slopes_are_zero_have_no_part_in_it():
    slopes = noisy_slopes((2.0, 0.0, 0.0))
    slopes[:, :, 1:] = 0
    assert examine(trial(slopes), torch.ones(4, 2)).drowned == pytest.approx(1 / 5, rel=0.1)


# ---- slopes that noise hides, and others that are far larger


def told(slopes, deviation=0.1, step=0.5, **values):
    """The report of slopes [r, d] that are the same at all steps; repeated answers have noise of that deviation."""
    slopes = torch.tensor(slopes, dtype=torch.float64)
    repeated = torch.full((len(slopes), 1), deviation * math.sqrt(2), dtype=torch.float64)
    return examine(trial(slopes.expand(3, *slopes.shape), repeated, step, **values), torch.ones(len(slopes), 1))


FORWARD = Differences(order=1, shared_base=True)


@pytest.mark.parametrize(
    ("differences", "error"), [(Differences(), 0.1 * math.sqrt(0.5) / 0.5), (FORWARD, 0.1 * 2**0.5 / 0.5)]
)
def test_slopes_below_two_deviations_of_their_noise_are_hidden(differences, error):
    """The noise of both ends over twice the step, or over the step."""
    case = {"differences": differences}
    assert told([[2.01 * error], [-2.01 * error], [1.99 * error], [-1.99 * error]], **case).hidden == 0.5
    assert told([[0.0], [9.0], [9.0], [9.0]], **case).hidden == 0.25
    assert told([[9.0], [9.0]], **case).hidden == 0
    assert told([[1.99 * error, 9.0]] * 4, **case).hidden == 0.5
    assert told([[1e-9], [1e-9], [9.0], [9.0]], deviation=0.0, **case).hidden == 0
    assert told([[0.0], [0.0], [9.0], [9.0]], deviation=0.0, **case).hidden == 0  # there is nothing that could hide it


def test_rows_without_answers_are_not_counted_as_hidden():
    assert told([[9.0], [math.nan], [0.0], [math.inf]]).hidden == 0.5
    assert told([[9.0], [9.0]], sound=False).hidden == 0


@pytest.mark.parametrize(("largest", "uneven"), [(999.0, False), (1001.0, True)])
def test_rows_are_uneven_by_a_thousand_and_more_between_slopes_that_are_not_hidden(largest, uneven):
    seen = [[1.0], [-largest]] + [[30.0]] * 6  # the error is 0.1414, twice that is hidden
    assert told(seen).uneven == uneven
    assert told([[1.0], [largest]] + [[0.1]] * 6).uneven == uneven
    assert not told([[0.2], [largest]] + [[30.0]] * 6).uneven  # the smallest is hidden
    assert not told(seen[:7]).uneven  # with fewer than eight rows nothing is said


@pytest.mark.parametrize(("inputs", "uneven"), [(1, False), (2, False), (3, True), (4, True)])
def test_most_inputs_decide_whether_rows_are_uneven(inputs, uneven):
    slopes = torch.full((8, 4), 30.0)
    slopes[0, :inputs], slopes[1, :inputs] = 1.0, 5000.0
    assert told(slopes.tolist()).uneven == uneven


def test_inputs_that_are_all_hidden_are_not_uneven():
    found = told([[0.0], [1e-3]] * 8)
    assert (found.uneven, found.hidden) == (False, 1)


def test_slopes_agree_where_those_over_half_the_step_do_though_twice_the_step_is_too_long():
    """As for a periodic box, of which D(2h) may be zero."""
    found = examine(
        trial(noisy_slopes((2.0, 2.0, 2.0)) * torch.tensor([1.0, 1.0, 0.0]).view(3, 1, 1)), torch.ones(4, 2)
    )
    assert found.signal > 20
