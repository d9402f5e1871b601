"""CIFAR-10 and CIFAR-100."""

import os
from pathlib import Path

import numpy as np

from bondgrad.data import _cifar_forms as forms
from bondgrad.data._images import Images, check_sum, images

CIFAR10 = forms.Cifar(
    classes=10,
    sha256={
        "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    },
    labels={"labels": ""},
    binary="cifar-10-batches-bin",
    binary_archive="cifar-10-binary.tar.gz",
    python="cifar-10-batches-py",
    python_archive="cifar-10-python.tar.gz",
    python_md5="c58f30108f718f92721af3b95e74349a",
    npz="cifar10.npz",
)
CIFAR100 = forms.Cifar(
    classes=100,
    sha256={
        "train.bin": "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29",
        "test.bin": "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a",
    },
    labels={"coarse_labels": "_coarse", "fine_labels": ""},
    binary="cifar-100-binary",
    binary_archive="cifar-100-binary.tar.gz",
    python="cifar-100-python",
    python_archive="cifar-100-python.tar.gz",
    python_md5="eb9058c3a382ffc7106e4002c42a8d85",
    npz="cifar100.npz",
)


def cifar10(folder: str | os.PathLike[str]) -> Images:
    """Animals and vehicles in ten classes (Krizhevsky, 2009): 50,000 pictures to train with, 10,000 to test; 32×32.

    Args:
        folder: Where one of these is: `cifar-10-batches-bin`, `cifar-10-binary.tar.gz`, `cifar-10-python.tar.gz`, or
            `cifar10.npz` with `x_train` [50000, 32, 32, 3], `y_train`, `x_test` and `y_test`. It is checked.
    """
    return _load(CIFAR10, Path(folder))


def cifar100(folder: str | os.PathLike[str]) -> Images:
    """As many pictures as in `cifar10`, and as large, in a hundred classes (Krizhevsky, 2009).

    Args:
        folder: Where one of these is: `cifar-100-binary`, `cifar-100-binary.tar.gz`, `cifar-100-python.tar.gz`, or
            `cifar100.npz` with `x_train` [50000, 32, 32, 3], `y_train`, `y_train_coarse`, `x_test`, `y_test` and
            `y_test_coarse`. It is checked, which takes the coarse labels, too.
    """
    return _load(CIFAR100, Path(folder))


def _load(cifar: forms.Cifar, folder: Path) -> Images:
    """From the first form that is there, once it is known to be what was published."""
    path, contents = _contents(cifar, folder)
    for content, (name, expected) in zip(contents, cifar.sha256.items(), strict=True):
        # One check for all forms: whatever was read is a binary file by now.
        check_sum(str(path / name), content, "sha256", expected, forms.HOME)
    n = len(cifar.labels)
    *train, test = (np.frombuffer(content, np.uint8).reshape(-1, n + 3 * 32 * 32) for content in contents)
    x_y = [(rows[:, n:].reshape(-1, 3, 32, 32), rows[:, n - 1]) for rows in (np.concatenate(train), test)]
    return images(x_y[0], x_y[1], cifar.classes)


def _contents(cifar: forms.Cifar, folder: Path) -> tuple[Path, list[bytes]]:
    """What was found, and the contents of the binary files."""
    if all((folder / cifar.binary / name).is_file() for name in cifar.sha256):
        return folder / cifar.binary, forms.binary_folder(cifar, folder / cifar.binary)
    packed = {
        cifar.binary_archive: forms.binary_archive,
        cifar.python_archive: forms.python_archive,
        cifar.npz: forms.npz,
    }
    for name, read in packed.items():
        if (folder / name).is_file():
            return folder / name, read(cifar, folder / name)
    raise FileNotFoundError(
        f"CIFAR-{cifar.classes} needs one of {', '.join(packed)}, or {cifar.binary} with {', '.join(cifar.sha256)}, in "
        f"{folder}: download it from {forms.HOME}"
    )
