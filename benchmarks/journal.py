"""What does a journal cost, and does training that is killed again and again end as if nothing had happened?

    python benchmarks/journal.py --kills 20

The cost is that of a training step with `Journal(Local(max_rows=1))` beside one with `Local(max_rows=1)`, for a box
that takes 1 ms a row: two layers that see the same batches take turns, in one process.

Then a training with a checkpoint at every fifth step runs in a process that is killed with SIGKILL at a random moment,
is started again, and so on; after so many kills it is left to end. The box of one such training is deterministic: its
parameters are compared with those of a training that was not killed. The box of the other one has noise that never
comes again, and fails now and then: its parameters are compared with those of a replay of its journal. The boxes write
down every evaluation that begins.

Last, a box of irregular speed is trained in three threads for results/journal.png, which `bondgrad journal` draws.
"""

import argparse
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import save
from torch import Tensor, nn

from bondgrad import BlackBox
from bondgrad.evaluators import Answer, Evaluator, Journal, JournalFile, Local, Replay, Request, Threads

STEPS, EVERY = 20, 5  # of the training that is killed, and between its checkpoints
INPUTS, BATCH = 5, 32  # of the box whose journal is timed


class CountedBox:
    """Three inputs, three outputs; a byte in a file for every row whose evaluation begins, which no kill takes back."""

    def __init__(self, count: Path, noisy: bool) -> None:
        self._file, self._random = os.open(count, os.O_WRONLY | os.O_CREAT | os.O_APPEND), np.random.default_rng()
        self._noisy = noisy

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """The outputs [N, 3] at x [N, 3]."""
        os.write(self._file, b"." * len(x))
        time.sleep(2e-4)
        y = np.sin(x).cumsum(1)
        if self._noisy:
            if self._random.random() < 0.02:
                raise RuntimeError("laser is off")
            y = y + 0.01 * self._random.normal(size=y.shape)
        return np.asarray(y, np.float32)


def train(evaluator: Evaluator, box: CountedBox | None, checkpoint: Path | None = None) -> Tensor:
    """Train from the last checkpoint to the end, and return all parameters [P]."""
    torch.manual_seed(0)
    layer = BlackBox(box, 3, evaluator=evaluator, seed=0)
    model = nn.Sequential(nn.Linear(4, 3), layer, nn.Linear(3, 1))
    optimizer, first = torch.optim.Adam(model.parameters(), 1e-2), 0
    if checkpoint is not None and checkpoint.exists():
        state = torch.load(checkpoint, weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        first = state["step"]
    for step in range(first, STEPS):
        if checkpoint is not None and step % EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
            torch.save({**state, "step": step}, checkpoint.with_suffix(".part"))
            checkpoint.with_suffix(".part").replace(checkpoint)
        x = torch.randn(8, 4)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def live(folder: Path, noisy: bool) -> None:
    """One life of the training that is killed; it leaves its parameters if it reaches its end."""
    warnings.simplefilter("ignore")  # of rows that are asked again
    with Journal(Local(max_rows=4), folder / "box.journal") as journal:
        parameters = train(journal, CountedBox(folder / "count", noisy), folder / "checkpoint.pt")
    torch.save(parameters, folder / "parameters.pt")


def killed_and_resumed(folder: Path, noisy: bool, kills: int, seed: int = 0) -> dict[str, Any]:
    """Kill and resume the training so often, let it end, and say what became of it.

    Lives are forks of this process, which must not have used threads of torch before.
    """
    count, moments, killed = folder / "count", random.Random(seed), 0
    count.touch()
    while not (folder / "parameters.pt").exists():
        goal = count.stat().st_size + moments.randrange(10, 90) if killed < kills else math.inf
        if (life := os.fork()) == 0:
            torch.set_num_threads(1)
            live(folder, noisy)
            os._exit(0)
        while os.waitpid(life, os.WNOHANG) == (0, 0):
            if count.stat().st_size >= goal:
                os.kill(life, signal.SIGKILL)
                os.waitpid(life, 0)
                killed += 1
                break
            time.sleep(1e-4)
    file = JournalFile(folder / "box.journal")
    rows = file.select("SELECT count(*) FROM evaluations")[0][0]
    evaluation = "SELECT count(DISTINCT number || '.' || attempt || '.' || row) FROM evaluations"
    result = {
        "box": "noisy" if noisy else "deterministic",
        "kills": killed,
        "evaluations begun": count.stat().st_size,
        "evaluations in the journal": rows,
        "of them twice": rows - file.select(evaluation)[0][0],
        "rows of the largest request": max(
            n for (n,) in file.select("SELECT count(*) FROM evaluations GROUP BY number")
        ),
    }
    file.close()
    return result


def compared(folder: Path, noisy: bool) -> bool:
    """Whether the parameters of a training that was killed are those of one that was not, bit for bit."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if noisy:
            parameters = train(Replay(folder / "box.journal"), None)
        else:
            parameters = train(Local(max_rows=4), CountedBox(folder / "other count", noisy))
    return torch.equal(parameters, torch.load(folder / "parameters.pt"))


def cost(steps: int, folder: Path) -> dict[str, Any]:
    """Seconds of a step with and without a journal, and what the journal takes of it."""

    def box(x: Tensor) -> Tensor:
        end = time.perf_counter() + 1e-3 * len(x)
        while time.perf_counter() < end:
            pass
        return torch.sin(x)

    def step(model: nn.Module, x: Tensor) -> float:
        start = time.perf_counter()
        model(x).square().mean().backward()
        return time.perf_counter() - start

    def timed(evaluator: Evaluator) -> list[float]:
        """The seconds of every request to this evaluator from now on."""
        seconds: list[float] = []
        evaluate = evaluator.evaluate

        def timing(request: Request) -> Answer:
            start = time.perf_counter()
            answer = evaluate(request)
            seconds.append(time.perf_counter() - start)
            return answer

        evaluator.evaluate = timing  # type: ignore[method-assign]
        return seconds

    inner = Local(max_rows=1)
    journal = Journal(inner, folder / "cost.journal")
    inside, outside = timed(inner), timed(journal)
    models = []
    for evaluator in (Local(max_rows=1), journal):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(8, INPUTS), BlackBox(box, INPUTS, evaluator=evaluator, seed=0)))
    seconds = [[step(model, x) for model in models] for x in torch.randn(steps, BATCH, 8)][1:]  # not the first one
    journal.close()
    plain, recorded = (statistics.median(column) for column in zip(*seconds, strict=True))
    return {
        "inputs": INPUTS,
        "batch": BATCH,
        "steps": len(seconds),
        "seconds of a step without": plain,
        "seconds of a step with": recorded,
        "seconds of a step in the journal itself": (sum(outside) - sum(inside)) / steps,
        "load of the machine": os.getloadavg()[0],
        "share of the journal": statistics.median((b - a) / a for a, b in seconds),
        "bytes of an evaluation": (folder / "cost.journal").stat().st_size / models[1][1].stats.evaluations,
    }


def picture(folder: Path) -> None:
    """Train through three threads, one of them slow, for a few seconds, and draw the journal."""

    def device(number: int) -> Any:
        luck = random.Random(number)

        def read(x: np.ndarray) -> np.ndarray:
            time.sleep(luck.lognormvariate(math.log(3e-3 if number else 9e-3), 0.5))
            if luck.random() < 0.01:
                raise RuntimeError("laser is off")
            return np.sin(x)

        return read

    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    with Journal(Threads(3, device, max_rows=1), folder / "device.journal") as journal:
        model = nn.Sequential(nn.Linear(8, 4), BlackBox(None, 4, evaluator=journal, seed=0), nn.Linear(4, 1))
        for x in torch.randn(30, 16, 8):
            model(x).square().mean().backward()
            time.sleep(0.05)  # the rest of a larger network
    to = Path(__file__).parent.parent / "results" / "journal.png"
    program = shutil.which("bondgrad", path=str(Path(sys.executable).parent)) or "bondgrad"
    subprocess.run([program, "journal", str(folder / "device.journal"), "--plot", str(to)], check=True)


def main() -> None:
    """Measure everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of each training")
    parser.add_argument("--steps", type=int, default=41, help="to time, with and without a journal")
    options = parser.parse_args()
    numbers: dict[str, Any] = {"killed": []}
    with tempfile.TemporaryDirectory() as name:
        for noisy in (False, True):
            folder = Path(name) / str(noisy)
            folder.mkdir()
            result = killed_and_resumed(folder, noisy, options.kills)
            numbers["killed"].append(result)
        for result, noisy in zip(numbers["killed"], (False, True), strict=True):
            result["same parameters"] = compared(Path(name) / str(noisy), noisy)
            print(result)
        numbers["cost"] = cost(options.steps, Path(name))
        print(numbers["cost"])
        picture(Path(name))
    save("journal", numbers)


if __name__ == "__main__":
    main()
