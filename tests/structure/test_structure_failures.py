"""Groups of inputs, where some outputs are not finite, or have more digits than x."""

import numpy as np
import pytest
import torch

from bondgrad import BlackBox, Simultaneous
from bondgrad.evaluators import Local
from bondgrad.policies import Fixed
from bondgrad.structure import Blocks
from bondgrad.testing.boxes import Sparse
from tests.helpers import close, gradient
from tests.patterns import PATTERNS


@pytest.mark.parametrize("estimator", ["central", "forward", "simultaneous", Simultaneous(3)])
def test_a_module_that_fails_costs_the_others_nothing(estimator):
    """The second of three blocks answers only at the rows themselves."""
    rows = torch.randn(5, 6, dtype=torch.float64)

    def fn(x):
        y = torch.sin(x)
        known = (x[:, None, 2:4] == rows[None, :, 2:4]).all(2).any(1)
        y[:, 2:4] = torch.where(known[:, None], y[:, 2:4], torch.nan)
        return y

    layer = BlackBox(fn, 6, estimator=estimator, policy=Fixed(1e-6), structure=np.eye(6, dtype=bool), seed=0)
    gy = torch.randn(5, 6, dtype=torch.float64)
    with pytest.warns(UserWarning, match="no finite output"):
        g = gradient(layer, rows, gy)
    expected = gy * rows.cos()
    expected[:, 2:4] = 0
    assert torch.allclose(g, expected, atol=1e-5)


def test_one_side_that_fails_leaves_the_other():
    layer = BlackBox(torch.sqrt, 4, policy=Fixed(0.1), structure=Blocks(1, 1), seed=0)
    x, gy = torch.tensor([[0.05, 1.0, 2.0, 0.01]]), torch.ones(1, 4)
    with pytest.warns(UserWarning, match="no finite output"):
        g = gradient(layer, x, gy)
    forward = ((x + 0.1).sqrt() - x.sqrt()) / 0.1
    central = ((x + 0.1).sqrt() - (x - 0.1).sqrt()) / 0.2
    assert torch.allclose(g, torch.where(x < 0.1, forward, central), atol=1e-4)


@pytest.mark.parametrize("estimator", ["central", "forward", "simultaneous"])
@pytest.mark.parametrize("max_rows", [None, 3])
def test_answers_with_more_digits_than_x(estimator, max_rows):
    pattern = PATTERNS["random"]

    def fn(x: np.ndarray):
        return Sparse(pattern)(torch.from_numpy(x).double()).numpy()

    x, gy = torch.randn(6, 15), torch.randn(6, 10)
    settings = {"policy": Fixed(1e-3), "estimator": estimator, "structure": pattern, "seed": 0}
    g = gradient(BlackBox(fn, 15, evaluator=Local(max_rows=max_rows), **settings), x, gy)
    assert g.dtype == torch.float32
    if estimator == "simultaneous":  # the same as in one piece
        assert close(g, gradient(BlackBox(fn, 15, **settings), x, gy), 1e-4)
    else:
        assert close(g, Sparse(pattern).vjp(x, gy), 2e-3)


@pytest.mark.parametrize("estimator", ["central", "forward", "simultaneous", Simultaneous(3)])
def test_an_output_that_the_forward_pass_did_not_get(estimator):
    """It is finite near the rows, but not at them, where a mean without a gradient stands for it."""
    rows = torch.randn(5, 3, dtype=torch.float64)

    def fn(x):
        at_a_row = (x[:, None, 0] == rows[None, :, 0]).any(1)
        y = torch.sin(x)
        y[:, 0] = torch.where(at_a_row, torch.nan, y[:, 0])
        y[:, 1] = torch.where(x[:, 1] > rows[:, 1].max(), torch.nan, y[:, 1])  # one end of one move
        return y

    layer = BlackBox(fn, 3, estimator=estimator, policy=Fixed(1e-6), structure=np.eye(3, dtype=bool), seed=0)
    gy = torch.randn(5, 3, dtype=torch.float64)
    with pytest.warns(UserWarning, match="no finite output"):
        g = gradient(layer, rows, gy)
    expected = gy * rows.cos()
    assert not g[:, 0].any()
    assert torch.allclose(g[:, 2], expected[:, 2], atol=1e-5)
    assert (torch.isclose(g[:, 1], expected[:, 1], atol=1e-4) | (g[:, 1] == 0)).all()
