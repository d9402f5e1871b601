"""Whether calls can run side by side: in threads, or only in processes."""

import math
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bondgrad.calling._function import RowFunction, snapshot_owner
from bondgrad.errors import BoxError
from bondgrad.evaluators import Evaluator, Local, Threads
from bondgrad.evaluators._remote import pickled_box
from bondgrad.measuring._sampler import MeasurementSkipped, Sampler
from bondgrad.probing._facts import Facts
from bondgrad.probing._number_format import duration
from bondgrad.probing._speed import Speed


@dataclass(frozen=True)
class OverlapSettings:
    """The calls that are made side by side, and the thresholds of the findings."""

    slow: float = 1e-3  # least seconds of the calls; of quick rows, so many are in one
    repeats: int = 5  # pairs of calls of each kind, of which the quickest counts
    share: float = 0.2  # part of what is left that repeats beyond the first may take
    tries: int = 3  # of a call that fails
    waiting: float = 0.25  # cores that a box keeps busy while it waits, at most
    busy: float = 0.5  # share of the time, at most, in which a box that waits computes, or has to wait for a core
    several: float = 1.5  # cores from which on a box is taken to use several by itself
    gain: float = 1.33  # two calls side by side must be so many times faster
    patience: float = 10.0  # times the seconds of two calls, and a second, after which threads are given up


SETTINGS = OverlapSettings()


@dataclass(frozen=True)
class Overlap:
    """The time of two calls, one after the other and, for a box that waits, side by side in two threads."""

    apart: float  # seconds of two calls one after the other
    cores: float  # processor cores that this process kept busy with them
    cores_of_children: float  # cores that programs kept busy which the box started
    busy: float  # share of the time in which a call computed or waited for a core
    together: float | None = None  # seconds of the same calls in two threads; infinite if one failed. None: not tried
    safe: bool = True  # whether the answers in two threads are the same
    picklable: bool | None = None  # whether the box can be sent to other processes. None: it was not tried

    @property
    def waits(self) -> bool:
        """Whether the box waits most of the time, for a device, a service or a program, instead of computing."""
        return self.cores < SETTINGS.waiting and self.busy < SETTINGS.busy

    @property
    def needs_cores(self) -> bool:
        """Whether more calls at a time than there are cores would be of no use."""
        return not self.waits or self.cores_of_children >= SETTINGS.waiting

    @property
    def threads_help(self) -> bool:
        """Whether calls in two threads run at the same time."""
        return self.together is not None and self.safe and self.apart > SETTINGS.gain * self.together

    @property
    def processes_help(self) -> bool:
        """Whether the box computes on one core."""
        return not self.waits and self.cores < SETTINGS.several

    @property
    def words(self) -> str:
        """The finding, in sentences."""
        if not self.safe:
            return "In two threads at the same time it fails, or answers otherwise: threads must not share it."
        apart = f"Two calls take {duration(self.apart)} one after the other"
        if self.together is not None:
            both = f"{apart}, {duration(self.together)} in two threads"
            help_or_not = "it waits, so that threads help" if self.threads_help else "it does one thing at a time"
            return f"{both}: {help_or_not}."
        if self.processes_help:
            return f"{apart}, on one core: it computes."
        return f"{apart}: a single call keeps {self.cores:.1f} cores busy."


def may_overlap(sampler: Sampler, facts: Facts) -> bool:
    """Whether it is worth while to call the box in two threads, and harmless: it is slow, and has no memory."""
    speed = facts.found.speed
    if speed is None or not sampler.calls_here or facts.remembers or snapshot_owner(sampler.function.fn) is not None:
        return False
    return _rows_of_a_call(sampler, speed) > 0


def _rows_of_a_call(sampler: Sampler, speed: Speed) -> int:
    """How many rows make a call that is slow enough to be timed; zero: none that training makes is."""
    least, most = sampler.caller.smallest, sampler.caller.call_rows
    if speed.latency >= SETTINGS.slow:
        return least
    return (
        0
        if speed.vectorised is not False or speed.seconds(most) < SETTINGS.slow
        else next(n for n in range(least, most + 1) if speed.seconds(n) >= SETTINGS.slow)
    )


def measure_overlap(sampler: Sampler, facts: Facts, generator: torch.Generator) -> Overlap:
    """Time two calls one after the other, and the same two in two threads if the box waits meanwhile.

    A box that computes is never called in two threads: libraries that are not made for that can end the program.
    """
    if facts.found.history is None or facts.found.speed is None:
        raise MeasurementSkipped("whether it remembers earlier questions is not known")
    n, left = _rows_of_a_call(sampler, facts.found.speed), min(sampler.affordable_calls, sampler.affordable)
    sampler.require(4 * n, calls=4)
    rows, repeats = facts.choose(2 * n, generator), int(SETTINGS.share * left / (4 * n))
    repeats = max(1, min(SETTINGS.repeats, repeats))
    apart = [_timed(sampler, Local(max_rows=n), rows, SETTINGS.tries) for _ in range(repeats)]
    if None in apart:
        raise MeasurementSkipped("calls failed")
    y, one = min((timed for timed in apart if timed is not None), key=lambda timed: timed[1].seconds)
    found = Overlap(one.seconds, one.cores, one.children, one.busy)
    if not found.waits:
        return replace(found, picklable=_picklable(sampler.function)) if found.processes_help else found
    quickest, patience = math.inf, 1.0 + SETTINGS.patience * one.seconds
    tries = SETTINGS.tries if sampler.caller.random_failures else 1  # of others, the threads are the reason
    with Threads(2, max_rows=n, timeout=patience / n) as threads:
        for _ in range(repeats):
            timed = _timed(sampler, threads, rows, tries)
            if timed is None or not _agree(facts, y, timed[0]):
                return replace(found, together=math.inf, safe=False)
            quickest = min(quickest, timed[1].seconds)
    return replace(found, together=quickest)


class _Timing(NamedTuple):
    """The time of a request, and what happened meanwhile."""

    seconds: float
    cores: float  # busy with this process
    children: float  # busy with programs that were started, and have ended
    busy: float  # share of the time in which this thread computed, or could not for want of a core


def _timed(sampler: Sampler, evaluator: Evaluator, rows: Tensor, tries: int) -> tuple[Tensor, _Timing] | None:
    """Outputs [n, d_out] at rows [n] of x, and their time; None: the request failed so many times."""
    for attempt in range(tries):
        before = _processor_seconds()
        try:
            y, seconds = sampler.time_with(evaluator, rows)
        except BoxError:
            continue
        sampler.caller.count_random_failures(attempt)
        after = _processor_seconds()
        return y, _Timing(
            seconds, *((now - then) / max(seconds, 1e-9) for then, now in zip(before, after, strict=True))
        )
    return None


def _processor_seconds() -> tuple[float, float, float]:
    """Seconds so far of cores with this process, with programs it started, and of this thread on or waiting for one."""
    times = os.times()
    try:
        queued = int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):  # systems other than Linux do not say
        queued = 0.0
    return time.process_time(), times.children_user + times.children_system, time.thread_time() + queued


def _agree(facts: Facts, one: Tensor, other: Tensor) -> bool:
    """Whether outputs [n, d_out] of two calls are the same, as far as those of this box are."""
    random = facts.found.randomness
    steady = random is not None and random.deterministic and not random.moving
    return not steady or not bool(((one - other).abs() > facts.certain(1)).any())


def _picklable(function: RowFunction) -> bool:
    """Whether a box can be sent to other processes, as far as is known."""
    try:
        pickled_box(None, function)
    except TypeError:
        return False
    except ImportError:  # what it takes is to be installed with `Processes`
        pass
    return True
