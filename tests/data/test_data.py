"""The data that is shipped."""

import numpy as np
import torch

from bondgrad.data import california_housing
from bondgrad.data._california import read_table


def test_the_table_is_the_published_one():
    table = read_table()
    assert table.shape == (20640, 9)
    row = [8.3252, 41, 6.98412698, 1.02380952, 322, 2.55555556, 37.88, -122.23, 4.526]
    assert np.allclose(table[0], row, rtol=1e-8)
    # Two published sums: the median value's mean is 206,855.82 USD, and 965 districts stand at the cap of 500,001.
    assert np.isclose(table[:, 8].mean() * 1e5, 206855.816909)
    assert (table[:, 8] == 5.00001).sum() == 965


def test_a_split_is_standardised_by_its_training_rows_and_decided_by_the_seed():
    data = california_housing(42)
    assert [len(part) for part in data] == [16512, 16512, 4128, 4128]
    assert torch.allclose(data.x_train.mean(0), torch.zeros(8), atol=1e-5)
    assert torch.allclose(data.x_train.std(0, correction=0), torch.ones(8), atol=1e-5)
    assert 20 < data.y_train.mean() < 21
    assert torch.equal(data.x_test, california_housing(42).x_test)
    assert not torch.equal(data.x_test, california_housing(63).x_test)
