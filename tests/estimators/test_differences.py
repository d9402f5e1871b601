"""The pieces that estimators are made of: differences of outputs and inputs, limits, chunks."""

import math

import pytest
import torch

from bondgrad.estimators import chunks, input_difference, loss_change, output_difference, within_limits

BASE = torch.tensor([[10.0, 20.0]])  # [b, d_out]
ENDS = torch.tensor([[[[13.0, 26.0], [8.0, 18.0]]]]).expand(1, 4, 2, 2)  # [b, j, ends, d_out]
OK = torch.tensor([[[True, True], [True, False], [False, True], [False, False]]])  # [b, j, ends]
FAILED = torch.where(OK.unsqueeze(3), ENDS, math.nan)


def test_differences_of_outputs():
    assert output_difference(ENDS, None, BASE).tolist() == [[[5, 8]] * 4]
    assert output_difference(FAILED, OK.unsqueeze(3), BASE).tolist() == [[[5, 8], [3, 6], [2, 2], [0, 0]]]
    by_output = torch.tensor([[[[True, False], [False, True]]]])  # of the first end one output, of the second the other
    assert output_difference(ENDS[:, :1], by_output, BASE).tolist() == [[[3, 2]]]
    assert output_difference(ENDS[:, :, :1], None, BASE).tolist() == [[[3, 6]] * 4]
    assert output_difference(FAILED[:, :, :1], OK[:, :, :1, None], BASE).tolist() == [[[3, 6]] * 2 + [[0, 0]] * 2]


def test_changes_of_the_loss():
    gy = torch.tensor([[2.0, 3.0]])
    assert loss_change(ENDS, None, BASE, gy).tolist() == [[34] * 4]
    assert loss_change(FAILED, OK, BASE, gy).tolist() == [[34, 24, 10, 0]]
    assert loss_change(FAILED[:, :, :1], OK[:, :, :1], BASE, gy).tolist() == [[24, 24, 0, 0]]


def test_differences_of_outputs_come_before_sums():
    """Where outputs are large, gy·y⁺ - gy·y⁻ would have no digits left."""
    base = torch.tensor([[1e7, 1e7]])
    y = base[:, None, None] + torch.tensor([[[[2.0, 0.0], [0.0, 0.0]]]])
    assert loss_change(y, None, base, torch.tensor([[0.7, 0.3]])).item() == pytest.approx(1.4)


def test_differences_of_inputs():
    x, ends = torch.ones(1, 4), [torch.full((1, 4), 1.5), torch.full((1, 4), 0.25)]
    assert input_difference(ends, None, x).tolist() == [[1.25] * 4]
    assert input_difference(ends, OK, x).tolist() == [[1.25, 0.5, 0.75, 0.0]]
    assert input_difference(ends[:1], None, x).tolist() == [[0.5] * 4]
    assert input_difference(ends[:1], OK[..., :1], x).tolist() == [[0.5, 0.5, 0.0, 0.0]]


def test_points_within_limits():
    points = torch.tensor([[-2.0, 0.5, 2.0]])
    assert within_limits(points, None, None) is points
    assert within_limits(points, torch.tensor([-1.0] * 3), torch.tensor([1.0, 0.25, 3.0])).tolist() == [[-1, 0.25, 2]]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("batch", "items", "points", "max_rows"), [(7, 5, 2, 1), (7, 5, 2, 13), (7, 5, 1, 35), (1, 1, 2, 9), (8, 9, 3, 40)]
)
def test_chunks_cover_everything_once(batch, items, points, max_rows, whole):
    covered = torch.zeros(batch, items)
    for rows, part in chunks(batch, items, points, max_rows, whole):
        covered[rows, part] += 1
        size = (rows.stop - rows.start) * (part.stop - part.start) * points
        assert size <= max(max_rows, points * (batch if whole else 1))
        assert not whole or rows == slice(0, batch)
    assert (covered == 1).all()


def sizes(parts):
    return [(rows.stop - rows.start, part.stop - part.start) for rows, part in parts]


def test_sizes_of_chunks():
    """Four rows with three moves of two points."""
    assert sizes(chunks(4, 3, 2, 24)) == [(4, 3)]
    assert sizes(chunks(4, 3, 2, 23)) == [(2, 3)] * 2  # room for three rows, but equal parts
    assert sizes(chunks(4, 3, 2, 12)) == [(2, 3)] * 2
    assert sizes(chunks(4, 3, 2, 11)) == [(1, 3)] * 4
    assert sizes(chunks(4, 3, 2, 6)) == [(1, 3)] * 4
    assert sizes(chunks(4, 3, 2, 5)) == [(1, 1), (1, 2)] * 4
    assert sizes(chunks(4, 3, 2, 3)) == [(1, 1)] * 12
    assert sizes(chunks(4, 3, 2, 1)) == [(1, 1)] * 12  # both points of a move stay together
    assert sizes(chunks(4, 3, 2, 16, whole=True)) == [(4, 1), (4, 2)]
    assert sizes(chunks(4, 3, 2, 15, whole=True)) == sizes(chunks(4, 3, 2, 1, whole=True)) == [(4, 1)] * 3
    assert chunks(5, 1, 1, 2) == [(slice(0, 1), slice(0, 1)), (slice(1, 3), slice(0, 1)), (slice(3, 5), slice(0, 1))]
