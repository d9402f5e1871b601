"""What rounding does to the difference of two outputs, and to a loss of them."""

import math

import pytest
import torch

from bondgrad.measuring._rounding import ROUNDING_UNITS, OutputRounding, RoundingNoise


def observed(y, gy=None):
    """From outputs y [r, k, n, 2, d_out] of a box of k inputs."""
    gy = torch.ones(y.shape[0], y.shape[-1], dtype=torch.float64) if gy is None else gy
    rounding = OutputRounding(gy, y.shape[1])
    rounding.observe(slice(0, y.shape[1]), y)
    return rounding


def outputs(seed=0):
    return torch.randn(4, 2, 50, 2, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_outputs_rounded_to_decimals():
    found = observed(outputs().round(decimals=1)).deviation(torch.ones(4, 2, dtype=torch.float64))
    assert torch.allclose(found, torch.full_like(found, 0.1 / math.sqrt(12)), rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_outputs_of_a_coarser_type(dtype):
    y = (1 + outputs().abs()).to(dtype).double()
    y[:, :, 0, 1] = (y[:, :, 0, 0] * (1 + torch.finfo(dtype).eps)).to(dtype).double()  # as close as two outputs can be
    found = observed(y).deviation(torch.ones(4, 2, dtype=torch.float64))
    size = y.flatten(1).amax(1)[:, None].expand(4, 2)
    assert torch.allclose(found, torch.finfo(dtype).eps * size, rtol=0.3)


def test_outputs_that_do_not_move_count_as_much_as_a_slope_may_be_hidden():
    y = outputs().round(decimals=1).expand(-1, -1, -1, -1, 2).clone()
    y[..., 1] = y[..., :1, 1]  # the second output is the same at both ends
    share = torch.tensor([1.0, 0.1], dtype=torch.float64).expand(4, 2)
    found = observed(y).deviation(share) * math.sqrt(12) / 0.1
    assert torch.allclose(found, (1 + share.square()).sqrt(), rtol=1e-6)


def test_missing_outputs_say_nothing():
    y = outputs().round(decimals=1)
    y[0, 0, :5] = math.nan
    found = observed(y).deviation(torch.ones(4, 2, dtype=torch.float64))
    assert torch.allclose(found, torch.full_like(found, 0.1 / math.sqrt(12)), rtol=1e-6)


def test_rounding_goes_by_the_larger_answer_and_by_the_usual_one():
    y = torch.tensor([[1.0, 0.0], [-3.0, math.nan], [2.0, 0.0]])
    rounding = RoundingNoise.of(y, 0.5)
    assert rounding.usual.tolist() == [2, 0]
    between = rounding.between(torch.tensor([[1.0, -4.0], [-8.0, math.nan]]), torch.tensor([[0.5, 2.0], [1.0, 1.0]]))
    assert (between / ROUNDING_UNITS).tolist() == [[1, 2], [4, 0]]  # nothing is known of an answer that did not come
