"""The steps that `Calibrated` takes in a batch, given those that it found."""

import pytest
import torch

from bondgrad.policies import Batch, Calibrated
from tests.policies.test_new_steps import state_of


def batch_of(rows, deviation, d=1, mean=0.0):
    x = torch.tensor([-1.0, 1.0]).repeat(32)[:rows, None]
    x = x - x.mean()
    return Batch(mean + (deviation * x / x.std()).expand(rows, d), torch.Generator().manual_seed(0), rows)


def sizes(state, batch, n=1):
    found = Calibrated().steps(state, batch, n, 0.0)
    assert found.size.shape == found.sign.shape == (n, *batch.x.shape)
    assert torch.equal(found.lower, state["step"])
    return found.size[0, 0].tolist()


@pytest.mark.parametrize(("rows", "factor"), [(7, 1.0), (8, 0.8), (64, 0.8)])
def test_steps_shrink_with_inputs_that_vary_ten_times_less_if_there_are_rows_to_tell(rows, factor):
    assert sizes(state_of(1), batch_of(rows, 0.1), 3) == pytest.approx([0.1 * factor])  # eight times less is let pass


@pytest.mark.parametrize("deviation", [0.01, 0.5, 1.0, 1.4, 30.0])
def test_with_jumps_steps_go_with_the_deviation_of_the_batch(deviation):
    expected = min(max(2.0, deviation / 1.5), 1.5 * deviation)
    jumping = state_of(1, step=2.0, jumps=1.0)
    assert sizes(jumping, batch_of(64, deviation)) == pytest.approx([expected])
    assert sizes(jumping, batch_of(64, deviation, mean=100.0)) == pytest.approx([expected], rel=1e-3)
    assert sizes(jumping, batch_of(7, deviation)) == pytest.approx([2.0])  # too few rows to tell
