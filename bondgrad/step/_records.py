"""What goes into a training step, and what comes out of it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from bondgrad.calling._function import RowFunction
from bondgrad.calling._grid import Grid
from bondgrad.calling._inputs import Limits
from bondgrad.calling._memory import Memory
from bondgrad.estimators import Estimator
from bondgrad.evaluators import Driver
from bondgrad.policies import Policy, State, Steps
from bondgrad.step._health import TrialResult
from bondgrad.step._state import Schedule
from bondgrad.structure import Structure
from bondgrad.structure.discovery._tracker import Discovery, StructureTracker
from bondgrad.torch_support._ranks import ALONE, JointBatch

if TYPE_CHECKING:
    from bondgrad.step._ahead import Ahead

# What a box with memory remembered before the time steps at which its evaluations can start: (time step, state).
StatesByStart = tuple[tuple[int, Any], ...]


class Parts(NamedTuple):
    """The parts of a layer that forward and backward passes use."""

    in_features: int
    function: RowFunction
    driver: Driver
    estimator: Estimator
    policy: Policy
    structure: Structure  # as far as it is known
    limits: Limits | None
    memory: Memory | None
    next_seed: Callable[[], int] | None  # for the next calls of a box that takes one; None: it takes none
    full_precision: bool  # whether the box runs without autocast, TF32 and other shortcuts of float32

    @property
    def grid(self) -> Grid | None:
        """The values that inputs can have; None: all."""
        return None if self.limits is None else self.limits.grid


class ForwardRecord(NamedTuple):
    """What a backward pass must know of its forward pass."""

    training: bool
    autocast: torch.dtype | None = None  # for a box that does not run in full precision
    part: JointBatch = ALONE  # where the rows stand in a batch of several processes
    states: StatesByStart = ()  # of a box with memory
    finite: Tensor | None = None  # [B, d_out] which outputs came and are finite; None: all
    ahead: "Ahead | None" = None  # evaluations of the gradient that began in the forward pass
    kept: Tensor | None = None  # [B] which of its rows have a gradient, in a step of these alone; None: all
    ticket: int = 0  # of an answer kept for activation checkpointing; 0: none
    check: Callable[[], None] | None = None  # raises an error if the box is another one by now


class StepInputs(NamedTuple):
    """The arguments of a backward pass."""

    parts: Parts
    forward: ForwardRecord
    x: Tensor  # [B, d] the rows, inside the limits; [B, T·d] for sequences
    y: Tensor  # [B, d_out] the box there
    gy: Tensor  # [B, d_out] the loss's gradient at y
    context: tuple[Tensor, ...]  # [B, ...] each
    state: State  # the policy's
    generator: torch.Generator  # of all random numbers of the step
    tracker: StructureTracker | None  # where the structure is found out
    schedule: Schedule  # of trials
    noise: float | str | None  # as it was given to the layer
    eval_start: State | None  # what a measuring policy started from in eval mode, if it has
    ahead: "Ahead | None"  # evaluations that began in the forward pass
    capturing: bool  # whether a CUDA graph records the step: nothing may be decided by values then


class Step(NamedTuple):
    """One backward pass, as step hooks get it. The tensors of sequences are [B, T, ...]."""

    x: Tensor  # [B, d] the rows, inside the limits
    gy: Tensor  # [B, d_out] the loss's gradient at the box's outputs
    g: Tensor  # [B, d] the estimate, as handed on


class HostChanges(NamedTuple):
    """What a step changes on the host. Every replay of its CUDA graph changes it in the same way again."""

    steps: Steps  # the perturbations, for `stats`
    seen: Step  # for step hooks
    training: bool  # in eval mode nothing else changes
    evaluations: int  # for the gradient, which pay for trials and for looking at the structure again


class Recording(NamedTuple):
    """What a captured training step changes on the host, which every replay changes again."""

    calls: int  # of the function
    evaluations: int  # rows sent to it
    requests: int  # in which they were sent
    changes: tuple[HostChanges, ...]  # of every backward pass


class StepResult(NamedTuple):
    """The gradient of a backward pass, and everything that the layer keeps of it."""

    g: Tensor  # [B, d], or [B, T·d] for sequences: the gradient
    changes: HostChanges
    generator: torch.Generator  # after the step
    failures: Tensor | None  # how many perturbed rows came back non-finite; None: none did
    state: State | None  # the policy's new state; None: it stays, or waits for what the other processes say
    summary: Tensor | None  # for the other processes
    discovery: Discovery | None  # of the structure
    noise_trial: TrialResult | None  # made before the gradient, to measure the noise
    trial: TrialResult | None  # made after it, at the same rows
    restart: bool  # whether the policy has lost its steps, and looks for a first step again
    eval_start: State | None  # see `StepInputs`
    errors: tuple[Exception, ...]  # that the box raised in trials, where they end nothing
