"""Pictures are prepared for training: normalised, moved and mirrored."""

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

from bondgrad.data import Augmentation
from bondgrad.data._images import images
from tests.helpers import on_each_device


def bytes_of(n, c=3, size=8, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (n, c, size, size), dtype=torch.uint8, generator=generator).to(device)


def test_statistics_are_those_of_the_training_pixels():
    x = bytes_of(50).numpy()
    data = images((x, np.zeros(50)), (x[:2], np.zeros(2)), 10)
    assert np.allclose(data.mean, (x / 255).mean((0, 2, 3)))
    assert np.allclose(data.deviation, (x / 255).std((0, 2, 3)))
    y = Augmentation(data.mean, data.deviation, flip=False, crop=0).prepare(data.x_train)
    assert y.dtype == torch.float32
    assert torch.allclose(y.mean((0, 2, 3)), torch.zeros(3), atol=1e-6)
    assert torch.allclose(y.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-6)


MEAN, DEVIATION = (0.3, 0.5, 0.6), (0.2, 0.25, 0.3)


def plainly(x, down, right, mirrored, crop):
    """One picture [C, H, W], normalised, moved by slicing, then mirrored."""
    mean, deviation = (torch.tensor(numbers, device=x.device)[:, None, None] for numbers in (MEAN, DEVIATION))
    whole = pad((x.float() / 255 - mean) / deviation, 4 * (crop,))
    part = whole[:, down : down + x.shape[1], right : right + x.shape[2]]
    return part.flip(2) if mirrored else part


@on_each_device
@pytest.mark.parametrize(("flip", "crop"), [(True, 2), (True, 0), (False, 1), (False, 0)])
def test_each_picture_is_moved_and_mirrored_as_a_plain_loop_would(flip, crop, device):
    x = bytes_of(20, device=device)
    generator = torch.Generator(device).manual_seed(3)
    y = Augmentation(MEAN, DEVIATION, flip=flip, crop=crop).augment(x, generator)
    assert y.dtype == torch.float32
    offsets = range(2 * crop + 1)
    ways = [(down, right, mirrored) for down in offsets for right in offsets for mirrored in range(1 + flip)]
    for picture, made in zip(x, y, strict=True):
        assert sum(torch.allclose(plainly(picture, *way, crop), made, atol=1e-5) for way in ways) == 1


@on_each_device
def test_moves_and_mirrors_are_equally_likely(device):
    """Where the brightest pixel comes to lie tells both."""
    n, crop, size = 20000, 2, 9
    x = torch.zeros(n, 1, size, size, dtype=torch.uint8, device=device)
    x[:, :, 4, 4] = 255  # the middle, by which a move is seen
    x[:, :, 4, 5] = 128  # on its right, or on its left if mirrored
    augmentation = Augmentation((0.5,), (0.5,), flip=True, crop=crop)
    y = augmentation.augment(x, torch.Generator(device).manual_seed(0))[:, 0]
    place = y.flatten(1).argmax(1)
    row, column = place // size - 2, place % size - 2
    counts = torch.bincount(row * 5 + column, minlength=25).cpu().double()
    assert len(counts) == 25
    assert float(((counts - n / 25) ** 2 / (n / 25)).sum()) < 55  # chi squared of 24 degrees; one in 3,000 is above
    left = y.flatten(1).gather(1, place[:, None] - 1)[:, 0]
    mirrored = (left > -0.5).double()
    assert abs(float(mirrored.mean()) - 0.5) < 4 * 0.5 / n**0.5
    # Nor do they depend on one another.
    together = torch.stack((row.double(), column.double(), mirrored)).corrcoef()
    assert float((together - torch.eye(3, device=device)).abs().max()) < 4 / n**0.5


@on_each_device
def test_the_generator_alone_decides(device):
    x, augmentation = bytes_of(30, device=device), Augmentation(MEAN, DEVIATION, flip=True, crop=4)
    generator = torch.Generator(device).manual_seed(5)
    first, second = augmentation.augment(x, generator), augmentation.augment(x, generator)
    assert not torch.equal(first, second)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert torch.equal(augmentation.augment(x, torch.Generator(device).manual_seed(5)), first)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_is_uncovered_is_zero():
    x = torch.full((50, 3, 8, 8), 255, dtype=torch.uint8)
    y = Augmentation(MEAN, DEVIATION, flip=False, crop=3).augment(x, torch.Generator().manual_seed(0))
    white = (1 - torch.tensor(MEAN)) / torch.tensor(DEVIATION)
    assert ((y - white[:, None, None]).abs().lt(1e-5) | (y == 0)).all()
    assert (y == 0).any()


def test_wrong_pictures():
    augmentation = Augmentation(MEAN, DEVIATION, flip=True, crop=1)
    for x in (bytes_of(2).float() / 255, bytes_of(2, 1), bytes_of(2)[0]):
        with pytest.raises(ValueError, match=r"x must be uint8 \[N, 3, H, W\], got torch"):
            augmentation.prepare(x)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="of the same channels, got 3 and 1"):
        Augmentation(MEAN, (0.5,), flip=True, crop=0)
    with pytest.raises(ValueError, match="crop must be zero or a positive integer, got -1"):
        Augmentation(MEAN, DEVIATION, flip=True, crop=-1)
