"""Which evaluator shortens a training step, given how long calls take and whether they can run side by side."""

import math
import os
from dataclasses import dataclass

from bondgrad.probing._number_format import applying, duration
from bondgrad.probing._overlap import Overlap
from bondgrad.probing._speed import Speed

THREADS = 8  # recommended for a box that waits
LEAST_GAIN = 1.33  # how many times faster a step must become
SLOW_CALL = 1e-3  # seconds of a call from which on it counts how many there are
CORES = "os.cpu_count()"  # in recommended code, which may run on another machine
START = 0.005  # seconds that a request to processes takes at least, with all that goes to and fro
SENT = (
    "It is sent to the processes with all that it refers to; Processes(n, factory) makes one in each of them instead."
)


@dataclass(frozen=True)
class Advice:
    """A recommended argument of BlackBox that shortens a training step."""

    argument: str | None  # its name; None: what to do takes more than an argument
    value: str  # in Python
    reason: str  # for the code
    words: str  # for the report, in sentences
    workers: int = 1  # among which rows are divided


@dataclass(frozen=True)
class TrainingStep:
    """The evaluations of a training step, and how long they take."""

    rows: int  # of the batch
    moved: int  # evaluations of the gradient, for each row
    speed: Speed
    nature: str  # "deterministic" or "random"; empty: not known

    def seconds(self, workers: int = 1) -> float:
        """Seconds of the forward and of the backward pass, with rows divided among workers."""
        passes = self.rows, self.rows * self.moved
        return sum(self.speed.seconds(math.ceil(rows / workers)) for rows in passes)

    @property
    def seconds_at_once(self) -> float:
        """Seconds of all evaluations in one call."""
        return self.speed.seconds(self.rows * (1 + self.moved))

    @property
    def box(self) -> str:
        """What the box is like, in words."""
        one = self.speed.max_rows == 1 and "one row at a time"
        return ", ".join(applying(f"{duration(self.speed.latency)} a {self.speed.unit}", one, self.nature))

    def gains(self, after: float) -> bool:
        """Whether a step that takes so many seconds is much shorter."""
        return self.seconds() > LEAST_GAIN * after

    def change(self, after: float) -> str:
        """How a step becomes shorter, in words."""
        return f"a step of {self.rows:,} rows from {duration(self.seconds())} to {duration(after)}"


def advise(step: TrainingStep, overlap: Overlap | None, eager: bool, options: str = "") -> Advice | None:
    """What shortens a step by much, or why workers do not; None: nothing that is known.

    Args:
        step: The step.
        overlap: Whether calls can run side by side; None: it was not measured.
        eager: Whether the evaluations of a gradient can be made in the forward pass.
        options: Further arguments of an evaluator, in Python.
    """
    divided = None if overlap is None else _several_workers(step, overlap, options)
    if divided is not None and divided.argument is not None:
        return divided
    return (_one_call(step) if eager else None) or divided


def _several_workers(step: TrainingStep, overlap: Overlap, options: str) -> Advice | None:
    if not (overlap.threads_help or overlap.processes_help):
        return None
    workers, n = (os.cpu_count() or 1, CORES) if overlap.needs_cores else (THREADS, str(THREADS))
    after = step.seconds(workers) + (0.0 if overlap.threads_help else 2 * START)
    name = f"Threads({n}{options})" if overlap.threads_help else f"Processes({n}{options})"
    change = step.change(after)
    if not step.gains(after):
        words = f"{step.box}: none is recommended, since {name} would bring {change}, which is not much shorter."
        return Advice(None, "", "", words)
    if not overlap.threads_help and overlap.picklable is False:
        words = f"{step.box}: Processes({n}, factory) would bring {change}, with a factory that makes the box in each "
        return Advice(None, "", "", words + "process. This one cannot be sent there.")
    words = f"{step.box}: {name} brings {change}." + ("" if overlap.threads_help else f" {SENT}")
    return Advice("evaluator", f"bondgrad.evaluators.{name}", f"brings {change}", words, workers)


def _one_call(step: TrainingStep) -> Advice | None:
    after = step.seconds_at_once
    if step.speed.latency < SLOW_CALL or not step.gains(after):
        return None
    change, why = step.change(after), "since one call does the work of two"
    return Advice("eager", "True", f"brings {change}, {why}", f"{step.box}: eager=True brings {change}, {why}.")
