"""Activation checkpointing: when a forward pass is repeated in the backward pass, the box is not called again."""

import itertools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from bondgrad.errors import BoxError

T = TypeVar("T")
MOST_ANSWERS = 256  # that are kept; older ones belong to forward passes without a backward pass


def in_backward() -> bool:
    """Whether a backward pass is running in this thread."""
    return torch._C._current_graph_task_id() != -1


def in_checkpoint() -> bool:
    """Whether `torch.utils.checkpoint`, reentrant or not, will repeat this forward pass or is repeating it."""
    if torch.is_inference_mode_enabled():
        return False
    graded = torch.is_grad_enabled()
    frame: Any = sys._getframe(1)
    while frame is not None:
        inside = frame.f_globals.get("__name__") == "torch.utils.checkpoint"
        # Without gradients only the first run of the reentrant kind is repeated: `CheckpointFunction.forward`.
        if inside and (graded or frame.f_code.co_name == "forward"):
            return True
        frame = frame.f_back
    return False


class Answer(NamedTuple):
    """The result of one forward pass through the box, with its rows and the states of torch's random numbers."""

    rows: tuple[Tensor, ...]  # x and the contexts
    value: Any  # the result
    before: list[Tensor]  # `random_states` before the box was called, which may draw from them
    after: list[Tensor]  # `random_states` after that


class Answers:
    """Results of forward passes inside checkpoints, kept until their gradient is computed. Copies start empty."""

    def __init__(self) -> None:
        self._kept: dict[int, Answer] = {}  # by ticket
        self._tickets = itertools.count(1)

    def __reduce__(self) -> Any:  # noqa: ANN401
        return Answers, ()

    def __len__(self) -> int:
        return len(self._kept)

    def answer(self, rows: tuple[Tensor, ...], ordered: bool, graded: bool, ask: Callable[[bool], T]) -> tuple[T, int]:
        """The result of a forward pass inside a checkpoint: of a call of the box, or the kept one when it is repeated.

        Args:
            rows: x and the contexts.
            ordered: Whether the box has a memory, so that the order of its calls matters.
            graded: Whether a gradient of this run may be computed.
            ask: Calls the box; its argument says whether a layer in training learns from the step.

        Returns:
            The result of `ask`, and a ticket for `forget`; 0: nothing was kept.
        """
        with _disable_current_modes():  # selective checkpointing would record the operations of the box
            if in_backward():
                ticket = self._find(rows, ordered)
                value = self._kept[ticket].value if ticket else ask(False)
                if not graded and torch.is_grad_enabled():  # there will be no gradient
                    self.forget(ticket)
                return value, ticket
            before = random_states(rows[0].device)
            # The first run of the reentrant kind is without gradients, although one is computed later.
            value = ask(graded or not torch.is_grad_enabled())
            after, ticket = random_states(rows[0].device), next(self._tickets)
            self._kept[ticket] = Answer(tuple(t.clone() for t in rows), value, before, after)
            if len(self._kept) > MOST_ANSWERS:
                self.forget(next(iter(self._kept)))
            return value, ticket

    def _find(self, rows: tuple[Tensor, ...], ordered: bool) -> int:
        """The ticket of an answer for bitwise the same rows; 0: there is none.

        Among several, it is the latest whose random states before the call are those of now, since a box may draw from
        them; they are then set to those after the call. For a box with memory (`ordered`) several answers are an error,
        since the states they belong to cannot be told apart.
        """
        matching = [ticket for ticket, answer in self._kept.items() if _same(rows, answer.rows)]
        if ordered and len(matching) > 1:
            for ticket in matching:
                self.forget(ticket)
            raise BoxError(
                "a box with memory was called on the same rows more than once inside activation checkpoints (perhaps "
                "in a step without a backward pass), which cannot be told apart when they run again: leave the box "
                "outside of them"
            )
        now = random_states(rows[0].device)
        for ticket in matching[::-1]:
            if all(map(torch.equal, now, self._kept[ticket].before)):
                set_random_states(rows[0].device, self._kept[ticket].after)
                return ticket
        return matching[-1] if matching else 0  # the checkpoint does not restore random numbers

    def clear(self) -> None:
        """Remove all answers, where no forward pass so far will be repeated."""
        self._kept.clear()

    def forget(self, ticket: int) -> None:
        """Remove an answer whose gradient was computed, or will not be."""
        self._kept.pop(ticket, None)


def _same(rows: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> bool:
    """Whether shapes, dtypes, devices and values are equal, where NaN equals NaN."""
    if [(t.shape, t.dtype, t.device) for t in rows] != [(t.shape, t.dtype, t.device) for t in others]:
        return False
    return all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in zip(rows, others, strict=True))


def random_states(device: torch.device) -> list[Tensor]:
    """The states of torch's global generators, on the CPU and on this device if it is another."""
    return [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])


def set_random_states(device: torch.device, states: list[Tensor]) -> None:
    """Set the states that `random_states` returned."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
