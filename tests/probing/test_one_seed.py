"""Boxes that take a seed are compared under the same one."""

import numpy as np
import pytest
import torch

from bondgrad import probe
from bondgrad.probing import Session
from bondgrad.probing._one_seed import ask_ends
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
    assert sampler.seed is None


@pytest.mark.parametrize("fn", [shared, own])
def test_inputs_move_a_box_whose_noise_hides_them_without_a_seed(fn):
    report = probe(fn, rows(d=2))
    assert min(report.sensitivity.change) > 0.1
    assert report.sensitivity.dead == []
    assert report.steps.error < 0.05
    assert not any("no input changes an output" in text for text in report.left_out)
    assert report.gradients is not None or any("noise drowns slopes" in text for text in report.left_out)
