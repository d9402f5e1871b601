"""Boxes that remember: what they carry from one call to the next.

There are two streams, one for training and one for evaluation, so that looking at a test set does not disturb training.
Only forward passes move a stream on. Perturbed evaluations start from what was remembered before their forward pass.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from bondgrad.calling._function import RowFunction, snapshot_owner, state_tensor
from bondgrad.errors import BoxError

Leaves = tuple[Tensor, ...]  # of a state, [N, ...] each


class ExplicitState(nn.Module):
    """A state of tensors that goes in and comes out: fn(x, state) -> (y, state).

    Args:
        initial: A tensor, or tuples, lists and dictionaries of them; [N, ...] each, or [1, ...] for any number of rows.
    """

    def __init__(self, initial: Any) -> None:  # noqa: ANN401
        super().__init__()
        self.form = tree_map(type, initial)  # how a state is made of tensors
        try:
            self.initial: Leaves = tuple(state_tensor(leaf).detach().clone() for leaf in tree_leaves(initial))
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"state must be made of tensors or arrays, got {initial!r}") from error
        if not self.initial or any(leaf.ndim == 0 for leaf in self.initial):
            raise ValueError(
                "state must be tensors with one entry per row first, [N, ...], or [1, ...] for any number of rows, got "
                f"{[list(leaf.shape) for leaf in self.initial]}"
            )
        self._now: dict[bool, Leaves | None] = {True: None, False: None}
        self._fresh: set[bool] = set()  # streams that were reset, so that their tensors are those of `initial` again

    def before(self, rows: int, training: bool, device: torch.device) -> Leaves:
        """What the box remembers before a forward pass with so many rows, in memory of its own."""
        now = self._now[training]
        advice = "its batches must be of one size (drop_last=True), or box.reset() called where a new stream begins"
        if now is None or (training in self._fresh and len(now[0]) != rows):  # a new stream may have other rows
            now, advice = self._beginning(rows, device), "state must be for that many rows, or for one"
        for leaf in now:
            if len(leaf) != rows:
                raise BoxError(f"this box remembers {len(leaf)} rows, but was given {rows}: {advice}")
        return tuple(leaf.to(device, copy=True) for leaf in now)

    def _beginning(self, rows: int, device: torch.device) -> Leaves:
        """The initial state; for so many rows, if it is for any number of them."""
        return tuple(leaf.to(device).expand(rows if len(leaf) == 1 else -1, *leaf.shape[1:]) for leaf in self.initial)

    def advance(self, after: Leaves, training: bool) -> None:
        """Keep what the box remembers after a forward pass: in place where possible, as captured graphs require."""
        if not _overwritten(self._now[training], after):
            self._now[training] = _copied(after)
        self.went_on(training)

    def went_on(self, training: bool) -> None:
        """Note that a stream has left its beginning. Replays of a graph call this, since they change tensors only."""
        self._fresh.discard(training)

    def reset(self, training: bool) -> None:
        """Begin a stream anew. In place as well, where possible."""
        now = self._now[training]
        if now is not None and not _overwritten(now, self._beginning(len(now[0]), now[0].device)):
            self._now[training] = None
        self._fresh.add(training)

    def switch(self, training: bool) -> None:
        """Change to another stream. That for evaluation begins anew each time."""
        if not training:
            self.reset(False)

    def get_extra_state(self) -> dict[str, Leaves | None]:
        """For `state_dict`."""
        train, evaluation = (None if mode in self._fresh else _copied(self._now[mode]) for mode in (True, False))
        return {"train": train, "eval": evaluation}

    def set_extra_state(self, state: dict[str, Leaves | None]) -> None:
        """The counterpart of `get_extra_state`."""
        for leaves in state.values():
            if leaves is not None and len(leaves) != len(self.initial):
                raise ValueError(f"a state of {len(leaves)} tensors does not fit a box with {len(self.initial)}")
        for mode, leaves in ((True, state["train"]), (False, state["eval"])):
            self.reset(mode)
            if leaves is not None:
                self.advance(leaves, mode)

    def places(self, training: bool) -> tuple[int, ...] | None:
        """Where in memory the state lies that a captured graph works with; None: it has to be made first."""
        now = self._now[training]
        return None if now is None else tuple(leaf.data_ptr() for leaf in now)


class InternalState(nn.Module):
    """A box that keeps its state to itself: fn.snapshot() gives it away, fn.restore(snapshot) brings it back.

    Such a box is called with all rows of a batch and nothing else, since what it remembers may be about those rows. A
    snapshot is restored many times, so the box must leave it as it is.
    """

    def __init__(self, fn: Any, training: bool) -> None:  # noqa: ANN401
        super().__init__()
        self._box = (fn,)  # in a tuple: it is not a part of this module
        self.initial = fn.snapshot()
        self._training, self._other = training, None  # the stream that goes on, and what the other was left with

    def before(self, _rows: int, training: bool, _device: torch.device) -> Any:  # noqa: ANN401
        """What the box remembers before a forward pass, as something that stays as it is."""
        self.switch(training)
        return self._box[0].snapshot()

    def restore(self, before: Any) -> None:  # noqa: ANN401
        """Remember what was remembered then."""
        self._box[0].restore(before)

    def reset(self, training: bool) -> None:
        """Begin a stream anew."""
        self.switch(training)
        self.restore(self.initial)

    def switch(self, training: bool) -> None:
        """Change to another stream. That for evaluation begins anew each time."""
        if training == self._training:
            return
        now = self._box[0].snapshot()
        self.restore(self._other if training and self._other is not None else self.initial)
        self._training, self._other = training, now

    def from_snapshot(self, before: Any, function: Callable[..., Tensor]) -> Callable[..., Tensor]:  # noqa: ANN401
        """The function as it answers when the box remembers what it did then."""

        def from_before(points: Tensor, *rows: Tensor, seed: int | None = None) -> Tensor:
            self.restore(before)
            return function(points, *rows, seed=seed)

        return from_before

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Afterwards the box remembers what it did before, whatever was asked of it meanwhile."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.restore, self._box[0].snapshot())
            yield

    def get_extra_state(self) -> dict[str, Any]:
        """For `state_dict`."""
        return {"now": self._box[0].snapshot(), "other": self._other, "training": self._training}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """The counterpart of `get_extra_state`."""
        # The mode of a module is not a part of its state, so the streams change places if need be.
        same = state["training"] == self._training
        self._other = state["other" if same else "now"]
        now = state["now" if same else "other"]
        self.restore(self.initial if now is None else now)


Memory = ExplicitState | InternalState

# Layers around one and the same box share its memory.
_shared: "weakref.WeakValueDictionary[int, InternalState]" = weakref.WeakValueDictionary()


def find_memory(fn: Callable[..., Any], state: object, training: bool) -> Memory | None:
    """The kind that a box has, if any."""
    owner = snapshot_owner(fn)
    if owner is None:
        return None if state is None else ExplicitState(state)
    if state is not None:
        raise ValueError("fn has snapshot() and restore(), so it keeps its own state: leave out state")
    memory = _shared.get(id(owner))  # the owner of a memory lives at least as long, so this number is still its own
    if memory is None:
        memory = _shared[id(owner)] = InternalState(owner, training)
    return memory


class StateRecorder:
    """A function with memory, as one without that writes down what it remembers after each call."""

    def __init__(self, function: RowFunction) -> None:
        self.function = function
        self._after: list[Leaves] = []

    def __call__(self, points: Tensor, *rows: Tensor, seed: int | None = None) -> Tensor:
        """See `RowFunction.__call__`."""
        y, after = self.function.advance(points, *rows, seed=seed)
        self._after.append(tuple(leaf.clone() for leaf in after))  # a box may answer in the same memory each time
        return y

    def take(self, rows: int) -> Leaves:
        """What was remembered after the last calls, which had so many rows. Calls before may have been in vain."""
        after, self._after = self._after, []
        return after[0] if len(after) == 1 else tuple(torch.cat(leaves)[-rows:] for leaves in zip(*after, strict=True))


def _copied(leaves: Leaves | None) -> Leaves | None:
    return None if leaves is None else tuple(leaf.clone() for leaf in leaves)


def _overwritten(old: Leaves | None, new: Leaves) -> bool:
    """Write the new state into the memory of the old one, if both are of one kind. Returns whether they are."""
    if old is None or list(map(_kind, old)) != list(map(_kind, new)):
        return False
    torch._foreach_copy_(old, new)
    return True


def _kind(t: Tensor) -> tuple[torch.Size, torch.dtype, torch.device, bool]:
    """What must be alike in two tensors, for one to be written into the other."""
    return t.shape, t.dtype, t.device, t.is_inference() and not torch.is_inference_mode_enabled()
