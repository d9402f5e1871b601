"""Fashion-MNIST, from its four files."""

import gzip
import os
from pathlib import Path

import numpy as np

from bondgrad.data._images import Images, check_sum, images

HOME = "github.com/zalandoresearch/fashion-mnist"
PLACES = (".", "fashion_mnist", "FashionMNIST/raw")  # the last is where torchvision puts them
MD5 = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}


def fashion_mnist(folder: str | os.PathLike[str]) -> Images:
    """Clothes in ten classes (Xiao et al., 2017): 60,000 pictures to train with, 10,000 to test; grey, 28×28.

    Args:
        folder: Where the four published files are, `train-images-idx3-ubyte.gz` and so on, or their folder
            `fashion_mnist` or `FashionMNIST/raw`. They are checked.
    """
    place = _place(Path(folder))
    x_train, y_train, x_test, y_test = (_read(place / name) for name in MD5)
    return images((x_train[:, None], y_train), (x_test[:, None], y_test), classes=10)


def _place(folder: Path) -> Path:
    """Where all four files are."""
    for place in PLACES:
        if all((folder / place / name).is_file() for name in MD5):
            return folder / place
    places = ", ".join(str(folder / place) for place in PLACES)
    raise FileNotFoundError(
        f"Fashion-MNIST needs the files {', '.join(MD5)}, all in one of {places}: download them from {HOME}"
    )


def _read(path: Path) -> np.ndarray:
    """The array of an IDX file: its last magic byte is the number of dimensions, each then has four bytes."""
    packed = path.read_bytes()
    check_sum(str(path), packed, "md5", MD5[path.name], HOME)
    data = gzip.decompress(packed)
    ndim = data[3]
    shape = np.frombuffer(data, ">u4", ndim, offset=4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * ndim).reshape(shape)
