"""How long a box remembers: from the response by lag, and how that is measured; numbers worked out by hand."""

import math

import pytest
import torch

from bondgrad.structure.discovery._memory_length import mean_square_quantile, memory_length, response
from bondgrad.structure.discovery._search_batch import SearchBatch


def length(power, noise=0.0, uncertainty=0.0):
    power = torch.tensor(power).double()
    return memory_length(power + noise, torch.tensor(noise), torch.as_tensor(uncertainty).expand_as(power))


# ---- the length


@pytest.mark.parametrize(
    ("power", "expected"),
    [
        ([0, 0, 0], 0),
        ([1, 0, 0], 1),
        ([0, 0, 1, 0], 3),  # an echo that comes late
        ([1, 1, 1], 3),
        ([1, 9.1e-6, 0], 2),  # the root of 9e-6 is three thousandths
        ([1, 8.9e-6, 0], 1),
        ([1, 0, 4.6e-6, 4.6e-6], 3),  # all that comes later counts
        ([1, 0, 4.6e-6, 4.3e-6], 1),
    ],
)
def test_what_is_left_after_it_may_be_three_thousandths(power, expected):
    assert length(power) == expected


def test_a_response_that_disappears_in_the_noise_goes_on_as_it_decayed():
    """Halves are seen down to 2⁻⁵; 9e-6 · (2 - 2⁻⁵) is left of 2⁻⁵ after log₂ 1764 = 10.8 further time steps."""
    halves = [0.5**k for k in range(40)]
    assert length(halves, noise=0.1, uncertainty=0.02) == 6 + 11
    assert length(halves[:17], noise=0.1, uncertainty=0.02) == 17
    assert length(halves[:12], noise=0.1, uncertainty=0.02) == 12  # no longer than the sequences
    assert length(halves[:6], noise=0.1, uncertainty=0.02) == 6  # it was seen to the end
    assert length([1, 0, 0.25, 0, 0.0625] + [0] * 35, noise=0.1, uncertainty=0.02) == 5 + 13  # and only at some lags


def test_two_lags_are_too_few_for_a_fit_and_what_grows_does_not_decay():
    assert length([1, 0.1, 0, 0, 0], uncertainty=0.05) == 5
    assert length([1, 0.1, 0.06, 0, 0], uncertainty=0.05) == 5
    assert length([1, 0.1, 0.06] + [0] * 20, uncertainty=0.05) < 23
    assert length([0.1, 1, 1, 0, 0, 0], uncertainty=0.05) == 6
    assert length([1, 1, 1, 0, 0, 0], uncertainty=0.05) == 6


def test_a_little_noise_does_not_matter():
    """From the last lag that is seen on, it may add up to the part that may be left: 9e-6."""
    assert length([1, 0, 0, 0], uncertainty=2.2e-6) == 1
    assert length([1, 0, 0, 0], uncertainty=2.3e-6) == 4
    assert length([1, 0.5, 0, 0], noise=0.25, uncertainty=0.4) == 4
    # Where next to nothing can come after the last that was seen, as by this decay, that is the end.
    assert length([1, 1, 1e-3, 1e-6] + [0] * 4, uncertainty=[0, 0, 0, 0, 1e-3, 0, 0, 0]) == 4


# ---- the response


def batch_of(fn, x, features, noise=1e-9, low=-math.inf, high=math.inf):
    """A box of sequences fn, [..., T·d] -> [..., T·d_out]."""
    x = torch.as_tensor(x).double()
    low, high = (torch.full_like(x[0], limit) for limit in (low, high))
    return SearchBatch(x, fn(x), lambda points, rows: fn(points), 10**6, noise, 1e-9, low, high, features)


def measured(*args, **settings):
    power, noise, uncertainty = response(batch_of(*args, **settings), torch.Generator().manual_seed(0))
    return power.tolist(), float(noise), uncertainty.tolist()


def two_inputs(points):
    """y_t = x₀ at t, and 3 x₁ one time step before."""
    x = points.unflatten(-1, (8, 2))
    y = torch.stack((x[..., 0], torch.zeros_like(x[..., 0])), -1)
    y[..., 1:, 1] = 3 * x[..., :-1, 1]
    return y.flatten(-2)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_the_response_is_a_mean_square_over_inputs_and_outputs(rows):
    """Both sides of a step make twice the slope: 4 · 1² over two inputs and two outputs, and 4 · 3²."""
    power, noise, uncertainty = measured(two_inputs, torch.ones(rows, 16), 2)
    assert power == pytest.approx([1, 9, 0, 0, 0, 0, 0, 0])
    assert noise == 0
    assert uncertainty == [0] * 8


@pytest.mark.parametrize(("size", "noise", "step"), [(2.0, 1e-9, 0.1), (0.0, 1e-9, 0.05), (1.0, 0.009, 0.3)])
def test_steps_are_a_twentieth_of_the_size_or_more_for_noise(size, noise, step):
    seen = []

    def fn(points):
        seen.append(points.clone())
        return points[..., :4]

    response(batch_of(fn, torch.full((2, 4), size), 1, noise), torch.Generator())
    points = torch.cat([p[0].flatten(0, -2) for p in seen[1:]])  # [4 · 2, 4], each input up and down
    expected = torch.stack([size + sign * step * torch.eye(4)[i] for i in range(4) for sign in (1, -1)])
    assert torch.allclose(points, expected.double(), atol=1e-8)


def test_few_time_steps_are_moved_evenly_and_within_the_limits():
    seen = []

    def fn(points):
        seen.append(points.clone())
        return points

    batch = batch_of(fn, torch.ones(9, 10), 1, low=0.98, high=1.01)
    response(batch, torch.Generator())
    assert {len(p) for p in seen[1:]} == {2}  # sequences
    points = torch.cat([p[0].flatten(0, -2) for p in seen[1:]])
    up, down = points[::2], points[1::2]
    assert up.argmax(1).tolist() == down.argmin(1).tolist() == [0, 2, 5, 7]
    assert up.amax(1).tolist() == pytest.approx([1.01] * 4)
    assert down.amin(1).tolist() == pytest.approx([0.98] * 4)


@pytest.mark.parametrize(("samples", "quantile"), [(4, 18.467), (10, 29.588), (100, 149.449)])
def test_the_quantiles_of_a_mean_square_are_those_of_chi_square(samples, quantile):
    """From tables: those that chance exceeds once in a thousand times."""
    found = mean_square_quantile(torch.tensor(float(samples)), 3.0902)
    assert float(found) == pytest.approx(quantile / samples, rel=0.015)


def test_noise_shows_before_the_time_step_that_is_moved():
    """Answers that differ by 0.01 between both ends for no reason, over steps of 0.05: (0.01 / 0.05)² = 0.04.

    Two outputs of two rows are moved at the time steps 0, 2, 4 and 6: from so many of them a lag is seen.
    """

    def fn(points):
        y = torch.zeros(*points.shape[:-1], 16).double()
        if points.ndim == 4:
            y[:, :, 0] = 0.01
        return y

    power, noise, uncertainty = measured(fn, torch.ones(2, 8), 1)
    assert power == pytest.approx([0.04] * 8)
    assert noise == pytest.approx(0.04)
    excess = {16: 2.09628, 12: 2.55225, 8: 3.40198, 4: 5.72188}  # that chance exceeds as rarely as four deviations
    expected = [0.04 * excess[2 * 2 * seen] for seen in (4, 4, 3, 3, 2, 2, 1, 1)]
    assert uncertainty == pytest.approx(expected, rel=1e-4)
    assert memory_length(*(torch.tensor(t) for t in (power, noise, uncertainty))) == 0


def test_a_single_time_step_shows_no_noise():
    power, noise, uncertainty = measured(lambda points: 3 * points, torch.ones(2, 1), 1)
    assert power == pytest.approx([4 * 9])
    assert (noise, uncertainty) == (0, [0])


@pytest.mark.parametrize(
    ("failing", "length"),
    [
        ([(0, 2), (1, 2), (0, 4), (1, 4)], 1),
        ([(0, 2), (1, 2), (0, 4), (1, 4), (1, 6)], 0),
        ([(0, 0)], 1),
        ([(0, 0), (1, 0)], 0),
    ],
)
def test_half_of_the_moves_may_fail_but_not_all_of_the_first_time_step(failing, length):
    """Two rows of eight time steps, moved at 0, 2, 4 and 6; only a move of the first shows what is left at the end."""

    def fn(points):
        y = points.clone()
        for row, time in failing:
            if points.ndim == 4 and bool((points[row, ..., time] != 1).any()):
                y[row] = math.nan
        return y

    assert memory_length(*response(batch_of(fn, torch.ones(2, 8), 1), torch.Generator())) == length
