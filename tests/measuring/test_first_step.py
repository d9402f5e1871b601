"""The first step: where slopes of neighbouring rungs agree best, from the longest down."""

import math

import pytest
import torch

from bondgrad.measuring._first_step import StartingPoint, climb, most_slopes
from bondgrad.measuring._spread import Spread

RUNGS = [4.0**k for k in range(-8, 1)]


def start(slopes, reach=(1.0,), noise=0.0, deviation=None, room=None, together=False):
    reach = torch.tensor(reach, dtype=torch.float64)
    spread = Spread(reach if deviation is None else torch.tensor(deviation, dtype=torch.float64), reach)
    room = None if room is None else torch.tensor(room, dtype=torch.float64)
    return StartingPoint(spread, reach, torch.tensor(noise, dtype=torch.float64), slopes, room, together)


class Asking:
    """Slopes [r, d] of a box, y = fn(x) with inputs that act alone, and the steps that were asked for."""

    def __init__(self, fn, rows=16, sigma=0.0, scale=(1.0,), seed=0):
        self.random = torch.Generator().manual_seed(seed)
        self.fn, self.sigma, self.scale = fn, sigma, torch.tensor(scale, dtype=torch.float64)
        self.x = torch.randn(rows, len(scale), generator=self.random, dtype=torch.float64)
        self.asked = []

    def __call__(self, h):
        self.asked.append(h.tolist())
        relative = h / self.scale
        ends = [self.fn(self.x + sign * relative) for sign in (1, -1)]
        noise = torch.randn(2, *self.x.shape, generator=self.random, dtype=torch.float64) * self.sigma
        return (ends[0] - ends[1] + noise[0] - noise[1]) / (2 * h)

    def start(self, **settings):
        """The starting point: inputs are normal, with deviations `scale`."""
        return start(self, tuple(self.scale.tolist()), self.sigma**2 / 2, **settings)


def step_of(*args, together=False, **settings):
    found = climb(Asking(*args, **settings).start(together=together))
    assert found.step.shape == (len(settings.get("scale", (1.0,))),)
    return found.step.tolist()


# ---- where slopes agree


def test_of_a_smooth_box_all_rungs_are_asked_and_those_agree_best_where_rounding_begins():
    """The error of sine is h²/6, that of rounding 1e-10 / h: both are least at 7e-4, give or take a rung."""
    box = Asking(torch.sin, sigma=1e-10)
    found = climb(box.start())
    assert [h for (h,) in box.asked] == RUNGS
    assert 7e-4 / 8 < float(found.step) < 8 * 7e-4
    assert not found.jumps.any()


def test_the_step_is_between_both_rungs_and_the_slope_that_of_the_shorter_one():
    def slopes(h):
        return torch.full((4, 1), 3.0, dtype=torch.float64) * (1 + 1e-5 * h)  # equal slopes would say nothing

    found = climb(start(slopes))
    assert float(found.step) == 2 * RUNGS[0]
    assert float(found.slope) == pytest.approx(3, rel=1e-4)


def test_rungs_by_which_no_slope_changes_say_nothing():
    found = climb(start(lambda h: torch.where(h < 0.01, 3.0, 3 + h**2).expand(4, 1)))
    assert float(found.step) == 2 * 4.0**-4  # the first pair of which the longer one is beyond 0.01


@pytest.mark.parametrize("sigma", [1e-6, 1e-4, 1e-2])
def test_noise_and_bending_are_balanced(sigma):
    """D(h) = 1 + h² + noise / h is best where both errors are alike, at h = (sigma / 2)^(1/3), give or take a rung."""
    random = torch.Generator().manual_seed(0)
    found = climb(start(lambda h: 1 + h**2 + sigma / h * torch.randn(64, 1, generator=random), noise=sigma**2))
    assert 1 / 8 < float(found.step) / (sigma / 2) ** (1 / 3) < 8


def test_noise_that_is_told_makes_steps_longer():
    """Equal to 1e-4 at every rung, but noise of variance 1e-6 / h² says that short steps cannot be as good as that."""
    slopes = lambda h: torch.full((4, 1), 1.0) * (1 + 1e-4 * h)  # noqa: E731
    assert float(climb(start(slopes)).step) == 2 * RUNGS[0]
    assert float(climb(start(slopes, noise=1e-6)).step) == 0.5
    assert float(climb(start(slopes, noise=1e-16)).step) == 0.5 / 4**3  # where that is as much as the slopes' growth


def test_the_pairs_that_agree_are_looked_at_from_the_longest_down():
    """Slopes that agree even better over short steps, past two rungs at which they do not, are those between jumps."""

    def slopes(h):
        # Those over 1, 1/4 and 1/16 agree within 5 per cent, those over 1/64, 1/256 and 1/1024 do not, all others do.
        growth = {1.0: 1.0, 0.25: 1.02, 0.0625: 1.05, 4.0**-3: 1.5, 4.0**-4: 3.0}
        return torch.full((8, 1), growth.get(float(h), 6.0 + float(h)))

    assert float(climb(start(slopes)).step) == 0.5


def test_a_better_pair_may_be_two_rungs_below():
    def slopes(h):
        growth = {1.0: 1.0, 0.25: 1.05, 0.0625: 1.5, 4.0**-3: 1.501}
        return torch.full((8, 1), growth.get(float(h), 1.0 / float(h)))

    assert float(climb(start(slopes)).step) == 2 * 4.0**-3  # 1/64 and 1/16, by the pair of 1/16 and 1/4


def test_each_input_has_its_own_step_but_not_many_rungs_below_the_others():
    speed = torch.tensor([1.0, 1.0, 1.0, 30.0, 1e4])
    *usual, fast, fastest = step_of(lambda x: torch.sin(speed * x), sigma=1e-6, scale=(1.0,) * 5)
    assert max(usual) <= 4 * min(usual)
    assert fast <= sorted(usual)[1] / 4
    assert fastest >= sorted(usual)[1] / 4**2


@pytest.mark.parametrize("together", [False, True])
def test_inputs_that_move_together_have_the_same_relative_length(together):
    steps = step_of(
        lambda x: torch.sin(x * torch.tensor([1.0, 30, 1])), sigma=1e-6, scale=(1.0, 100.0, 0.01), together=together
    )
    relative = [step / scale for step, scale in zip(steps, (1.0, 100.0, 0.01), strict=True)]
    assert relative[0] == pytest.approx(relative[2])
    assert (relative[1] == pytest.approx(relative[0])) == together


@pytest.mark.parametrize("sigma", [0.0, 1e-6, 1e-2])
def test_inputs_of_very_different_scale(sigma):
    scale = (1e-12, 1.0, 1e12)
    plain, scaled = step_of(torch.sin, sigma=sigma, scale=(1.0,) * 3), step_of(torch.sin, sigma=sigma, scale=scale)
    assert [step / by for step, by in zip(scaled, scale, strict=True)] == pytest.approx(plain)


@pytest.mark.parametrize("size", [1e-60, 1e60, 1e150])
def test_slopes_of_any_size(size):
    usual, other = (climb(Asking(lambda x, by=by: by * torch.sin(x)).start()) for by in (1.0, size))
    assert torch.equal(usual.step, other.step)
    assert float(other.slope) == pytest.approx(float(usual.slope) * size)
    assert not other.jumps.any()


def test_rows_count_alike():
    """Slopes of two rows are a thousand times as large and agree over short steps, those of ten rows over long ones."""
    noise = torch.randn(10, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def slopes(h):
        large = (1000 * (1 + h**2)).expand(2, 1)
        return torch.cat((large, 1 + 0.02 / h * noise[:, RUNGS.index(float(h)), None]))

    assert float(climb(start(slopes)).step) >= 2 * 4.0**-2


# ---- few rows


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("sigma", [1e-4, 1e-2])
def test_with_few_rows_all_inputs_are_judged_together(rows, sigma):
    """The step of all is the same; longer ones come from noise only, for inputs with hardly any slope."""
    for seed in range(10):
        steps = step_of(torch.sin, rows=rows, sigma=sigma, scale=(1.0,) * 8, seed=seed)
        assert all(step >= steps[0] / 4**4 for step in steps)
        assert sigma < sorted(steps)[4] <= 4
    exact = step_of(torch.sin, rows=rows, scale=(1.0,) * 8)
    assert len(set(exact)) == 1


def test_of_few_rows_an_input_that_is_lost_in_noise_starts_farther_out_but_no_farther_than_the_others():
    def slopes(h):
        return torch.tensor([[1.0, 1.0, 1.0, 1 / 4000]]).double() * (1 + 100 * h**2)

    assert len(set(climb(start(slopes, (1.0,) * 4, noise=1e-17)).step.tolist())) == 1  # no farther than that
    reach = torch.tensor([1.0, 1.0, 1.0, 4.0**-4]).double()
    relative = climb(start(lambda h: slopes(h / reach), reach.tolist(), noise=1e-17)).step / reach
    assert relative[0] == relative[1] == relative[2] == 2 * 4.0**-4
    share = 1e-17 / ((reach[3] * 4.0**-4) ** 2 / 4000**2)
    assert 16**3 < share / 1e-4 < 16**4  # a rung takes off so much of the part that may be noise
    assert relative[3] == 4**3 * relative[0]


# ---- farther, and where nothing agrees


def hidden(h, rows, seed=0):
    """Slopes of one, under noise of a deviation of 30 / h."""
    return 1 + 30 / h * torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed + int(1e4 * float(h[0]))))


@pytest.mark.parametrize(("rows", "more"), [(16, 1), (4, 1), (3, 3), (1, 3)])
def test_where_noise_hides_all_slopes_longer_steps_are_tried(rows, more):
    asked = []

    def slopes(h):
        asked.append(float(h[0]))
        return hidden(h, rows)

    climb(start(slopes, (1.0,) * 4, noise=900.0))
    assert asked == RUNGS + [4.0**k for k in range(1, more + 1)]
    for other in ({"room": (1.5,) * 4}, {"noise": 0.0}):  # between limits, and without noise that could hide them
        asked.clear()
        climb(start(slopes, (1.0,) * 4, **({"noise": 900.0} | other)))
        assert asked == RUNGS


def test_where_slopes_agree_no_longer_steps_are_tried():
    box = Asking(torch.sin, sigma=0.1, scale=(1.0,) * 4)
    climb(box.start())
    assert [h[0] for h in box.asked] == RUNGS


def test_where_nothing_agrees_the_longest_step_with_answers_is_taken():
    random = torch.Generator().manual_seed(0)
    every_second = torch.arange(8)[:, None] % 2 == 0
    found = climb(start(lambda h: torch.randn(8, 1, generator=random).where((h < 0.1) | every_second, math.nan)))
    assert float(found.step) == 4.0**-2


@pytest.mark.parametrize(("noise", "step"), [(1e-6, 4.0**-3), (0.0, 1.0), (1.0, 1.0)])
def test_where_nothing_agrees_but_outputs_move_far_it_is_the_shortest_step_by_which_they_do(noise, step):
    """By 100 h, and by one from 0.01 on. Not if noise moves them as far, or if there is none that could hide slopes."""
    random = torch.Generator().manual_seed(0)

    def slopes(h):
        signs = torch.randint(2, (8, 4), generator=random, dtype=torch.float64) * 2 - 1
        return signs * (100 * h).clamp(max=1) / h

    found = climb(start(slopes, (1.0,) * 4, noise, room=(1.5,) * 4))
    assert found.step.tolist() == [step] * 4


@pytest.mark.parametrize("rows", [1, 8])
def test_slopes_that_are_zero_everywhere_lead_to_the_longest_step(rows):
    found = climb(start(lambda h: torch.zeros(rows, 2), (1.0, 3.0)))
    assert found.step.tolist() == [1, 3]
    assert float(found.slope) == 1
    assert not found.jumps.any()


def test_an_input_without_slopes_goes_with_the_others_or_two_rungs_farther_where_noise_may_hide_it():
    def slopes(h):
        return torch.tensor([1.0, 1.0, 0.0]) * (1 + 1e-3 * h**2).expand(8, 3)

    assert climb(start(slopes, (1.0,) * 3)).step.tolist() == [2 * RUNGS[0]] * 3
    *usual, dead = climb(start(slopes, (1.0,) * 3, noise=1e-12)).step.tolist()
    assert usual[0] == usual[1] <= dead <= 16 * usual[0]


@pytest.mark.parametrize("rows", [1, 8])
def test_the_typical_slope_is_the_median_over_inputs_of_its_root_mean_square_over_rows(rows):
    def slopes(h):
        return torch.tensor([3.0, 5.0, 4.0]).expand(rows, 3) * (1 + 1e-5 * h)

    assert float(climb(start(slopes, (1.0,) * 3)).slope) == pytest.approx(4, rel=1e-3)
    far = torch.tensor([1.0, 7.0])[:, None].repeat(4, 1)
    assert float(climb(start(lambda h: far * (1 + 1e-5 * h))).slope) == pytest.approx(5, rel=1e-3)


# ---- failures, and inputs far from zero


def test_a_box_without_any_answer_gets_the_longest_step():
    found = climb(start(lambda h: torch.full((4, 1), math.nan)))
    assert (float(found.step), float(found.slope), found.jumps.tolist()) == (1, 1, [False])


@pytest.mark.parametrize("rows", [1, 8])
def test_a_step_is_kept_away_from_where_no_row_has_an_answer(rows):
    asked = []

    def slopes(h):
        asked.append(float(h))
        return (1 + 0.1 * torch.rand(rows, 1, generator=torch.Generator().manual_seed(1))).where(h < 0.01, math.nan) + h

    found = climb(start(slopes))
    assert float(found.step) <= 4.0**-3 / 16
    assert asked[-1] == 4.0**-3  # nothing is asked beyond that


def test_rungs_at_which_all_rows_have_answers_are_preferred():
    """Slopes agree best at 1/4 and 1, where one row fails."""

    def slopes(h):
        found = (1 + 1e-3 / h).expand(8, 1).clone()
        found[0] = torch.where(h > 0.2, math.nan, found[0])
        return found

    assert float(climb(start(slopes)).step) == 2 * 4.0**-3


def test_more_rungs_for_inputs_that_vary_much_less_than_their_size():
    asked = []

    def slopes(h):
        asked.append(float(h))
        return torch.full((2, 1), math.nan)

    climb(start(slopes, (500.0,), deviation=(1.0,)))
    assert min(asked) <= 1 / 256 < 4 * min(asked)
    assert asked[-1] == 500
    asked.clear()
    climb(start(slopes, (5e9,), deviation=(1.0,)))
    assert len(asked) == 9 + 12
    assert most_slopes() == 9 + 12 + 3


@pytest.mark.parametrize(("slope", "far"), [(1.0, False), (0.0, True)])
def test_steps_of_more_than_four_deviations_are_for_boxes_of_which_nothing_else_is_known(slope, far):
    """An input of deviation 1 and size 2000: slopes agree up to 1/4, and best of all beyond 100."""

    def slopes(h):
        near = slope * (1 + 1e-3 * h) if float(h) < 1 else torch.zeros(1) if float(h) < 60 else 2 + 1e-9 * h
        wild = torch.rand(8, 1, generator=torch.Generator().manual_seed(int(1e4 * float(h)))) - 0.5
        return (near if float(near) else 1e3 * wild).expand(8, 1)

    found = climb(start(slopes, (1000.0,), deviation=(1.0,)))
    assert (float(found.step) > 100) == far
