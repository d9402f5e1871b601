"""Learning what a quantum-dot device does: `bondgrad pretrain rockmelon`."""

import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure  # here, since what is missing had better show before the work
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn

from bondgrad._version import __version__
from bondgrad.experiments.interrupt import interrupts
from bondgrad.reservoirs import QuantumDotArray
from bondgrad.reservoirs._rockmelon import Learnt
from bondgrad.torch_support._graphs import GraphedStep

HELD_OUT = 20_000  # readings that are not learnt from
SAVE_EVERY = 30.0  # seconds
AT_ONCE = 65_536  # readings
SWEEPS = 100  # of each gate, to count extrema


class Settings(NamedTuple):
    """How to learn: the paper's values."""

    pairs: int = 1_000_000
    epochs: int = 15
    batch: int = 64
    rate: float = 1e-4
    seed: int = 0


class Readings(NamedTuple):
    """Of the device, at voltages drawn evenly from its range."""

    x: Tensor  # [N, 10]
    y: Tensor  # [N, 2]


class Pretraining:
    """Learning that can be interrupted and goes on where it was.

    Args:
        device: To be learnt from.
        settings: How.
        where: The processor that does the work.
        checkpoint: A file for what has been reached, if there is to be one.
    """

    def __init__(
        self, device: QuantumDotArray, settings: Settings, where: torch.device, checkpoint: Path | None = None
    ) -> None:
        self.device, self.settings, self.where, self.checkpoint = device.to(where), settings, where, checkpoint
        self.copy = Learnt(settings.seed).to(where)
        self.copy.network.requires_grad_(True)
        fast = where.type == "cuda"
        self.optimizer = torch.optim.Adam(self.copy.parameters(), lr=settings.rate, capturable=fast, fused=fast)
        self.graphed = GraphedStep(self._step, self.copy, self.optimizer)
        self.epoch = self.batch = 0  # that come next
        self.seconds = 0.0  # of learning
        self.losses: list[float] = []  # of each epoch
        self.total = torch.zeros((), device=where)  # of this one so far
        self.stopped = False  # by whoever sets it, after the batch at hand

    def sample(self) -> Iterator[float]:
        """Take readings; yields how much of it is done. What is held out comes last."""
        n = self.settings.pairs + HELD_OUT
        low, high = self.device.limits
        random = torch.Generator().manual_seed(self.settings.seed)
        x = torch.rand(n, self.device.in_features, generator=random) * (high - low) + low
        parts = []
        for rows in torch.split(x, AT_ONCE):
            with torch.no_grad():
                parts.append(self.device(rows.to(self.where)))
            yield len(rows) / n
        self.readings = Readings(x.to(self.where), torch.cat(parts))
        known = self.readings.y[: self.settings.pairs]
        self.mean, self.deviation = known.mean(0), known.std(0)

    @property
    def held_out(self) -> Readings:
        """What was not learnt from."""
        return Readings(*(t[self.settings.pairs :] for t in self.readings))

    def learn(self) -> Iterator[float]:
        """Learn; yields how much of it is done, now and then. Once `stopped`, it leaves a checkpoint and ends.

        What remains of the pairs after the last whole batch of an epoch is left out; another order comes in the next.
        """
        x, y = self.readings.x, (self.readings.y - self.mean) / self.deviation
        batches = self.settings.pairs // self.settings.batch
        saved = time.monotonic()
        while self.epoch < self.settings.epochs:
            order = torch.Generator().manual_seed(1 + self.settings.seed + 1000 * self.epoch)
            rows = torch.randperm(self.settings.pairs, generator=order).to(self.where)
            while self.batch < batches:
                some = rows[self.batch * self.settings.batch : (self.batch + 1) * self.settings.batch]
                self.total += self.graphed(x[some], y[some])
                self.batch += 1
                now = time.monotonic()
                if self.stopped or now - saved > SAVE_EVERY:
                    self.seconds, saved = self.seconds + now - saved, now
                    self.save()
                if self.stopped:
                    return
                if self.batch % 256 == 0 or self.batch == batches:
                    yield (self.epoch + self.batch / batches) / self.settings.epochs
            self.losses.append(float(self.total) / batches)
            self.total.zero_()
            self.epoch, self.batch = self.epoch + 1, 0
        self.seconds += time.monotonic() - saved
        self.save()

    def _step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.huber_loss(self.copy(x), y)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    def save(self) -> None:
        """Leave a checkpoint; at no moment is there none."""
        if self.checkpoint is None:
            return
        state = {
            "settings": tuple(self.settings),
            "copy": self.copy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "at": (self.epoch, self.batch, self.seconds, self.losses, self.total),
        }
        half_written = self.checkpoint.with_suffix(".part")
        torch.save(state, half_written)
        half_written.replace(self.checkpoint)

    def resume(self) -> bool:
        """Go on from the checkpoint, if there is one."""
        if self.checkpoint is None or not self.checkpoint.exists():
            return False
        try:
            state = torch.load(self.checkpoint, map_location=self.where, weights_only=True)
            if tuple(state["settings"]) != tuple(self.settings):
                raise ValueError("other settings")
        except Exception as error:  # whatever else it may be
            raise ValueError(f"{self.checkpoint} is not a checkpoint of this: move it away ({error})") from error
        self.copy.load_state_dict(state["copy"])
        groups = [dict(group) for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, here in zip(self.optimizer.param_groups, groups, strict=True):  # it may come from another processor
            group["capturable"], group["fused"] = here["capturable"], here["fused"]
        self.epoch, self.batch, self.seconds, self.losses, self.total = state["at"]
        return True

    def result(self) -> Learnt:
        """The copy, in the device's own units."""
        copy = Learnt()
        copy.load_state_dict(self.copy.state_dict())
        last = copy.network[-1]
        assert isinstance(last, nn.Linear)
        mean, deviation = self.mean.cpu(), self.deviation.cpu()
        with torch.no_grad():
            last.weight.mul_(deviation[:, None])
            last.bias.mul_(deviation).add_(mean)
        return copy


def quality(copy: Learnt, held_out: Readings) -> dict[str, Any]:
    """How well the copy does on readings that it has not seen."""
    with torch.no_grad():
        predicted = copy.to(held_out.x.device)(held_out.x)
    error = (predicted - held_out.y).double()
    return {
        "r2": (1 - error.square().mean(0) / held_out.y.double().var(0)).tolist(),
        "rms_error": error.square().mean(0).sqrt().tolist(),
        "deviation_of_readings": held_out.y.double().std(0).tolist(),
    }


def sweeps(device: QuantumDotArray, rows: int, points: int, seed: int) -> Tensor:
    """Voltages [rows, gates, points, gates]: at random rows each gate over its range, the others as they are."""
    low, high = device.limits
    random = torch.Generator().manual_seed(seed)
    x = torch.rand(rows, 1, 1, device.in_features, generator=random) * (high - low) + low
    x = x.repeat(1, device.in_features, points, 1)
    for gate in range(device.in_features):
        x[:, gate, :, gate] = torch.linspace(low, high, points)
    return x


def extrema(device: QuantumDotArray) -> list[float]:
    """How many a reading has along the sweep of a gate, on average, for each output."""
    x = sweeps(device, SWEEPS, 241, seed=0).to(device.hamiltonian.device)
    with torch.no_grad():
        y = device(x.flatten(0, 2).double()).view(*x.shape[:3], -1)  # rounding would have some of its own
    direction = y.diff(dim=2).sign()
    turns = direction[:, :, 1:] * direction[:, :, :-1] < 0
    means: list[float] = turns.double().sum(2).mean((0, 1)).tolist()
    return means


def pretrain_command(settings: Settings, output: Path, where: torch.device, console: Console) -> bool:
    """Learn, show how well, and leave weights with their card and a picture in `output`; False if interrupted."""
    output.mkdir(parents=True, exist_ok=True)
    checkpoint = output / f"checkpoint-{settings.pairs}-{settings.epochs}-{settings.seed}.pt"
    work = Pretraining(QuantumDotArray(), settings, where, checkpoint)
    with interrupts(work):
        _show(work, console)
    if work.stopped:
        kept = " The same command goes on where this one was." if checkpoint.exists() else ""
        console.print(f"[yellow]Interrupted.[/]{kept}")
        return False
    with console.status("Judging what was learnt"):
        copy = work.result()
        card = describe(work, copy)
        copy.cpu().save(output / "rockmelon.safetensors", card)
        plot(work.device.cpu(), copy, output / "sweeps.png")
    checkpoint.unlink()
    for name, r2, error in zip(("current", "phase"), card["r2"], card["rms_error"], strict=True):
        console.print(f"{name:>8s}: R² {r2:.4f} on {HELD_OUT:,} readings held out, error {error:.2g} (rms)")
    console.print(f"Weights with their card in {escape(str(output / 'rockmelon.safetensors'))}, sweeps in sweeps.png.")
    return True


def _show(work: Pretraining, console: Console) -> None:
    """Take readings and learn, with progress."""
    columns = (TextColumn("{task.description:>8s}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=console) as progress:
        reading = progress.add_task("reading", total=1.0, note=f"{work.settings.pairs:,} readings of the device")
        for part in work.sample():
            progress.advance(reading, part)
            if work.stopped:
                return
        learning = progress.add_task("learning", total=1.0, note="")
        if work.resume():
            console.print(f"Going on with epoch {work.epoch + 1}, from {escape(str(work.checkpoint))}.")
        for done in work.learn():
            note = f"epoch {work.epoch + 1}" + (f", loss {work.losses[-1]:.2e}" if work.losses else "")
            progress.update(learning, completed=done, note=note)


def describe(work: Pretraining, copy: Learnt) -> dict[str, Any]:
    """The card: how the weights were made, and how good they are."""
    return {
        "what": "a network that has learnt what bondgrad.reservoirs.QuantumDotArray() reads, at voltages drawn evenly",
        "network": "10-500-500-500-500-2, tanh",
        **work.settings._asdict(),
        "loss": "Huber, of readings in units of their deviation; Adam",
        "held_out": HELD_OUT,
        **quality(copy, work.held_out),
        "extrema_of_a_sweep": extrema(work.device),
        "losses": work.losses,
        "seconds": round(work.seconds, 1),
        "bondgrad": __version__,
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "gpu": torch.cuda.get_device_name(work.where) if work.where.type == "cuda" else None,
    }


def plot(device: QuantumDotArray, copy: Learnt, path: Path) -> None:
    """Sweeps of some gates: the device's readings and the copy's."""
    x = sweeps(device, rows=1, points=201, seed=1)[0]  # [gates, points, gates]
    with torch.no_grad():
        pairs = [box(x.flatten(0, 1)).view(*x.shape[:2], -1) for box in (device, copy)]
    figure = Figure(figsize=(12, 5), layout="constrained")
    axes = figure.subplots(2, 5, sharex=True, sharey="row")
    for column, gate in enumerate(range(0, device.in_features, 2)):
        for row, name in enumerate(("current", "phase / rad")):
            volts = x[gate, :, gate]
            axes[row, column].plot(volts, pairs[0][gate, :, row], color="#1f77b4", label="device")
            axes[row, column].plot(volts, pairs[1][gate, :, row], color="#d62728", ls="--", label="Rockmelon")
            axes[row, 0].set_ylabel(name)
        axes[1, column].set_xlabel(f"gate {gate + 1} / V")
    axes[0, 0].legend()
    figure.savefig(path, dpi=120)
