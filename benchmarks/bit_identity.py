"""Is training the same to the last bit in every process, and if not, which operation differs first?

    python benchmarks/bit_identity.py --processes 40 --epochs 1 --steps 2 --as-intel --label "Intel's code"
    python benchmarks/bit_identity.py --processes 40 --epochs 1 --steps 2 --as-intel --without-fix --label "no fix"
    python benchmarks/bit_identity.py --device cuda --processes 8 --at-once 8 --epochs 1 --label "eight at once"

Fresh processes train the demo's four methods side by side with the project's own trainer. Every step leaves checksums
of all that it computed, in the order in which it did: the batch, the output of every layer, the gradient at every such
output, the loss, the gradient and the new value of every parameter, and the optimizer's state. One process more, which
runs alone before the others and always has the fix described below, is the reference. Where another one differs from
it, the first entry that does is the answer.

What was found on CPUs: oneMKL 2024.2, which torch's packages contain, chooses the code of its vectorised functions
(tanh, exp, sqrt, ...) in their first call. If two threads make that call at the same time, one of them may get code of
low accuracy for its half of the tensor, once in a process. https://github.com/pytorch/pytorch/issues/188792 says the
same. It was seen with Intel's AVX-512 code only; `--as-intel` has MKL use that on other processors too. The trainer
makes a first call of one element, which prevents it; `--without-fix` leaves that call out. How often it happens to a
first call is counted by benchmarks/first_calls.py.

On a GPU every method runs twice in each process, captured and eager, on a stream of its own as `Runner` has it, and so
does one more with a noisy box. Captured runs are then also compared with their eager twins.
"""

import argparse
import io
import json
import math
import os
import pickle
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from record import save
from rich.console import Console
from traces import Recorder, Trace, captured_against_eager, differences

from bondgrad.experiments import config, trainer
from bondgrad.experiments.demo import RUNS, train_side_by_side
from bondgrad.experiments.runner import TURN
from bondgrad.experiments.settings import Settings

ROOT = Path(__file__).parent.parent
SEED = 42  # of data, weights and perturbations
NOISE = 1e-3  # of the box, in the additional run on a GPU: it was such a run that once differed there
KEPT = 5  # processes of a campaign whose differences are described in full


# ---- a child: training, with a recorder around each run's step


def settings_of(device: str, epochs: int, steps: int | None) -> list[Settings]:
    """The demo's four runs; on a GPU each captured and eager, and one more with a noisy box."""
    paper = config.load(config.PAPER / "calhouse.yaml").only(RUNS)
    runs = [replace(settings, epochs=epochs, steps=steps) for settings in paper.runs]
    if device == "cpu":
        return runs
    noisy = replace(runs[0], run="NFN AD, noise", box=(runs[0].box or {}) | {"noise": NOISE})
    return [
        replace(settings, run=f"{settings.run}, {'captured' if graph else 'eager'}", graph=graph)
        for settings in (*runs, noisy)
        for graph in (True, False)
    ]


def train(runs: list[trainer.Run], device: torch.device) -> None:
    """All runs to their end: on a CPU as the demo does it, on a GPU as `Runner` does."""
    if device.type == "cpu":
        train_side_by_side(runs, Console(file=io.StringIO(), force_terminal=True))
        return
    streams = [stream_of_its_own(device) for _ in runs]
    size = TURN["cuda"]
    while not all(run.done for run in runs):
        for run, stream in zip(runs, streams, strict=True):
            if not run.done:
                with stream:
                    run.turn(size, timed=(run.batch // size) % 4 == 2)
    torch.cuda.synchronize(device)


def stream_of_its_own(device: torch.device) -> AbstractContextManager[object]:
    """As `Runner._stream`."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)


def child(options: argparse.Namespace) -> None:
    """Train, and leave the traces and what the process ran in as a file."""
    if options.without_fix:
        trainer.choose_vector_code = lambda: None
    device = torch.device(options.device)
    every = settings_of(options.device, options.epochs, options.steps)
    runs = [trainer.Run(settings, SEED, Path(), device) for settings in every]
    recorders = {run.settings.run: Recorder(run, options.light) for run in runs}
    train(runs, device)
    traces = {name: recorder.finished() for name, recorder in recorders.items()}
    surroundings = environment(device)
    if device.type == "cuda":
        surroundings["replayed steps"] = {name: recorder.replays for name, recorder in recorders.items()}
    with Path(options.child).open("wb") as file:
        pickle.dump((traces, surroundings), file)


def environment(device: torch.device) -> dict[str, Any]:
    """What a process ran in that may decide about the last bit."""
    return {
        "cpu": processor(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def processor() -> str:
    """Its name, family and model, where Linux tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    entries = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    known = {key.strip(): value.strip() for key, value in entries.items()}
    return ", ".join(known.get(key, "?") for key in ("model name", "cpu family", "model", "stepping"))


# ---- the parent: fresh processes, and what they computed


@dataclass
class Child:
    """A process that was started; number 0 is the reference."""

    number: int
    file: Path
    process: subprocess.Popen[bytes]

    def result(self) -> tuple[dict[str, Trace], dict[str, Any]]:
        """Its traces by run, and what it ran in."""
        with self.file.open("rb") as file:
            traces, surroundings = pickle.load(file)
        self.file.unlink()
        return traces, surroundings


def start(options: argparse.Namespace, number: int, folder: Path) -> Child:
    """A fresh process with the same options."""
    file = folder / f"{number:05d}.pickle"
    command = [sys.executable, __file__, "--child", str(file)]
    command += ["--device", options.device, "--epochs", str(options.epochs)]
    command += [] if options.steps is None else ["--steps", str(options.steps)]
    command += ["--light"] if options.light else []
    command += ["--without-fix"] if options.without_fix and number else []
    variables = dict(os.environ)
    if options.as_intel:
        variables["LD_PRELOAD"] = str(intel_library(folder))
    if options.threads:
        variables["OMP_NUM_THREADS"] = str(options.threads)
    return Child(number, file, subprocess.Popen(command, env=variables))


def finished_children(options: argparse.Namespace, folder: Path) -> Iterator[Child]:
    """The reference, then the others in the order in which they end, until there were enough or the time is over."""
    begun, started = time.monotonic(), 0
    running: list[Child] = []
    try:
        while True:
            at_once = options.at_once if started else 1
            enough = started > options.processes or (started and time.monotonic() - begun > options.seconds)
            if len(running) < at_once and not enough:
                running.append(start(options, started, folder))
                started += 1
                if started == 1:
                    running[0].process.wait()  # so that nothing disturbs the reference
                continue
            if not running:
                return
            time.sleep(0.05)
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                if one.process.returncode:
                    raise RuntimeError(f"child {one.number} ended with {one.process.returncode}: see its output above")
                yield one
    finally:
        for one in running:  # where one failed, or nobody wants more
            one.process.kill()


def intel_library(folder: Path) -> Path:
    """A library that, loaded first, has MKL believe that the processor is one of Intel's (needs a C compiler)."""
    library = folder / "as_intel.so"
    if not library.exists():
        source = "int mkl_serv_intel_cpu_true(void) {return 1;} int mkl_serv_intel_cpu(void) {return 1;}"
        subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-o", library, "-"], input=source, text=True, check=True)
    return library


@dataclass
class Tally:
    """Processes in which some run differed from what it was compared with, and where it did so first."""

    processes: int = 0
    operations: Counter[str] = field(default_factory=Counter)
    described: list[dict[str, Any]] = field(default_factory=list)

    def add(self, number: int, found: dict[str, dict[str, Any]]) -> None:
        """Count one process, with the first difference of each run that has one."""
        if not found:
            return
        self.processes += 1
        for run, difference in found.items():
            when = f"step {difference['step']}" if "step" in difference else f"epoch {difference['epoch']}"
            self.operations[f"{run}, {when}: {difference['operation']}"] += 1
        if len(self.described) < KEPT:
            self.described.append({"process": number, "differences": found})

    def numbers(self) -> dict[str, Any]:
        """For the results."""
        return {"differing": self.processes, "first operations": dict(self.operations), "described": self.described}


def campaign(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start the children, compare, and say what was found."""
    begun, count = time.monotonic(), 0
    from_reference, from_twins = Tally(), Tally()
    children = finished_children(options, folder)
    reference, surroundings = next(children).result()
    from_twins.add(0, captured_against_eager(reference))
    for one in children:
        count += 1
        traces, _ = one.result()
        found = differences(reference, traces)
        from_reference.add(one.number, found)
        from_twins.add(one.number, captured_against_eager(traces))
        print(f"{time.monotonic() - begun:7.1f} s  process {one.number}: {'DIFFERS' if found else 'same'}", flush=True)
        for name, difference in found.items():
            print(f"    {name}: {json.dumps(difference)}", flush=True)
    numbers = {
        "command": shlex.join(["python", *sys.argv]),
        "as Intel": options.as_intel,
        "processes": count,
        "at once": options.at_once,
        **busy_since(begun),
        "steps of each run": {name: len(trace.steps) for name, trace in reference.items()},
        **from_reference.numbers(),
    }
    if options.device == "cuda":  # the reference included
        numbers["captured against eager"] = {"processes": count + 1, **from_twins.numbers()}
    return numbers | {"environment": surroundings}


def busy_since(begun: float) -> dict[str, Any]:
    """Seconds since then, and how busy the machine was: on a busy one, threads seldom do something at the same time."""
    load = round(os.getloadavg()[1], 1)  # of the last five minutes
    return {"seconds": round(time.monotonic() - begun, 1), "load": load, "cores": os.cpu_count()}


def save_campaign(name: str, label: str, numbers: dict[str, Any]) -> None:
    """Write to results/NAME.json, beside the campaigns that are there already."""
    path = ROOT / "results" / f"{name}.json"
    before = json.loads(path.read_text())["numbers"] if path.exists() else {}
    save(name, before | {label: numbers})


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--processes", type=int, default=20, help="fresh processes to compare with the reference")
    add("--at-once", type=int, default=1, help="how many at a time")
    add("--seconds", type=float, default=math.inf, help="no process is started after that")
    add("--epochs", type=int, default=2, help="of each run; an epoch has 258 steps")
    add("--steps", type=int, help="fewer steps in an epoch")
    add("--threads", type=int, default=0, help="OMP_NUM_THREADS of the children; 0: as the machine has it")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--light", action="store_true", help="record batch, loss, gradients and weights only, and no layers")
    add("--as-intel", action="store_true", help="have MKL use Intel's code on another processor (needs cc)")
    add("--without-fix", action="store_true", help="leave out the first call of one element, but in the reference")
    add("--label", default=" ".join(sys.argv[1:]) or "default", help="name of this campaign in the results")
    add("--child", help=argparse.SUPPRESS)  # the file to which a child writes
    return parser.parse_args()


def main() -> None:
    """Parent or child."""
    options = parsed()
    if options.child:
        child(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        numbers = campaign(options, Path(folder))
    print(json.dumps(numbers, indent=1))
    save_campaign(f"bit_identity_{options.device}", options.label, numbers)


if __name__ == "__main__":
    main()
