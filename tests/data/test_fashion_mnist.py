"""Fashion-MNIST: its files are read as they were published or not at all."""

import gzip
import hashlib
import struct

import numpy as np
import pytest
import torch

from bondgrad.data import _fashion_mnist, fashion_mnist


@pytest.fixture
def small_fashion(tmp_path, monkeypatch):
    """Writes the four files into a folder below tmp_path, and returns it."""
    rng = np.random.default_rng(0)
    sizes = {"train": 5, "t10k": 3}
    arrays = {}
    for part, n in sizes.items():
        arrays[f"{part}-images-idx3-ubyte.gz"] = rng.integers(256, size=(n, 28, 28), dtype=np.uint8)
        arrays[f"{part}-labels-idx1-ubyte.gz"] = rng.integers(10, size=n, dtype=np.uint8)
    files = {}
    for name, array in arrays.items():
        header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
        files[name] = gzip.compress(header + array.tobytes())
    md5 = {name: hashlib.md5(files[name]).hexdigest() for name in _fashion_mnist.MD5}
    monkeypatch.setattr(_fashion_mnist, "MD5", md5)

    def write(place):
        folder = tmp_path / place
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        return folder, arrays

    return write


@pytest.mark.parametrize("place", [".", "fashion_mnist", "FashionMNIST/raw"])
def test_fashion_mnist(small_fashion, place, tmp_path):
    _, arrays = small_fashion(place)
    data = fashion_mnist(str(tmp_path))
    x_train, y_train, x_test, y_test = arrays.values()
    for read, written in ((data.x_train, x_train[:, None]), (data.x_test, x_test[:, None])):
        assert read.dtype == torch.uint8
        assert np.array_equal(read, written)
    for read, written in ((data.y_train, y_train), (data.y_test, y_test)):
        assert read.dtype == torch.int64
        assert np.array_equal(read, written)
    assert data.classes == 10


def test_damaged_fashion_mnist_is_refused(small_fashion, tmp_path):
    folder, arrays = small_fashion(".")
    for name in arrays:
        small_fashion(".")
        (folder / name).write_bytes((folder / name).read_bytes()[:-1])
        with pytest.raises(ValueError, match=f"{name} is not what was published.*zalandoresearch/fashion-mnist"):
            fashion_mnist(tmp_path)


def test_missing_fashion_mnist(small_fashion, tmp_path):
    folder, arrays = small_fashion("fashion_mnist")
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"download them from github\.com/zalandoresearch") as error:
        fashion_mnist(tmp_path)
    for name in (*arrays, tmp_path, folder, tmp_path / "FashionMNIST/raw"):
        assert str(name) in str(error.value)
