"""Boxes that take a seed are compared under the same one."""

import numpy as np
import pytest
import torch

from bondgrad import probe
from bondgrad.measuring._sampler import BudgetExceeded
from bondgrad.probing import Session
from bondgrad.probing._differences import measure_smoothness
from bondgrad.probing._facts import find_first_facts
from bondgrad.probing._one_seed import ask_ends, ask_points
from bondgrad.probing._report import Findings
from tests.probing.test_probe import rows


def shared(x: np.ndarray, seed):
    """The same noise in all rows, much larger than what inputs change."""
    return np.sin(x) + 3 * np.random.default_rng(seed).normal(size=x.shape[1])


def own(x: np.ndarray, seed=None):
    """Noise of their own in all rows, by their place in the call."""
    return np.sin(x) + 3 * np.random.default_rng(seed).normal(size=x.shape)


@pytest.mark.parametrize("fn", [shared, own])
def test_what_is_drawn_cancels_between_both_ends(fn):
    sampler = Session(fn, rows(d=2)).sampler
    chosen, inputs = torch.tensor([3, 4]), torch.tensor([0, 1])
    ends = torch.tensor([[[0.0, 0.5], [0.0, 1.0]]] * 2, dtype=torch.float64)  # [2, 2, 2]
    for given in (ends, ends[:, 0]):
        change = ask_ends(sampler, chosen, inputs, given).diff(dim=-2).squeeze(-2)  # [2, ..., d_out]
        expected = torch.zeros_like(change)
        for i in (0, 1):
            expected[i, ..., i] = given[i].sin().diff(dim=-1).squeeze(-1)
        assert torch.allclose(change, expected, atol=1e-5)
    points = sampler.x[chosen][:, None, None].repeat(1, 2, 2, 1)  # [2, moves, ends, d]
    points[..., 0, 1] += 0.5
    change = ask_points(sampler, chosen, points).diff(dim=-2).squeeze(-2)
    assert torch.allclose(change, points.sin().diff(dim=-2).squeeze(-2), atol=1e-5)
    assert sampler.seed is None


@pytest.mark.parametrize("fn", [shared, own])
def test_inputs_move_a_box_whose_noise_hides_them_without_a_seed(fn):
    report = probe(fn, rows(d=2))
    assert min(report.sensitivity.change) > 0.1
    assert report.sensitivity.dead == []
    assert report.steps.error < 0.05
    assert not any("no input changes an output" in text for text in report.left_out)
    assert report.gradients is not None or any("noise drowns slopes" in text for text in report.left_out)


FUNCTIONS = {"smooth": np.sin, "kinks": np.abs, "jumps": np.round, "saturated": lambda x: np.tanh(20 * x)}


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("noise", [shared, own])
def test_points_that_are_compared_have_one_seed_so_that_noise_hides_nothing(noise, kind):
    def fn(x: np.ndarray, seed=None):
        drawn = noise(x, seed) - np.sin(x)
        return (FUNCTIONS[kind](x) + drawn)[:, :2]  # the last input changes nothing

    report = probe(fn, rows(d=3))
    assert report.smoothness.kind == ("smooth" if kind == "saturated" else kind)
    assert report.ranges.moving == [0, 1]
    assert report.ranges.saturated == (kind == "saturated")
    if kind != "jumps":  # where a few rows do not show the structure
        assert (report.dependence.groups, report.dependence.idle) == (1, [2])


@pytest.mark.parametrize("how", ["at random", "at rows"])
@pytest.mark.parametrize("noise", [shared, own])
def test_calls_that_fail_give_rows_other_places_which_is_no_effect_of_inputs(noise, how):
    lost = np.random.default_rng(0)

    def fn(x: np.ndarray, seed=None):
        if lost.random() < 0.05 if how == "at random" else bool((x[:, 0] > 1.5).any()):
            raise RuntimeError("no answer")
        return noise(x, seed)[:, :2]

    report = probe(fn, rows(d=3))
    idle = None if report.dependence is None else report.dependence.idle
    if noise is shared:
        assert (report.smoothness.kind, report.ranges.moving, idle) == ("smooth", [0, 1], [2])
    else:
        assert report.smoothness.kind in ("smooth", "unclear")
        assert 2 not in report.ranges.moving
        assert idle in (None, [2])


def test_points_on_lines_are_not_asked_one_by_one_if_there_is_no_time_for_so_many_calls():
    session = Session(own, rows(d=2))
    facts = find_first_facts(session.sampler, Findings())
    session.sampler.caller.seconds_per_call = 1.0
    calls = session.sampler.calls
    with pytest.raises(BudgetExceeded, match="calls that there is time for do not reach"):
        measure_smoothness(session.sampler, facts, torch.Generator())
    assert session.sampler.calls == calls
