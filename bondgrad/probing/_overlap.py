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


@dataclass(frozen=True)
class OverlapSettings:
    """The calls that are made side by side, and the thresholds of the findings."""

    slow: float = 1e-3  # seconds of a call from which on it is worth while
    repeats: int = 5  # pairs of calls of each kind, of which the quickest counts
    share: float = 0.2  # part of what is left that repeats beyond the first may take
    waiting: float = 0.25  # cores that a box keeps busy while it waits, at most
    busy: float = 0.5  # share of the time, at most, in which a box that waits computes, or has to wait for a core
    several: float = 1.5  # cores from which on a box is taken to use several by itself
    gain: float = 1.33  # two calls side by side must be so many times faster


SETTINGS = OverlapSettings()


@dataclass(frozen=True)
class Overlap:
    """The time of two calls, one after the other and side by side in two threads."""

    apart: float  # seconds of two calls one after the other
    together: float  # seconds of the same calls in two threads; infinite if one failed there
    cores: float  # processor cores that this process kept busy with the calls one after the other
    cores_together: float  # and with those in two threads
    cores_of_children: float  # cores that programs kept busy which the box started, one after the other
    busy: float  # share of the time in which a call, of those one after the other, computed or waited for a core
    safe: bool  # whether the answers in two threads are the same
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
        """Whether calls in two threads run at the same time.

        A box that computes is judged by the cores that it keeps busy, since other programs take time from it, too.
        """
        if not self.safe:
            return False
        if self.waits:
            return self.apart > SETTINGS.gain * self.together
        return self.cores_together > SETTINGS.gain * max(1.0, self.cores)

    @property
    def processes_help(self) -> bool:
        """Whether the box computes on one core, and threads do not help."""
        return not self.threads_help and not self.waits and self.cores < SETTINGS.several

    @property
    def words(self) -> str:
        """The finding, in sentences."""
        if not self.safe:
            return "In two threads at the same time it fails, or answers otherwise: threads must not share it."
        both = f"Two calls take {duration(self.apart)} one after the other, {duration(self.together)} in two threads"
        if self.threads_help:
            how = "it waits" if self.waits else "it computes without Python's lock"
            return f"{both}: {how}, so that threads help."
        if self.waits:
            return f"{both}: it waits, and does one thing at a time."
        if self.processes_help:
            return f"{both}: it computes and keeps Python's lock, so that threads do not help."
        return f"{both}: a single call keeps {self.cores:.1f} cores busy."


def may_overlap(sampler: Sampler, facts: Facts) -> bool:
    """Whether it is worth while to call the box in two threads, and harmless: it is slow, and has no memory."""
    speed = facts.found.speed
    slow = speed is not None and speed.latency >= SETTINGS.slow
    return slow and sampler.calls_here and not facts.remembers and snapshot_owner(sampler.function.fn) is None


def measure_overlap(sampler: Sampler, facts: Facts, generator: torch.Generator) -> Overlap:
    """Time two calls one after the other, and the same two in two threads."""
    if facts.found.history is None:
        raise MeasurementSkipped("whether it remembers earlier questions is not known")
    n, left = sampler.caller.smallest, min(sampler.affordable_calls, sampler.affordable)
    sampler.require(4 * n, calls=4)
    rows, repeats = facts.choose(2 * n, generator), int(SETTINGS.share * left / (4 * n))
    apart, together, safe = [], [_Timing(math.inf, 0.0, 0.0, 0.0)], True
    with Threads(2, max_rows=n) as threads:
        for _ in range(max(1, min(SETTINGS.repeats, repeats))):
            try:
                one_by_one, times = _timed(sampler, Local(max_rows=n), rows)
            except BoxError as error:
                raise MeasurementSkipped("a call failed") from error
            apart.append(times)
            try:
                at_once, times = _timed(sampler, threads, rows)
            except BoxError:
                safe = False
                break
            together.append(times)
            safe &= _agree(facts, one_by_one, at_once)
    one, two = min(apart), min(together)  # the quickest
    overlap = Overlap(one.seconds, two.seconds, one.cores, two.cores, one.children, one.busy, safe)
    return replace(overlap, picklable=_picklable(sampler.function)) if overlap.processes_help else overlap


class _Timing(NamedTuple):
    """The time of a request, and what happened meanwhile."""

    seconds: float
    cores: float  # busy with this process
    children: float  # busy with programs that were started, and have ended
    busy: float  # share of the time in which this thread computed, or could not for want of a core


def _timed(sampler: Sampler, evaluator: Evaluator, rows: Tensor) -> tuple[Tensor, _Timing]:
    """Outputs [n, d_out] at rows [n] of x, and their time."""
    before = _processor_seconds()
    y, seconds = sampler.time_with(evaluator, rows)
    shares = ((now - then) / max(seconds, 1e-9) for then, now in zip(before, _processor_seconds(), strict=True))
    return y, _Timing(seconds, *shares)


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
