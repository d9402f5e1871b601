"""The command `bondgrad probe`."""

import ctypes
import json
import os

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from bondgrad.cli import main


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "bench_box.py").write_text(
        "import numpy as np\n\n\ndef read(x):\n    return np.sin(x).cumsum(1)\n\n\nnumber = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    yield tmp_path
    __import__("sys").modules.pop("bench_box", None)


def cli(*arguments):
    return CliRunner().invoke(main, ["probe", *map(str, arguments)])


def test_the_command(here):
    done = cli("bench_box:read", "--in-features", 3, "--limits", -2, 2, "--plot", "steps.png", "--budget", 3000)
    assert done.exit_code == 0, done.output
    assert "deterministic, smooth, float32" in done.output
    assert "drawn uniformly within the limits" in done.output
    assert "bondgrad.BlackBox(" in done.output
    assert "1,000 training steps of 64 rows" in done.output
    assert (here / "steps.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_in_json(here):
    np.save("typical.npy", np.random.default_rng(0).normal(size=(50, 3)))
    done = cli("bench_box:read", "--in-features", 3, "--sample", "typical.npy", "--json", "--batch", 25, "--steps", 5)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["name"] == "read"
    assert found["dtype"] == "float64"
    assert found["sample"] == "50 rows of typical.npy"
    assert found["cost"]["central"]["evaluations"] == 25 * (1 + 1.04 * 6)
    assert "standard normal" in json.loads(cli("bench_box:read", "--in-features", 3, "--json").stdout)["sample"]


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("bench_box", "MODULE:FUNCTION"),
        ("no_such_module:read", "could not be imported"),
        ("bench_box:nothing", "has no 'nothing'"),
        ("bench_box:number", "not a function but int"),
    ],
)
def test_wrong_targets(here, target, says):
    done = cli(target, "--in-features", 3)
    assert done.exit_code == 2
    assert says in done.output


def test_a_wrong_sample(here):
    np.save("wide.npy", np.zeros((5, 7)))
    for path, says in (("wide.npy", "got [5, 7]"), ("bench_box.py", "could not be read")):
        done = cli("bench_box:read", "--in-features", 3, "--sample", path)
        assert done.exit_code == 2
        assert says in done.output


def test_an_interrupt_prints_what_there_is(here):
    (here / "bench_box.py").write_text(
        "import numpy as np\n\ncalls = []\n\n\ndef read(x):\n    calls.append(len(x))\n"
        "    if len(calls) == 60:\n        raise KeyboardInterrupt\n    return np.sin(x).cumsum(1)\n"
    )
    before = torch.get_rng_state()
    done = cli("bench_box:read", "--in-features", 3)
    assert done.exit_code == 0, done.output
    assert "Interrupted" in done.output
    assert "Rounding" in done.output
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_printed_does_not_spoil_the_json(here, capfd):
    (here / "bench_box.py").write_text(
        "import ctypes\nimport os\nimport numpy as np\n\nprint('loaded')\n\n\ndef read(x):\n    print('asked')\n"
        "    os.write(1, b'written')\n    ctypes.CDLL(None).printf(b'printed')\n    return np.sin(x)\n"
    )
    done = cli("bench_box:read", "--in-features", 3, "--json")
    assert json.loads(done.stdout)["name"] == "read"
    ctypes.CDLL(None).fflush(None)
    os.write(1, b"back")
    assert capfd.readouterr().out == "back"


def test_the_command_gives_code_that_runs(here):
    (here / "bench_box.py").write_text(
        "import numpy as np\n\n\nclass Bench:\n    def read(self, x):\n        return np.sin(x)\n\n\nbench = Bench()\n"
    )
    done = cli("bench_box:bench.read", "--in-features", 3, "--json")
    names = {}
    exec(json.loads(done.stdout)["code"], names)  # noqa: S102
    assert names["box"](torch.zeros(2, 3)).shape == (2, 3)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--sample", "several.npz"), "several arrays"),
        (("--sample", "empty.npy"), "could not be read"),
        (("--seed", 10**20), "seed must be"),
        (("--plot", "nowhere/steps.png"), "no folder nowhere"),
        (("--limits", 0, "inf"), "--limits 0 inf"),
        (("--limits", -1, 1e39), "--limits -1 1e+39"),
        (("--limits", "nan", 1), "limits must have low < high"),
    ],
)
def test_mistakes_are_named_for_what_they_are(here, arguments, says):
    np.savez("several.npz", a=np.zeros((3, 3)))
    (here / "empty.npy").write_bytes(b"")
    done = cli("bench_box:read", "--in-features", 3, *arguments)
    assert done.exit_code == 2, done.output
    assert says in done.output
