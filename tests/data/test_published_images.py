"""The published files of pictures, where there are any: sizes, statistics and first entries are the known ones."""

import os

import pytest

from bondgrad.data import cifar10, cifar100, fashion_mnist


@pytest.mark.parametrize(
    ("load", "shape", "mean", "deviation", "labels", "corner"),
    [
        (fashion_mnist, (60000, 1, 28, 28), [0.2860], [0.3530], [9, 0, 0], [0]),
        (cifar10, (50000, 3, 32, 32), [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616], [6, 9, 9], [59, 62, 63]),
        (cifar100, (50000, 3, 32, 32), [0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762], [19, 29, 0], [255] * 3),
    ],
    ids=["fashion_mnist", "cifar10", "cifar100"],
)
def test_published(load, shape, mean, deviation, labels, corner):
    if "BONDGRAD_DATA" not in os.environ:
        pytest.skip("BONDGRAD_DATA names no folder")
    try:
        data = load(os.environ["BONDGRAD_DATA"])
    except FileNotFoundError:
        pytest.skip(f"the folder has no {load.__name__}")
    assert data.x_train.shape == shape
    assert data.x_test.shape == (10000, *shape[1:])
    assert data.mean == pytest.approx(mean, abs=6e-5)
    assert data.deviation == pytest.approx(deviation, abs=6e-5)
    assert data.y_train[:3].tolist() == labels
    assert data.x_train[0, :, 0, 0].tolist() == corner
    for y in (data.y_train, data.y_test):
        assert y.bincount().tolist() == [len(y) // data.classes] * data.classes
    # Neighbours are alike in both directions, colours less so: planes, rows and columns are where they should be.
    some = data.x_train[:500].float()
    down, right = (float(some.diff(dim=dim).abs().mean()) for dim in (2, 3))
    assert max(down, right) < 0.5 * float((some - some.flip(0)).abs().mean())
