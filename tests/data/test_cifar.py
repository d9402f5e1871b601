"""CIFAR-10 and CIFAR-100: every published form is read as it was published or not at all."""

import hashlib
import io
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from bondgrad.data import _cifar, cifar10, cifar100
from bondgrad.data._cifar_forms import _ArraysOnly

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


# ---- reading them


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
