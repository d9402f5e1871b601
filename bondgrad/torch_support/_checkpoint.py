"""Activation checkpointing runs a forward pass again in the backward pass. The box is not called again for that."""

import itertools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from bondgrad.errors import BoxError

T = TypeVar("T")
MOST_ANSWERS = 256  # kept: more are forward passes whose backward pass never came


def in_backward() -> bool:
    """Whether a backward pass is under way in this thread."""
    return torch._C._current_graph_task_id() != -1


def in_checkpoint() -> bool:
    """Whether this is a forward pass that `torch.utils.checkpoint`, of either kind, will run again, or does."""
    if torch.is_inference_mode_enabled():
        return False
    graded = torch.is_grad_enabled()
    frame: Any = sys._getframe(1)
    while frame is not None:
        inside = frame.f_globals.get("__name__") == "torch.utils.checkpoint"
        # Without gradients only the first run of the reentrant kind is run again. Its function is called `forward`.
        if inside and (graded or frame.f_code.co_name == "forward"):
            return True
        frame = frame.f_back
    return False


class Answer(NamedTuple):
    """What one forward pass through the box gave, and for which rows and random numbers."""

    rows: tuple[Tensor, ...]  # x and the contexts
    value: Any  # what it gave
    before: list[Tensor]  # torch's random numbers before and after, which the box may draw from
    after: list[Tensor]


class Answers:
    """What forward passes inside checkpoints gave, until their gradient was computed. Copies start empty."""

    def __init__(self) -> None:
        self._kept: dict[int, Answer] = {}  # by their tickets
        self._tickets = itertools.count(1)

    def __reduce__(self) -> Any:  # noqa: ANN401
        return Answers, ()

    def __len__(self) -> int:
        return len(self._kept)

    def answer(self, rows: tuple[Tensor, ...], ordered: bool, graded: bool, ask: Callable[[bool], T]) -> tuple[T, int]:
        """What a forward pass inside a checkpoint gives: the box's answer, or, when it runs again, the one kept.

        Args:
            rows: x and the contexts.
            ordered: Whether the box remembers, so that the order of its answers matters.
            graded: Whether this very run may be asked for a gradient.
            ask: Asks the box; its argument says whether a layer in training is to learn from the step.

        Returns:
            What `ask` gave, and a ticket for `forget`; 0: nothing was kept.
        """
        with _disable_current_modes():  # selective checkpointing would take what the box does for the network's work
            if in_backward():
                ticket = self._find(rows, ordered)
                value = self._kept[ticket].value if ticket else ask(False)
                if not graded and torch.is_grad_enabled():  # no gradient is to come
                    self.forget(ticket)
                return value, ticket
            before = random_states(rows[0].device)
            # Gradients are off in the first run of the reentrant kind, too.
            value = ask(graded or not torch.is_grad_enabled())
            after, ticket = random_states(rows[0].device), next(self._tickets)
            self._kept[ticket] = Answer(tuple(t.clone() for t in rows), value, before, after)
            if len(self._kept) > MOST_ANSWERS:
                self.forget(next(iter(self._kept)))
            return value, ticket

    def _find(self, rows: tuple[Tensor, ...], ordered: bool) -> int:
        """The ticket of an answer to these rows, bit for bit the same ones. Random numbers are then as it left them.

        Of several, the latest that found the random numbers as they are now: a box may draw from them. Of a box that
        remembers (`ordered`) which answer came when matters, and cannot be told: then it is refused.
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
        return matching[-1] if matching else 0  # of a checkpoint that does not restore random numbers

    def clear(self) -> None:
        """Remove all answers: no forward pass so far will be run again."""
        self._kept.clear()

    def forget(self, ticket: int) -> None:
        """Remove an answer, since its gradient was computed, or never will be."""
        self._kept.pop(ticket, None)


def _same(rows: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> bool:
    """Whether these are the same numbers, in tensors of the same kinds. NaN is the same as NaN."""
    if [(t.shape, t.dtype, t.device) for t in rows] != [(t.shape, t.dtype, t.device) for t in others]:
        return False
    return all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in zip(rows, others, strict=True))


def random_states(device: torch.device) -> list[Tensor]:
    """The states of torch's own random numbers, on the CPU and on this device."""
    return [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])


def set_random_states(device: torch.device, states: list[Tensor]) -> None:
    """Bring back what `random_states` returned."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
