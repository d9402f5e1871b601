"""Points at which one input is moved, and no other."""

import pytest
import torch

from bondgrad.measuring._moves import one_input_moved


@pytest.mark.parametrize("inputs", [slice(1, 4), torch.tensor([1, 2, 3]), torch.tensor([[1, 2, 3]] * 5)])
def test_one_input_is_moved_and_no_other(inputs):
    x, values = torch.randn(5, 6), torch.randn(5, 2, 3)
    points = one_input_moved(x, inputs, values)
    assert points.shape == (5, 3, 2, 6)
    for n, i in enumerate((1, 2, 3)):
        assert torch.equal(points[:, n, :, i], values[:, :, n])
        others = [j for j in range(6) if j != i]
        assert torch.equal(points[:, n, :, others], x[:, None, others].expand(-1, 2, -1))


def test_inputs_of_its_own_for_every_row():
    points = one_input_moved(torch.zeros(2, 3), torch.tensor([[0], [2]]), torch.ones(2, 1, 1))
    assert points.flatten(0, 2).tolist() == [[1, 0, 0], [0, 0, 1]]
