"""The forward pass: the box at the rows of a batch, from what it remembers on."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from bondgrad.calling._inputs import seen_to_be_finite
from bondgrad.calling._memory import ExplicitState, InternalState, StateRecorder
from bondgrad.errors import BoxError
from bondgrad.evaluators import Outcome
from bondgrad.step._ahead import Ahead, ask_ahead
from bondgrad.step._records import Parts, StatesByStart
from bondgrad.structure import Sequence
from bondgrad.torch_support import _device as device
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
    # Takes in which rows [B] of x got finite outputs (None: all), and raises an error where a failure is one.
    take_in: Callable[[Tensor, Tensor | None], None]
    # Plans the evaluations of the gradient at x and context on the device of the box; None: not yet, or not at all.
    plan: Callable[[Tensor, tuple[Tensor, ...]], Ahead | None] | None = None


class ForwardAnswer(NamedTuple):
    """What the box answered in a forward pass."""

    y: Tensor  # [B, d_out] the outputs
    ok: Tensor | None = None  # [B] which rows are finite; None: all, or not known, on an accelerator
    states: StatesByStart = ()  # from which a box with memory started
    ahead: Ahead | None = None  # evaluations of the gradient that were made, or begun


def evaluate(call: ForwardInputs) -> ForwardAnswer:
    """The answer of the box at x, in new memory on the device of x."""
    parts, function, x = call.parts, call.parts.function, call.x
    where = function.compute_device(x.device)
    rows = (x, *call.context) if where == x.device else tuple(t.to(where) for t in (x, *call.context))
    if where != x.device or parts.limits is not None:
        call = call._replace(x=rows[0] if parts.limits is None else parts.limits.clamped(rows[0]), context=rows[1:])
    known = function.out_features, function.interfaces
    try:
        with arithmetic(parts.full_precision, where, call.autocast):
            y, ok, states, ahead = _answer(call)
            return ForwardAnswer(y.to(x.device, copy=True), ok, states, ahead)
    except BaseException:
        function.out_features, function.interfaces = known  # a call that fails teaches nothing about the function
        raise


def _answer(call: ForwardInputs) -> ForwardAnswer:
    """The answer of the box at rows on its own device."""
    memory = call.parts.memory
    seed = None if call.parts.next_seed is None else call.parts.next_seed()
    if memory is not None and in_backward():
        raise BoxError(
            "a box with memory cannot be called again in a backward pass, since it has moved on: go backward once "
            "for each forward pass, and use no activation checkpoints but torch.utils.checkpoint"
        )
    if isinstance(memory, InternalState):
        return _ask_from_internal_state(call, memory, seed)
    if isinstance(memory, ExplicitState):
        return _ask_from_explicit_state(call, memory, seed)
    ahead = None if call.plan is None else call.plan(call.x, call.context)
    if ahead is None:
        y, ok = _ask(call, call.parts.function, call.x, call.context, seed)
    else:
        y, ok = ask_ahead(ahead, call.parts, call.x, call.context, call.autocast)
    _take_in(call, ok)
    return ForwardAnswer(y, ok, ahead=ahead)


def _take_in(call: ForwardInputs, ok: Tensor | None) -> None:
    """Say which rows [B] got outputs, before anything is kept of the pass. On an accelerator nothing is read."""
    if device.reading_is_free(call.x.device):
        call.take_in(call.x, ok)


def _ask(
    call: ForwardInputs, function: Callable[..., Tensor], x: Tensor, context: tuple[Tensor, ...], seed: int | None
) -> Outcome:
    """The outputs of the box at x [B, d]."""
    driver = call.parts.driver
    whole = call.parts.memory is not None  # the states after the calls are put together in the order of the rows

    def work() -> Outcome:
        return driver.ask(function, x.contiguous(), context, seed=seed, whole=whole)

    return work() if isinstance(call.parts.memory, InternalState) else driver.run(work)


def _ask_from_internal_state(call: ForwardInputs, memory: InternalState, seed: int | None) -> ForwardAnswer:
    """A box that keeps its own state is asked about all rows in one request."""
    most, rows = call.parts.driver.max_rows, call.x.shape[0]
    if most is not None and most < rows:
        raise BoxError(
            f"a box that keeps its own state is called with all rows of a batch, but max_rows={most} and there are "
            f"{rows}: give it smaller batches, or structure=Sequence() and rows as time steps"
        )
    before = memory.before(rows, call.training, call.x.device)
    function = memory.from_snapshot(before, call.parts.function)  # a call that failed may be made again
    answered = False
    try:
        y, ok = _ask(call, function, call.x, call.context, seed)
        _take_in(call, ok)
        answered = ok is None or bool(ok.any())
        return ForwardAnswer(y, ok, ((0, before),))
    finally:
        if not answered:  # what the box remembers of a pass that failed is worth nothing
            memory.restore(before)


def _ask_from_explicit_state(call: ForwardInputs, memory: ExplicitState, seed: int | None) -> ForwardAnswer:
    """A box that is given its state is asked in pieces, so that evaluations for a gradient can start in the middle."""
    x, d, structure = call.x, call.parts.in_features, call.parts.structure
    rows, time = x.shape[0], x.shape[1] // d
    before = memory.before(rows, call.training, x.device)
    sent = _finite_rows(call)
    starts = [0]
    # Not with a context, which would have to be cut or not, nor where all evaluations start at the beginning.
    if call.graded and isinstance(structure, Sequence) and not call.context and not call.parts.estimator.together:
        starts = structure.starts(time)
    answers, states, ok = [], [], None
    driver = call.parts.driver
    recorder = StateRecorder(call.parts.function, lambda: driver.max_rows, driver.repeats, driver.count_again)
    for start, stop in zip(starts, [*starts[1:], time], strict=True):
        states.append((start, before))
        given = (x[:, start * d : stop * d], *call.context, *before)
        piece, *beside = given if sent is None else (t[sent] for t in given)
        y, finite = _ask(call, recorder, piece, tuple(beside), seed)
        after = recorder.take(len(piece))
        if sent is not None:
            y, finite, after = _among_all(sent, y, finite, after, before)
        answers.append(y.clone())  # a box may answer in the same memory each time
        ok = finite if ok is None else ok if finite is None else ok & finite
        before = _kept_where(finite, after, before)
    _take_in(call, ok)
    memory.advance(before, call.training)
    return ForwardAnswer(torch.cat(answers, 1), ok, tuple(states))


def _finite_rows(call: ForwardInputs) -> Tensor | None:
    """The numbers of the rows of x that are finite, where others are not sent to a box with limits; None: all are."""
    if call.parts.limits is None or not device.reading_is_free(call.x.device) or seen_to_be_finite(call.x):
        return None
    sent = torch.isfinite(call.x).all(1).nonzero().squeeze(1)
    return sent if 0 < len(sent) < len(call.x) else None  # what becomes of none at all is the same with every box


def _among_all(
    sent: Tensor, y: Tensor, ok: Tensor | None, after: tuple[Tensor, ...], before: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Outputs and states of the rows `sent`, put among all rows, of which the others are as `before`."""
    rows = len(before[0])
    outputs, answered = y.new_full((rows, y.shape[1]), math.nan), torch.zeros(rows, dtype=torch.bool)
    outputs[sent] = y
    answered[sent] = True if ok is None else ok
    states = zip(before, after, strict=True)
    return outputs, answered, tuple(old.index_copy(0, sent, new.to(old.dtype)) for old, new in states)


def _kept_where(ok: Tensor | None, after: tuple[Tensor, ...], before: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The states [B, ...] after a call, but those before it for rows where neither the output nor the state is finite.

    Otherwise a row that failed once could never recover. ok [B] tells which outputs are finite; None: all of them.
    """
    if ok is None:
        return after
    sound = ok.to(after[0].device) | torch.stack(
        [torch.isfinite(leaf).view(len(leaf), -1).all(1) for leaf in after]
    ).all(0)
    return tuple(
        torch.where(sound.view(-1, *[1] * (new.ndim - 1)), new, old) for new, old in zip(after, before, strict=True)
    )
