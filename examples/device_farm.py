"""Four devices of the same make that differ a little, 20 ms a reading: they are read at the same time, and one fails.

A network learns which voltages give the readings that are wanted. One of the devices is switched off for two seconds:
its rows go to the others. Every reading is kept in a journal.

python examples/device_farm.py
"""

import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import bondgrad
from bondgrad.evaluators import Journal, Threads
from bondgrad.reservoirs import Farm, QuantumDotArray

DOTS = QuantumDotArray(gates=3, lever_arm=0.4)
FARM = Farm(DOTS, limits=DOTS.limits, spread=0.03, noise=2e-3, drift=1e-3, integrate=0.02, sleep=True, seed=0)


def connect(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The device of that number, as a function of voltages. It is called once for each worker."""
    instrument, begun = FARM(number), time.monotonic()

    def read(volts: torch.Tensor) -> torch.Tensor:
        if number == 2 and 2 < time.monotonic() - begun < 4:
            raise ConnectionError("the device is switched off")
        readings: torch.Tensor = instrument(volts)
        return readings

    return read


def main(folder: Path) -> None:
    """Train the network, and say what each of the devices did."""
    torch.manual_seed(0)
    with Journal(Threads(4, connect, max_rows=1, timeout=5.0), folder / "farm.journal") as evaluator:
        box = bondgrad.BlackBox(None, in_features=3, limits=DOTS.limits, evaluator=evaluator, seed=0)
        network = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 3))
        optimizer = torch.optim.Adam(network.parameters(), lr=2e-2)
        wanted = DOTS(4 * torch.rand(256, 3) - 2)  # readings that a device can give
        begun = time.perf_counter()
        for step in range(21):
            if step % 5 == 0:
                with torch.no_grad():  # on a device without offsets and noise, which only a simulation has
                    loss = nn.functional.mse_loss(DOTS(network(wanted)), wanted)
                print(f"step {step:2d}: loss {loss.item():.4f} on an ideal device; {box.stats.evaluations} readings")
            rows = wanted[torch.randint(256, (6,))]
            loss = nn.functional.mse_loss(box(network(rows)), rows)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        seconds = time.perf_counter() - begun
        stats = box.stats
        print(f"{seconds:.1f} s, {stats.evaluations / seconds:.0f} readings a second; asked again: {stats.retried}")
        for worker in stats.workers:
            print(
                f"device {worker.worker}: {worker.rows} readings, {worker.failures} of them failed; "
                f"busy {worker.busy:.0%} of the time, {1e3 * worker.latency[0]:.0f} ms each"
            )
        print(f"errors: {dict(stats.errors)}; the journal has {len(evaluator.to_arrays()[0])} readings")


if __name__ == "__main__":
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as name:
        warnings.simplefilter("ignore")  # the layer says once that rows were asked again; we know
        main(Path(name))
