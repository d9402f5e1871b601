"""The forms in which CIFAR is passed on, each read as the contents of the published binary files.

A binary file is rows of bytes: the labels, and the picture's planes, red, green and blue.
"""

import io
import pickle
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple

import numpy as np

from bondgrad.data._images import check_sum

HOME = "www.cs.toronto.edu/~kriz/cifar.html"


class Cifar(NamedTuple):
    """What CIFAR-10 and CIFAR-100 do not share."""

    classes: int
    sha256: dict[str, str]  # of the binary files; the last is for testing, the others are for training
    labels: dict[str, str]  # as in a binary row: the name in a Python file, and what the .npz has behind y_train
    binary: str  # the folder in the binary version's archive
    binary_archive: str
    python: str  # the folder in the Python version's archive
    python_archive: str
    python_md5: str
    npz: str


def binary_folder(cifar: Cifar, path: Path) -> list[bytes]:
    """The files themselves."""
    return [(path / name).read_bytes() for name in cifar.sha256]


def binary_archive(cifar: Cifar, path: Path) -> list[bytes]:
    """The files, packed."""
    with _readable(path), path.open("rb") as archive:
        return _members(archive, [f"{cifar.binary}/{name}" for name in cifar.sha256])


def python_archive(cifar: Cifar, path: Path) -> list[bytes]:
    """Pickles. What they contain is run, in a way, so the archive is checked before it is opened."""
    packed = path.read_bytes()
    check_sum(str(path), packed, "md5", cifar.python_md5, HOME)
    with _readable(path):
        members = _members(io.BytesIO(packed), [f"{cifar.python}/{Path(name).stem}" for name in cifar.sha256])
    # Python 2 wrote them: its strings are bytes.
    batches = [_ArraysOnly(io.BytesIO(member), encoding="bytes").load() for member in members]
    return [_rows(batch[b"data"], [batch[name.encode()] for name in cifar.labels]) for batch in batches]


def npz(cifar: Cifar, path: Path) -> list[bytes]:
    """Arrays `x_train` and `x_test`, with colours last, [N, 32, 32, 3]; `y_train` and so on [N]."""
    with _readable(path), path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        names = ["x_{}", *(f"y_{{}}{end}" for end in cifar.labels.values())]
        train, test = ([arrays[name.format(part)] for name in names] for part in ("train", "test"))
        pieces = [np.array_split(array, len(cifar.sha256) - 1) for array in train]
        files = [*zip(*pieces, strict=True), test]
        return [_rows(x.transpose(0, 3, 1, 2).reshape(len(x), -1), labels) for x, *labels in files]


def _rows(planes: np.ndarray, labels: Sequence[Any]) -> bytes:
    """From planes [N, 3·32·32] and each kind of labels [N]."""
    return np.column_stack([np.asarray(part).astype(np.uint8) for part in (*labels, planes)]).tobytes()


def _members(archive: BinaryIO, names: list[str]) -> list[bytes]:
    """Files of a tar.gz, read in the order in which they are there: going back would unpack it anew."""
    found: dict[str, bytes] = {}
    with tarfile.open(fileobj=archive, mode="r|gz") as tar:
        for member in tar:
            if member.name in names and (content := tar.extractfile(member)):
                found[member.name] = content.read()
    return [found[name] for name in names]


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Say of a damaged archive what to do about it."""
    try:
        yield
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} cannot be read ({reason}). Remove it, and download CIFAR from {HOME}") from error


class _ArraysOnly(pickle.Unpickler):
    """Nothing but arrays can be made, beside what has a notation of its own: lists, dictionaries, strings, numbers."""

    KNOWN: ClassVar[dict[str, object]] = {
        "numpy.core.multiarray._reconstruct": np.empty(0).__reduce__()[0],  # numpy has moved it since
        "numpy.ndarray": np.ndarray,
        "numpy.dtype": np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401
        if f"{module}.{name}" not in self.KNOWN:
            raise pickle.UnpicklingError(f"{module}.{name} has no place among pictures")
        return self.KNOWN[f"{module}.{name}"]
