"""The forward pass: the box at the rows of a batch, from what it remembers on."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from bondgrad.calling._memory import ExplicitState, InternalState, StateRecorder
from bondgrad.errors import BoxError
from bondgrad.step._records import Parts, StatesByStart
from bondgrad.structure import Sequence
from bondgrad.torch_support._checkpoint import in_backward
from bondgrad.torch_support._precision import arithmetic


class ForwardInputs(NamedTuple):
    """The arguments of a forward pass."""

    parts: Parts
    x: Tensor  # [B, d], or [B, T·d] for sequences
    context: tuple[Tensor, ...]  # [B, ...] each
    training: bool
    graded: bool  # whether a gradient may be asked for later
    autocast: torch.dtype | None  # for a box that does not run in full precision


def evaluate(call: ForwardInputs) -> tuple[Tensor, StatesByStart]:
    """The outputs of the box at x, [B, d_out] in new memory, and the states from which it started."""
    parts, function, x = call.parts, call.parts.function, call.x
    where = function.compute_device(x.device)
    rows = (x, *call.context) if where == x.device else tuple(t.to(where) for t in (x, *call.context))
    if where != x.device or parts.limits is not None:
        call = call._replace(x=rows[0] if parts.limits is None else parts.limits.clamped(rows[0]), context=rows[1:])
    known = function.out_features, function.interfaces
    try:
        with arithmetic(parts.full_precision, where, call.autocast):
            y, states = _answer(call)
            return y.to(x.device, copy=True), states
    except BaseException:
        function.out_features, function.interfaces = known  # a call that fails teaches nothing about the function
        raise


def _answer(call: ForwardInputs) -> tuple[Tensor, StatesByStart]:
    """The outputs of the box at rows on its own device, and the states from which it started."""
    memory = call.parts.memory
    seed = None if call.parts.next_seed is None else call.parts.next_seed()
    if memory is not None and in_backward():
        raise BoxError("a box with memory cannot be called again in a backward pass: it has moved on since")
    if isinstance(memory, InternalState):
        return _ask_from_internal_state(call, memory, seed)
    if isinstance(memory, ExplicitState):
        return _ask_from_explicit_state(call, memory, seed)
    return _ask(call, call.parts.function, call.x, call.context, seed), ()


def _ask(
    call: ForwardInputs, function: Callable[..., Tensor], x: Tensor, context: tuple[Tensor, ...], seed: int | None
) -> Tensor:
    """The outputs of the box at x [B, d], in as many requests as it takes."""
    driver = call.parts.driver
    whole = call.parts.memory is not None  # the states after the calls are put together in the order of the rows

    def work() -> Tensor:
        # Copies, since the function may write into its arguments.
        points = x.clone(memory_format=torch.contiguous_format)
        beside = tuple(t.clone() for t in context) if context else ()
        return driver.ask(function, points, beside, seed=seed, whole=whole)

    return work() if isinstance(call.parts.memory, InternalState) else driver.run(work)


def _ask_from_internal_state(
    call: ForwardInputs, memory: InternalState, seed: int | None
) -> tuple[Tensor, StatesByStart]:
    """A box that keeps its own state is asked about all rows in one request."""
    most, rows = call.parts.driver.max_rows, call.x.shape[0]
    if most is not None and most < rows:
        raise BoxError(
            f"a box that keeps its own state is called with all rows of a batch, but max_rows={most} and there are "
            f"{rows}: give it smaller batches, or structure=Sequence() and rows as time steps"
        )
    before = memory.before(rows, call.training, call.x.device)
    try:
        return _ask(call, call.parts.function, call.x, call.context, seed), ((0, before),)
    except BaseException:
        memory.restore(before)
        raise


def _ask_from_explicit_state(
    call: ForwardInputs, memory: ExplicitState, seed: int | None
) -> tuple[Tensor, StatesByStart]:
    """A box that is given its state is asked in pieces, so that evaluations for a gradient can start in the middle."""
    x, d, structure = call.x, call.parts.in_features, call.parts.structure
    rows, time = x.shape[0], x.shape[1] // d
    before = memory.before(rows, call.training, x.device)
    starts = [0]
    # Not with a context, which would have to be cut or not, nor where all evaluations start at the beginning.
    if call.graded and isinstance(structure, Sequence) and not call.context and not call.parts.estimator.together:
        starts = structure.starts(time)
    answers, states = [], []
    recorder = StateRecorder(call.parts.function)
    for start, stop in zip(starts, [*starts[1:], time], strict=True):
        states.append((start, before))
        y = _ask(call, recorder, x[:, start * d : stop * d], (*call.context, *before), seed)
        answers.append(y.clone())  # a box may answer in the same memory each time
        before = recorder.take(rows)
    memory.advance(before, call.training)
    return torch.cat(answers, 1), tuple(states)
