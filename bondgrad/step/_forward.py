"""The forward pass: the box at the rows of a batch, what it remembers, and what the other processes say."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from bondgrad.calling import _arguments as arguments
from bondgrad.calling._memory import Carried, Recorder, Snapshots
from bondgrad.errors import BoxError
from bondgrad.structure import Sequence
from bondgrad.torch_support._checkpoint import in_backward, in_checkpoint, random_states, unseen
from bondgrad.torch_support._device import is_capturing
from bondgrad.torch_support._precision import arithmetic
from bondgrad.torch_support._ranks import ALONE, Part

if TYPE_CHECKING:
    from bondgrad.box import BlackBox


# What a box remembered before the first time step of its sequences, and before later ones: (time step, memory).
Recall = tuple[tuple[int, Any], ...]
NOTHING: Recall = ()
SEEDS_APART = 1_000_003  # a prime, lest layers with seeds in a row give out the same ones


class Pass(NamedTuple):
    """What a backward pass must know of its forward pass. As it is here: nothing special."""

    part: Part = ALONE  # where x stands in a joint batch
    recall: Recall = NOTHING
    ticket: int = 0  # of an answer kept for activation checkpointing; 0: none


def evaluate(
    layer: "BlackBox", x: Tensor, context: tuple[Tensor, ...], autocast: torch.dtype | None, *, graded: bool
) -> tuple[Tensor, Pass]:
    """The box at x [B, d] itself, [B, d_out] in memory of its own.

    Inside an activation checkpoint the answer is kept, and given when the forward pass is run again. Its ticket is for
    forgetting it, once x has its gradient.
    """
    if is_capturing(x.device) or not in_checkpoint():
        return _ask(layer, x, context, autocast, graded, graded and layer.training and not in_backward())
    with unseen():
        if in_backward():
            known = layer._answers.find((x, *context), ordered=layer.memory is not None)
            if known is None:
                return _ask(layer, x, context, autocast, graded, learns=False)
            if not graded and torch.is_grad_enabled():  # no gradient is to come
                layer._answers.forget(known.ticket)
            y, forward = known.value
            return y.clone(), forward._replace(ticket=known.ticket)
        before = random_states(x.device)
        # Gradients are off in the first run of the reentrant kind, too.
        learns = layer.training and (graded or not torch.is_grad_enabled())
        y, forward = _ask(layer, x, context, autocast, graded, learns)
        return y, forward._replace(ticket=layer._answers.keep((x, *context), (y.clone(), forward), before))


def _ask(
    layer: "BlackBox",
    x: Tensor,
    context: tuple[Tensor, ...],
    autocast: torch.dtype | None,
    graded: bool,
    learns: bool,
) -> tuple[Tensor, Pass]:
    """See `evaluate`: the box is called, and the other processes are asked."""
    home = layer._function.home(x.device)
    rows = (x, *context) if home == x.device else tuple(t.to(home) for t in (x, *context))
    new_seed(layer)
    with arithmetic(layer.full_precision, home, autocast):
        inside = arguments.inside(layer.limits, rows[0])
        if layer.memory is None:
            y, recall = _call(layer, layer._function, inside, rows[1:]), NOTHING
        else:
            y, recall = _call_with_memory(layer, inside, rows[1:], graded)
        y = y.to(x.device, copy=True)
    policy_state = layer.policy_state
    group = policy_state.ranks.current() if learns else None
    if group is None:
        # A forward pass that is run again takes part in nothing: the processes must not learn apart.
        return y, Pass(policy_state.ranks.unlearnt() if in_backward() else ALONE, recall)
    state = policy_state.read(x.device)
    at = arguments.inside(layer.limits, x).reshape(-1, layer.in_features)
    part, new_state = policy_state.ranks.exchange(group, layer.policy, layer.estimator, state, at)
    policy_state.write(new_state)
    return y, Pass(part, recall)


def new_seed(layer: "BlackBox") -> None:
    """For the next calls of a box that takes one. In eval mode it is always the same."""
    if layer._function.seed_position is not None:
        schedule, seed = layer.policy_state.schedule, layer.policy_state.random.seed
        schedule.seeds += layer.training
        layer._function.seed = (seed + SEEDS_APART * schedule.seeds) % 2**31


def _call(layer: "BlackBox", function: Callable[..., Tensor], x: Tensor, rows: tuple[Tensor, ...]) -> Tensor:
    """The box at x [B, d]."""
    with layer._function.learning():
        return layer.evaluator.run(
            # Copies, since the function may write into its arguments.
            lambda: layer.evaluator.answers(
                function, x.clone(memory_format=torch.contiguous_format), tuple(t.clone() for t in rows)
            )
        )


def _call_with_memory(layer: "BlackBox", x: Tensor, context: tuple[Tensor, ...], graded: bool) -> tuple[Tensor, Recall]:
    """The box at x, from what it remembers on; and what it remembered."""
    memory, function = layer.memory, layer._function
    if in_backward():
        raise BoxError("a box with memory cannot be called again in a backward pass: it has moved on since")
    assert memory is not None
    before = memory.before(x.shape[0], layer.training, x.device)
    if isinstance(memory, Snapshots):
        most = getattr(layer.evaluator, "max_rows", None)
        if most is not None and most < x.shape[0]:
            raise BoxError(
                f"a box that keeps its own state is called with all rows of a batch, but max_rows={most} and there are "
                f"{x.shape[0]}: give it smaller batches, or structure=Sequence() and rows as time steps"
            )
        try:
            with function.learning():
                return function(x.clone(), *(c.clone() for c in context)), ((0, before),)
        except BaseException:
            memory.restore(before)
            raise
    assert isinstance(memory, Carried)
    d, structure = layer.in_features, layer.structure
    starts = [0]
    # Not with a context, which would have to be cut or not, nor where all evaluations start at the beginning.
    if graded and isinstance(structure, Sequence) and not context and not layer.estimator.together:
        starts = structure.starts(x.shape[1] // d)
    answers, recall = [], []
    recorder = Recorder(function)
    for start, stop in zip(starts, [*starts[1:], x.shape[1] // d], strict=True):
        recall.append((start, before))
        y = _call(layer, recorder, x[:, start * d : stop * d], (*context, *before))
        answers.append(y.clone() if len(starts) > 1 else y)  # a box may answer in the same memory each time
        before = recorder.take(x.shape[0])
    memory.advance(before, layer.training)
    return answers[0] if len(answers) == 1 else torch.cat(answers, 1), tuple(recall)
