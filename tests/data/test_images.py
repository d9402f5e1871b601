"""Pictures: their files are read as they were published or not at all, and prepared for training."""

import gzip
import hashlib
import io
import os
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

from bondgrad.data import Augmentation, _cifar, _fashion_mnist, cifar10, cifar100, fashion_mnist
from bondgrad.data._cifar_forms import _ArraysOnly
from bondgrad.data._images import images
from tests.helpers import on_each_device

CIFAR = {"10": (_cifar, "CIFAR10", cifar10), "100": (_cifar, "CIFAR100", cifar100)}
FORMS = ("folder", "binary archive", "python archive", "npz")
each_cifar = pytest.mark.parametrize("which", CIFAR)
each_form = pytest.mark.parametrize("form", FORMS)


# ---- small files in the published formats


class SmallCifar:
    """Two pictures a file, and a table of checksums to which they are right."""

    def __init__(self, which, folder, monkeypatch):
        module, name, self.load = CIFAR[which]
        self.folder, self.table = folder, getattr(module, name)
        rng = np.random.default_rng(0)
        self.x, self.labels = {}, {}  # per file: [2, 3, 32, 32], and each kind of labels [2]
        for file in self.table.sha256:
            self.x[file] = rng.integers(256, size=(2, 3, 32, 32), dtype=np.uint8)
            self.labels[file] = {kind: rng.integers(10, size=2) for kind in self.table.labels}
        sums = {file: hashlib.sha256(self.binary(file)).hexdigest() for file in self.x}
        sums |= {"md5": hashlib.md5(self._python_archive()).hexdigest()}
        self.table = self.table._replace(python_md5=sums.pop("md5"), sha256=sums)
        monkeypatch.setattr(module, name, self.table)
        *self.train, self.test = self.x

    def binary(self, file):
        """Picture by picture, as the data set's page describes it."""
        return b"".join(
            bytes(int(labels[i]) for labels in self.labels[file].values()) + self.x[file][i].tobytes() for i in range(2)
        )

    def write(self, form):
        """The path of what can be damaged."""
        if form == "folder":
            path = self.folder / self.table.binary
            path.mkdir()
            for file in self.x:
                (path / file).write_bytes(self.binary(file))
            return path / self.test
        if form == "binary archive":
            path = self.folder / self.table.binary_archive
            path.write_bytes(packed({f"{self.table.binary}/{file}": self.binary(file) for file in reversed(self.x)}))
        elif form == "python archive":
            path = self.folder / self.table.python_archive
            path.write_bytes(self._python_archive())
        else:
            path = self.folder / self.table.npz
            np.savez(path, **self.arrays())
        return path

    def arrays(self):
        arrays = {}
        for part, files in (("train", self.train), ("test", [self.test])):
            arrays[f"x_{part}"] = np.concatenate([self.x[file] for file in files]).transpose(0, 2, 3, 1)
            for kind, end in self.table.labels.items():
                arrays[f"y_{part}{end}"] = np.concatenate([self.labels[file][kind] for file in files])
        return arrays

    def _python_archive(self):
        files = {}
        for file, x in self.x.items():
            content = {kind: labels.tolist() for kind, labels in self.labels[file].items()}
            files[f"{self.table.python}/{Path(file).stem}"] = python2_pickle(content, x.reshape(2, -1))
        return packed(files)


def packed(files):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def python2_pickle(content, data):
    """Lists of small numbers, and bytes [N, d] as "data", as Python 2 and the numpy of its time wrote them."""

    def text(s):
        return b"U" + bytes([len(s)]) + s.encode()

    shape = b"".join(b"J" + struct.pack("<i", n) for n in data.shape)
    empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + text("b") + b"tR"
    none = b"J\xff\xff\xff\xff"
    dtype = b"cnumpy\ndtype\n(" + text("u1") + b"K\x00K\x01tR(K\x03" + text("|") + b"NNN" + 2 * none + b"K\x00tb"
    state = b"(K\x01(" + shape + b"t" + dtype + b"\x89T" + struct.pack("<i", data.size) + data.tobytes() + b"tb"
    items = [text("data") + empty + state, text("batch_label") + text("batch 1 of 5")]
    for kind, numbers in content.items():
        items.append(text(kind) + b"](" + b"".join(b"K" + bytes([n]) for n in numbers) + b"e")
    return b"\x80\x02}(" + b"".join(items) + b"u."


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


# ---- CIFAR


@each_cifar
@each_form
def test_every_form_of_cifar_gives_the_same(which, form, tmp_path, monkeypatch):
    small = SmallCifar(which, tmp_path, monkeypatch)
    small.write(form)
    data = small.load(str(tmp_path))
    finest = list(small.table.labels)[-1]
    assert data.classes == int(which)
    for x, y, files in ((data.x_train, data.y_train, small.train), (data.x_test, data.y_test, [small.test])):
        assert x.dtype == torch.uint8
        assert y.dtype == torch.int64
        assert x.is_contiguous()
        assert np.array_equal(x, np.concatenate([small.x[file] for file in files]))
        assert np.array_equal(y, np.concatenate([small.labels[file][finest] for file in files]))


@each_cifar
@each_form
def test_damaged_cifar_is_refused(which, form, tmp_path, monkeypatch):
    small = SmallCifar(which, tmp_path, monkeypatch)
    path = small.write(form)
    whole = path.read_bytes()
    bad = bytearray(whole)
    bad[len(bad) // 2] ^= 1
    for content in (bad, whole[: len(whole) // 2], b"", b"<html>not found</html>"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{path.name}.*[Rr]emove it, and download.*kriz/cifar.html"):
            small.load(tmp_path)


@each_cifar
def test_one_other_pixel_or_label_is_noticed(which, tmp_path, monkeypatch):
    small = SmallCifar(which, tmp_path, monkeypatch)
    for name, array in small.arrays().items():
        changed = array.copy()
        changed.flat[0] ^= 1
        np.savez(tmp_path / small.table.npz, **small.arrays() | {name: changed})
        with pytest.raises(ValueError, match=r"is not what was published: its sha256 is \w{64}, not \w{64}"):
            small.load(tmp_path)


def test_the_npz_of_cifar100_needs_coarse_labels(tmp_path, monkeypatch):
    small = SmallCifar("100", tmp_path, monkeypatch)
    arrays = {name: array for name, array in small.arrays().items() if name != "y_test_coarse"}
    np.savez(tmp_path / "cifar100.npz", **arrays)
    with pytest.raises(ValueError, match=r"cifar100.npz cannot be read \(KeyError: .*y_test_coarse"):
        cifar100(tmp_path)


@each_cifar
def test_missing_cifar(which, tmp_path, monkeypatch):
    small = SmallCifar(which, tmp_path, monkeypatch)
    table = small.table
    small.write("folder").unlink()  # the folder is not enough
    with pytest.raises(FileNotFoundError, match=rf"CIFAR-{which} needs one of.*www.cs.toronto.edu") as error:
        small.load(tmp_path)
    for name in (table.binary_archive, table.python_archive, table.npz, table.binary, *table.sha256, tmp_path):
        assert str(name) in str(error.value)


def test_an_archive_that_is_not_the_published_one_is_not_unpickled(tmp_path):
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(packed({"cifar-10-batches-py/data_batch_1": b"cos\nabort\n(tR."}))
    with pytest.raises(ValueError, match=r"its md5 is \w{32}, not c58f30108f718f92721af3b95e74349a"):
        cifar10(tmp_path)


@pytest.mark.parametrize("harmful", [b"cos\nsystem\n(U\x04truetR.", b"cbuiltins\neval\n(U\x011tR.", b"cnumpy\nload\n."])
def test_pickles_of_anything_but_arrays_are_refused(harmful):
    with pytest.raises(pickle.UnpicklingError, match="has no place among pictures"):
        _ArraysOnly(io.BytesIO(harmful), encoding="bytes").load()


# ---- Fashion-MNIST


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


# ---- the published files, where there are any


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


# ---- preparation


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
