"""The command `bondgrad probe`."""

import ctypes
import json
import os
import subprocess
import sys
import warnings

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
        (("--limits", 0, "inf"), "within infinite --limits"),
        (("--limits", -1, 1e39), "within infinite --limits"),
        (("--limits", "-1,0", 1), "or 3 numbers"),
        (("--limits", "low", 1), "--limits must be numbers, or one for each input"),
        (("--context", "several.npz"), "several arrays"),
        (("--sample", "rows.npy", "--context", "few.npy"), "one entry for each of the 5 rows"),
        (("--limits", "nan", 1), "limits must have low < high"),
    ],
)
def test_mistakes_are_named_for_what_they_are(here, arguments, says):
    np.savez("several.npz", a=np.zeros((3, 3)))
    np.save("rows.npy", np.zeros((5, 3)))
    np.save("few.npy", np.zeros(4))
    (here / "empty.npy").write_bytes(b"")
    done = cli("bench_box:read", "--in-features", 3, *arguments)
    assert done.exit_code == 2, done.output
    assert says in done.output


AWKWARD = (
    "import numpy as np\n\nnumbers = np.random.default_rng(0)\n\n\ndef read(x, wind=0.0):\n"
    "    if len(x) > 1:\n        raise ValueError('one row at a time')\n"
    "    if numbers.random() < 0.1:\n        raise OSError('busy')\n"
    "    return np.where(x[:, :1] > 1.1, np.nan, np.floor(2 * x) + wind)\n"
)


def printed_code(text):
    """From the first import to the last bracket of the printed report, as it stands there."""
    lines = text.splitlines()
    return "\n".join(lines[lines.index("import bondgrad") : lines.index(")") + 1]) + "\n"


def trains(code):
    names = {}
    exec(code, names)  # noqa: S102
    x = torch.zeros(2, 3, requires_grad=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "[0-9]+ rows? (was|were) asked again")
        names["box"](x).sum().backward()
    assert x.grad.shape == (2, 3)
    return names["box"]


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_the_printed_code_can_be_pasted(here, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    (here / "bench_box.py").write_text(AWKWARD)
    done = cli("bench_box:read", "--in-features", 3, "--limits", "-2,-2,-3", "2,2,3", "--budget", 6000)
    assert done.exit_code == 0, done.output
    code = printed_code(done.stdout)
    assert "    # " in code  # reasons that are longer than a line
    box = trains(code)
    assert box.evaluator.max_rows == 1
    assert box.evaluator.retries >= 2
    low, high = box.limits
    assert (low, high[1:]) == ([-2, -2, -3], [2, 3])
    assert 1.0 < high[0] < 1.1


def test_the_code_can_be_pasted_from_a_pipe(here):
    (here / "bench_box.py").write_text(AWKWARD)
    command = [sys.executable, "-c", "from bondgrad.cli import main; main()", "probe", "bench_box:read"]
    done = subprocess.run(
        [*command, "--in-features", "3", "--budget", "6000"], check=True, capture_output=True, text=True
    )
    assert "\x1b" not in done.stdout
    trains(printed_code(done.stdout))


def test_contexts(here):
    (here / "bench_box.py").write_text(
        "import numpy as np\n\nseen = set()\n\n\ndef read(x, wind, place):\n    assert place.shape == (len(x), 2)\n"
        "    seen.update(wind[:, 0].tolist())\n    return np.sin(x) + wind\n"
    )
    np.save("wind.npy", np.array([[1.0], [2.0], [5.0]]))
    np.save("place.npy", np.zeros((3, 2)))
    files = ("--context", "wind.npy", "--context", "place.npy")
    assert cli("bench_box:read", "--in-features", 3, "--json", *files).exit_code == 0
    assert sys.modules["bench_box"].seen == {1.0, 2.0, 5.0}
    np.save("rows.npy", np.zeros((3, 3)))
    done = cli("bench_box:read", "--in-features", 3, "--sample", "rows.npy", "--json", *files)
    assert done.exit_code == 0, done.output


def test_a_call_that_hangs_ends_the_command(here):
    (here / "bench_box.py").write_text("import time\n\n\ndef read(x):\n    time.sleep(3600)\n")
    command = [sys.executable, "-c", "from bondgrad.cli import main; main()", "probe", "bench_box:read"]
    done = subprocess.run(
        [*command, "--in-features", "3", "--seconds", "3"], capture_output=True, text=True, timeout=120
    )
    assert "did not come back within" in " ".join(done.stdout.split())
