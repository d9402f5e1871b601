"""Learning a copy of the quantum-dot device."""

import json
import signal

import pytest
import torch
from typer.testing import CliRunner

from bondgrad.cli import main
from bondgrad.experiments import pretrain
from bondgrad.experiments.interrupt import interrupts
from bondgrad.experiments.pretrain import Pretraining, Readings, Settings, extrema, quality, sweeps
from bondgrad.reservoirs import QuantumDotArray, Rockmelon
from tests.helpers import same_state

CPU = torch.device("cpu")
SMALL = Settings(pairs=1024, epochs=3)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(pretrain, "HELD_OUT", 500)
    monkeypatch.setattr(pretrain, "SWEEPS", 1)


def learn(checkpoint=None, stop_after=None):
    """With Ctrl-C in the middle of a batch, if it is to be stopped."""
    work = Pretraining(QuantumDotArray(energies=3), SMALL, CPU, checkpoint)
    list(work.sample())
    work.resume()
    batches = 0

    def step(x, y, original=work.graphed):
        nonlocal batches
        batches += 1
        if batches == stop_after:
            signal.raise_signal(signal.SIGINT)
        return original(x, y)

    work.graphed = step
    with interrupts(work):
        list(work.learn())
    return work


def test_the_copy_speaks_the_units_of_the_device():
    work = learn()
    with torch.no_grad():
        standardised = work.copy(work.held_out.x)
        expected = standardised * work.deviation + work.mean
        assert torch.allclose(work.result()(work.held_out.x), expected, atol=1e-5)


def test_it_learns():
    work = learn()
    assert work.losses[-1] < 0.8 * work.losses[0]
    assert len(work.losses) == 3


def test_interrupted_it_goes_on_as_it_would_have(tmp_path):
    whole = learn()
    for batches in (5, 11, 1):  # of 16 in an epoch
        learn(tmp_path / "checkpoint.pt", stop_after=batches)
    work = learn(tmp_path / "checkpoint.pt")
    assert work.losses == whole.losses
    assert same_state(work.copy.state_dict(), whole.copy.state_dict())


def test_what_is_no_checkpoint_of_this(tmp_path):
    path = tmp_path / "checkpoint.pt"
    learn(path, stop_after=2)
    work = Pretraining(QuantumDotArray(), SMALL._replace(seed=1), CPU, path)
    with pytest.raises(ValueError, match=r"checkpoint.pt is not a checkpoint of this: move it away \(other settings\)"):
        work.resume()
    path.write_text("a diary")
    with pytest.raises(ValueError, match="is not a checkpoint of this: move it away"):
        work.resume()


def test_ctrl_c_twice_ends_it_at_once():
    work = Pretraining(QuantumDotArray(), SMALL, CPU)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interrupts(work):
        signal.raise_signal(signal.SIGINT)
        assert work.stopped
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_quality():
    y = torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 8.0]])

    class Off(torch.nn.Module):
        def forward(self, x):
            return x + torch.tensor([1.0, 0.0])

    found = quality(Off(), Readings(y, y))
    assert found["rms_error"] == [1.0, 0.0]
    assert found["r2"] == pytest.approx([1 - 1 / 4, 1.0])  # of a variance of 4


def test_sweeps_and_their_extrema(monkeypatch):
    class Waves(QuantumDotArray):
        def answer(self, x):
            return torch.stack((torch.sin(2 * x).sum(1), x.sum(1)), 1)

    x = sweeps(Waves(), rows=2, points=5, seed=0)
    assert x.shape == (2, 10, 5, 10)
    assert torch.equal(x[1, 3, :, 3], torch.linspace(-3, 3, 5))
    assert (x[1, 3, :, 4] == x[1, 3, 0, 4]).all()
    assert extrema(Waves()) == [4.0, 0.0]  # of sin(2 x) between -3 and 3


def test_command(tmp_path):
    args = ["pretrain", "rockmelon", "--pairs", "1000", "--epochs", "1", "--output", str(tmp_path), "--device", "cpu"]
    done = CliRunner().invoke(main, args)
    assert done.exit_code == 0, done.output
    assert "R²" in done.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rockmelon.safetensors", "sweeps.png"]
    box = Rockmelon(3, tmp_path / "rockmelon.safetensors")
    assert box.card["pairs"] == 1000
    assert len(box.card["r2"]) == 2
    assert box(torch.zeros(2, 30)).shape == (2, 6)


def test_command_interrupted(tmp_path, monkeypatch):
    """While readings are taken, when nothing is lost; while learning; and then it goes on."""
    args = ["pretrain", "rockmelon", "--pairs", "1000", "--epochs", "2", "--output", str(tmp_path), "--device", "cpu"]

    def interrupted(name):
        original = getattr(Pretraining, name)

        def method(work, *batch):
            if not work.stopped:
                signal.raise_signal(signal.SIGINT)
            return original(work, *batch)

        with monkeypatch.context() as patch:
            patch.setattr(Pretraining, name, method)
            return CliRunner().invoke(main, args)

    early = interrupted("sample")
    assert early.exit_code == 130
    assert early.output.rstrip().endswith("Interrupted.")
    late = interrupted("_step")
    assert late.exit_code == 130
    assert "Interrupted. The same command goes on where this one was." in late.output
    done = CliRunner().invoke(main, args)
    assert done.exit_code == 0
    assert "Going on with epoch 1" in done.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rockmelon.safetensors", "sweeps.png"]


@pytest.mark.parametrize("device", ["gpu", "meta", "CPU"])
def test_a_device_that_is_not_there(device):
    done = CliRunner().invoke(main, ["pretrain", "rockmelon", "--device", device])
    assert done.exit_code == 2
    assert f"there is no '{device}' here" in " ".join(done.output.replace("│", " ").split())


def test_there_is_only_one_thing_to_pretrain():
    done = CliRunner().invoke(main, ["pretrain", "apples"])
    assert done.exit_code == 2
    assert "only rockmelon" in done.output


# ---- what is shipped


def test_the_shipped_weights_know_the_device():
    """On readings that are drawn here; and their card says so."""
    device, box = QuantumDotArray(), Rockmelon(1)
    low, high = device.limits
    x = torch.rand(2000, 10, generator=torch.Generator().manual_seed(123)) * (high - low) + low
    assert min(quality(box.box, Readings(x, device(x)))["r2"]) > 0.98
    assert min(box.card["r2"]) > 0.98
    assert min(box.card["extrema_of_a_sweep"]) > 2
    assert box.card["pairs"] == 1_000_000
    assert json.dumps(box.card)


def test_weights_that_are_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        Rockmelon(1, tmp_path / "nothing.safetensors")
