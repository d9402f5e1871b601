"""Runs side by side, with progress; interrupted, they go on where they were."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from bondgrad.experiments.config import Experiment
from bondgrad.experiments.interrupt import interrupts
from bondgrad.experiments.settings import Settings
from bondgrad.experiments.store import Store
from bondgrad.experiments.trainer import Run

AT_ONCE = 8  # runs
TURN = {"cpu": 4, "cuda": 20}  # steps of one run before the next has its turn
SAVE_EVERY = 60.0  # seconds
# Each has two streams. Torch has 32, and two runs on the same one would share cuBLAS's scratch memory.
MOST_ON_GPU = 15


class Runner:
    """Takes the runs of an experiment through to their end.

    Several go on at the same time, a few steps of each in turn, so that whatever else the machine does falls on all
    alike; on a GPU each has a stream of its own, and their work overlaps but for the turns that are timed.

    Args:
        experiment: Whose runs.
        store: Where they are kept.
        folder: Of the pictures.
        device: Where the work is done.
        at_once: Runs at a time.
        timed: Whether to measure the time of steps; not where other work shares the machine.
    """

    def __init__(
        self,
        experiment: Experiment,
        store: Store,
        folder: Path,
        device: torch.device,
        at_once: int = AT_ONCE,
        timed: bool = True,
    ) -> None:
        self.experiment, self.store, self.folder, self.device = experiment, store, folder, device
        if device.type == "cuda" and at_once > MOST_ON_GPU:
            raise ValueError(f"--side-by-side must be at most {MOST_ON_GPU} on a GPU, got {at_once}")
        self.at_once, self.timed = at_once, timed
        self.stopped = False  # by whoever sets it, after the step at hand
        self._elsewhere: list[str] = []  # runs that another command is at work on

    def run(self, console: Console) -> bool:
        """All of it; False if it was interrupted."""
        all_runs = [(settings, seed) for seed in self.experiment.seeds for settings in self.experiment.runs]
        todo = [pair for pair in all_runs if not self._finished(*pair, console)]
        with interrupts(self):
            for i in range(0, len(todo), self.at_once):
                if not self.stopped:
                    some = todo[i : i + self.at_once]
                    self._group(some, console, f"{i + 1} to {i + len(some)} of {len(todo)}")
        if self._elsewhere and not self.stopped:
            raise ValueError(f"another command is at work on {', '.join(self._elsewhere)}: all else is done")
        return not self.stopped

    def _finished(self, settings: Settings, seed: int, console: Console) -> bool:
        record = self.store.finished(settings.run, seed)
        if record is None and (source := self.store.borrow(settings, seed)) is not None:
            console.print(f"{escape(settings.run)}, seed {seed}: the same run was done in {escape(source)}")
            return True
        if record is not None:
            failed = f" [red]and failed:[/] {escape(record['failed'])}" if record["failed"] else ""
            console.print(f"{escape(settings.run)}, seed {seed}: done before{failed}")
        return record is not None

    def _begun(self, settings: Settings, seed: int, console: Console) -> Run | None:
        """A run, new or where it was; None if another command has it, or has finished it meanwhile."""
        name = f"{settings.run}, seed {seed}"
        mine = self.store.lock(settings.run, seed)
        if self._finished(settings, seed, console):
            return None
        if not mine:
            console.print(f"{escape(name)}: another command is at work on it")
            self._elsewhere.append(name)
            return None
        run = Run(settings, seed, self.folder, self.device)
        if self.store.resume(run):
            console.print(f"{escape(name)}: goes on after {run.steps:,} steps")
        return run

    def _group(self, todo: list[tuple[Settings, int]], console: Console, which: str) -> None:
        with contextlib.ExitStack() as opened:  # also after Ctrl-C nothing that evaluators have started is left
            runs = []
            for settings, seed in todo:
                if (run := self._begun(settings, seed, console)) is not None:
                    opened.callback(run.parts.close)
                    runs.append(run)
            if runs:
                self._train(runs, console, which)

    def _train(self, runs: list[Run], console: Console, which: str) -> None:
        """Show how the runs go on, to their end or until they are stopped."""
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=10),
            TaskProgressColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        with Progress(*columns, console=console) as progress:
            console.print(f"Runs {which}, side by side:" if len(runs) > 1 else f"Run {which}:")
            tasks = {
                run: progress.add_task(
                    f"{run.settings.run} {run.seed}",
                    total=run.settings.epochs * run.steps_of_epoch,
                    completed=run.steps,
                    note="",
                )
                for run in runs
            }
            for run, done in self._turns(runs):
                progress.update(tasks[run], advance=done)
                if run.failed is not None:
                    console.print(f"[red]{escape(run.settings.run)}, seed {run.seed}, ends:[/] {run.failed}")
                elif run.batch == 0:
                    progress.update(tasks[run], note=_note(run))
                    if not console.is_terminal:  # where bars are not drawn
                        console.print(f"{escape(run.settings.run)}, seed {run.seed}, epoch {run.epoch}: {_note(run)}")

    def _turns(self, runs: list[Run]) -> Iterator[tuple[Run, int]]:
        """Turns of the runs, one after the other, until all are done or it is stopped; what they bring is kept."""
        size = TURN[self.device.type]
        streams = {run: self._stream() for run in runs}
        saved = time.monotonic()
        while not self.stopped and not all(run.done for run in runs):
            for run in runs:
                if run.done or self.stopped:
                    continue
                timed = self.timed and self._alone(run, run.batch // size)
                try:
                    with streams[run]:
                        taken = run.turn(size, timed, lambda: self.stopped)
                        if run.batch == 0 or run.failed is not None:
                            self.store.epoch(run)
                except Exception:  # of one run, which must not cost the others what they have
                    self._save({other: stream for other, stream in streams.items() if other is not run})
                    raise
                yield run, taken
            if self.stopped or time.monotonic() - saved > SAVE_EVERY:
                self._save(streams)
                saved = time.monotonic()

    def _save(self, streams: dict[Run, contextlib.AbstractContextManager[object]]) -> None:
        for run, stream in streams.items():
            if not run.done:
                with stream:
                    self.store.save(run)

    def _alone(self, run: Run, turn: int) -> bool:
        """Whether a turn is timed. On a GPU that costs the overlap with others and a look at the gradient.

        So it is one of four, or all but the first, which may be captured, where there is nothing to look at.
        """
        if self.device.type == "cpu":
            return True
        return turn > 0 if run.settings.measure_every == 0 else turn % 4 == 2

    def _stream(self) -> contextlib.AbstractContextManager[object]:
        if self.device.type != "cuda":
            return contextlib.nullcontext()
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(stream)


def _note(run: Run) -> str:
    """How it stands after an epoch."""
    last = run.history[-1]
    right = f"loss {last['test_loss']:.4g}" if last["accuracy"] is None else f"{100 * last['accuracy']:.2f} % right"
    at_box, at_parameters = last["sign_accuracy"], last["parameter_sign_accuracy"]
    signs = at_parameters if at_box is None else at_box
    return right + ("" if signs is None else f", signs {100 * signs:.2f} %")
