"""Rows that a box is given: what is refused, and what is said about it."""

import numpy as np
import pytest
import torch

from bondgrad.calling._inputs import check_input, check_rows, context_rows


@pytest.mark.parametrize(
    ("x", "in_time", "says"),
    [
        (torch.zeros(()), False, r"shape \[..., in_features=2\], got \[\]"),
        (torch.zeros(3), False, r"shape \[..., in_features=2\], got \[3\]"),
        (torch.zeros(2, 3), False, r"shape \[..., in_features=2\], got \[2, 3\]"),
        (torch.zeros(2), True, r"shape \[..., time, in_features=2\], got \[2\]"),
        (torch.zeros(0, 2), False, r"empty batch, shape \[0, 2\]"),
    ],
)
def test_shapes_that_are_refused(x, in_time, says):
    with pytest.raises(ValueError, match=says):
        check_input(x, 2, in_time)


@pytest.mark.parametrize("x", [torch.zeros(2), torch.zeros(1, 2), torch.zeros(4, 5, 2), torch.zeros(2).half()])
def test_any_leading_shape_is_taken(x):
    check_input(x, 2)


def test_one_number_is_a_batch():
    check_input(torch.zeros(1), 1)
    check_rows(torch.zeros(1, 1))
    check_input(torch.zeros(1, 1), 1, in_time=True)


@pytest.mark.parametrize(
    ("x", "error", "says"),
    [
        (np.zeros((4, 3)), TypeError, "torch tensor, got ndarray"),
        (torch.zeros(4, 3).long(), TypeError, "floating point"),
        (torch.zeros(()), ValueError, r"\[..., in_features=any\], got \[\]"),
        (torch.zeros(3), ValueError, r"rows, \[N, d\], got \[3\]"),
        (torch.zeros(4, 3, 2), ValueError, r"rows, \[N, d\], got \[4, 3, 2\]"),
        (torch.zeros(0, 3), ValueError, "empty batch"),
    ],
)
def test_what_is_not_rows_is_refused(x, error, says):
    with pytest.raises(error, match=says):
        check_rows(x)


def test_contexts_as_rows():
    one, two = context_rows((torch.arange(6).view(2, 3), torch.zeros(2, 3, 4, requires_grad=True)), torch.Size([2, 3]))
    assert one.tolist() == [0, 1, 2, 3, 4, 5]
    assert two.shape == (6, 4)
    assert not two.requires_grad
    with pytest.raises(ValueError, match=r"context 1 must have one entry per row of x, shape \[2, 3, ...\], got \[2\]"):
        context_rows((torch.zeros(2, 3), torch.zeros(2)), torch.Size([2, 3]))
