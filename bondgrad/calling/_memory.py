"""Boxes with memory: the state that they carry from one call to the next.

There are two streams of states, one for training and one for evaluation, so that evaluating a test set does not change
the state of training. Only forward passes advance a stream. Perturbed evaluations start from the state before their
forward pass.
"""

import contextlib
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from bondgrad.calling._function import RowFunction, snapshot_owner, state_tensor
from bondgrad.calling._per_row import PerRow
from bondgrad.errors import BoxError, RowsFailed, is_mistake

Leaves = tuple[Tensor, ...]  # the tensors of a state, [N, ...] each


class ExplicitState(nn.Module):
    """A state of tensors that the box takes and returns: fn(x, state) -> (y, state).

    Args:
        initial: A tensor, or tuples, lists and dictionaries of them; [N, ...] each, or [1, ...] for any number of rows.
    """

    def __init__(self, initial: Any) -> None:  # noqa: ANN401
        super().__init__()
        self.form = tree_map(type, initial)  # the nesting of tuples, lists and dictionaries
        try:
            self.initial: Leaves = tuple(state_tensor(leaf).detach().clone() for leaf in tree_leaves(initial))
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"state must be made of tensors or arrays, got {initial!r}") from error
        if not self.initial or any(leaf.ndim == 0 for leaf in self.initial):
            raise ValueError(
                "state must be tensors with one entry per row first, [N, ...], or [1, ...] for any number of rows, got "
                f"{[list(leaf.shape) for leaf in self.initial]}"
            )
        self._now: dict[bool, Leaves | None] = {True: None, False: None}  # by `training`; None: as `initial`
        self._fresh: set[bool] = set()  # streams that were reset, and have not advanced since

    def before(self, rows: int, training: bool, device: torch.device) -> Leaves:
        """A copy of the state before a forward pass with that number of rows."""
        now = self._now[training]
        advice = "its batches must be of one size (drop_last=True), or box.reset() called where a new stream begins"
        if now is None or (training in self._fresh and len(now[0]) != rows):  # a new stream: any number of rows
            now, advice = self._initial_state(rows, device), "state must be for that many rows, or for one"
        for leaf in now:
            if len(leaf) != rows:
                raise BoxError(f"this box remembers {len(leaf)} rows, but was given {rows}: {advice}")
        return tuple(leaf.to(device, copy=True) for leaf in now)

    def _initial_state(self, rows: int, device: torch.device) -> Leaves:
        """The initial state; expanded to that number of rows, if it is given for one."""
        return tuple(leaf.to(device).expand(rows if len(leaf) == 1 else -1, *leaf.shape[1:]) for leaf in self.initial)

    def advance(self, after: Leaves, training: bool) -> None:
        """Keep the state after a forward pass, in place where possible: captured graphs use the same memory."""
        if not _overwritten(self._now[training], after):
            self._now[training] = _copied(after)
        self.went_on(training)

    def went_on(self, training: bool) -> None:
        """Note that a stream has advanced. Called after the replay of a graph too, which changes tensors only."""
        self._fresh.discard(training)

    def reset(self, training: bool) -> None:
        """Set a stream to the initial state, in place where possible."""
        now = self._now[training]
        if now is not None and not _overwritten(now, self._initial_state(len(now[0]), now[0].device)):
            self._now[training] = None
        self._fresh.add(training)

    def switch(self, training: bool) -> None:
        """Change to another stream. The one for evaluation starts from the initial state each time."""
        if not training:
            self.reset(False)

    def get_extra_state(self) -> dict[str, Leaves | None]:
        """What `state_dict` saves."""
        train, evaluation = (None if mode in self._fresh else _copied(self._now[mode]) for mode in (True, False))
        return {"train": train, "eval": evaluation}

    def set_extra_state(self, state: dict[str, Leaves | None]) -> None:
        """Load what `get_extra_state` returned."""
        for leaves in state.values():
            if leaves is not None and len(leaves) != len(self.initial):
                raise ValueError(f"a state of {len(leaves)} tensors does not fit a box with {len(self.initial)}")
        for mode, leaves in ((True, state["train"]), (False, state["eval"])):
            self.reset(mode)
            if leaves is not None:
                self.advance(leaves, mode)

    def places(self, training: bool) -> tuple[int, ...] | None:
        """The addresses of the tensors of the state, for captured graphs; None: there are no tensors yet."""
        now = self._now[training]
        return None if now is None else tuple(leaf.data_ptr() for leaf in now)


class InternalState(nn.Module):
    """The state of a box that keeps it inside: fn.snapshot() returns it, fn.restore(snapshot) sets it.

    Such a box is always called with all rows of a batch, since its state may belong to those rows. A snapshot is
    restored many times, so the box must not change it.
    """

    def __init__(self, fn: Any, training: bool) -> None:  # noqa: ANN401
        super().__init__()
        self._box = (fn,)  # in a tuple, so that a box that is a module does not become a submodule
        self.initial = fn.snapshot()
        self._training, self._other = training, None  # the stream that is in the box, and the last state of the other

    def before(self, _rows: int, training: bool, _device: torch.device) -> Any:  # noqa: ANN401
        """A snapshot of the state before a forward pass."""
        self.switch(training)
        return self._box[0].snapshot()

    def restore(self, before: Any) -> None:  # noqa: ANN401
        """Set the state of the box to an earlier snapshot."""
        self._box[0].restore(before)

    def reset(self, training: bool) -> None:
        """Switch to a stream, and set it to the initial state."""
        self.switch(training)
        self.restore(self.initial)

    def switch(self, training: bool) -> None:
        """Change to another stream. The one for evaluation starts from the initial state each time."""
        if training == self._training:
            return
        now = self._box[0].snapshot()
        self.restore(self._other if training and self._other is not None else self.initial)
        self._training, self._other = training, now

    def from_snapshot(self, before: Any, function: Callable[..., Tensor]) -> Callable[..., Tensor]:  # noqa: ANN401
        """The function, with the state of the box set to the snapshot `before` ahead of every call."""

        def from_before(points: Tensor, *rows: Tensor, seed: int | None = None) -> Tensor:
            self.restore(before)
            return function(points, *rows, seed=seed)

        return from_before

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """A context after which the state of the box is what it was before."""
        before = self._box[0].snapshot()
        try:
            yield
        finally:
            self.restore(before)

    def get_extra_state(self) -> dict[str, Any]:
        """What `state_dict` saves."""
        return {"now": self._box[0].snapshot(), "other": self._other, "training": self._training}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Load what `get_extra_state` returned."""
        # The mode of a module is not saved: if it is another one now, the two streams are swapped.
        same = state["training"] == self._training
        self._other = state["other" if same else "now"]
        now = state["now" if same else "other"]
        self.restore(self.initial if now is None else now)


Memory = ExplicitState | InternalState

# Layers of the same box share its `InternalState`, by the id of the box.
_shared: "weakref.WeakValueDictionary[int, InternalState]" = weakref.WeakValueDictionary()


def find_memory(fn: Callable[..., Any], state: object, training: bool) -> Memory | None:
    """The memory of a box: internal if fn has `snapshot`, explicit if `state` is given; None if it has none."""
    owner = snapshot_owner(fn)
    if state is not None and isinstance(fn, PerRow):
        raise ValueError(
            "state must be None with per_row, whose function is given one sample at a time: write a function of rows, "
            "fn(x [N, d], state [N, ...]) -> (y, state)"
        )
    if owner is None:
        return None if state is None else ExplicitState(state)
    if state is not None:
        raise ValueError("fn has snapshot() and restore(), so it keeps its own state: leave out state")
    memory = _shared.get(id(owner))  # ids are not reused meanwhile: the memory keeps its owner alive
    if memory is None:
        memory = _shared[id(owner)] = InternalState(owner, training)
    return memory


DIVISION = 8  # a call that raised is divided into so many
TRIED_ROWS = 8  # that are called alone in vain before a call is given up that brought no output at all


class StateRecorder:
    """Calls a function with a state and returns its outputs only; the states after the calls are recorded.

    Rows have states of their own: a call that raises an error is divided until the rows at fault are found. These keep
    the state before the call, and `RowsFailed` names them.

    Args:
        function: The box.
        most: The most rows in one call of it; None: any number.
        readings: How many readings are taken of all rows, each in a call of this object.
        count_again: Is given the number of rows before they are evaluated again, in a part of a call that raised.
    """

    def __init__(
        self,
        function: RowFunction,
        most: Callable[[], int | None] = lambda: None,
        readings: int = 1,
        count_again: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.function, self.most, self.readings, self.count_again = function, most, readings, count_again
        self._after: list[Leaves] = []
        self._finite: list[Tensor] = []  # [N] whose outputs were finite; only if there are several readings

    def __call__(self, points: Tensor, *rows: Tensor, seed: int | None = None) -> Tensor:
        """See `RowFunction.__call__`."""
        everything, n = (points, *rows), len(points)
        size = self.most() or n
        answers: list[tuple[slice, Tensor, Leaves]] = []  # with their rows
        errors: dict[int, BoxError] = {}
        waiting = deque(range(first, min(first + size, n)) for first in range(0, n, size))
        asked = 0  # rows so far: parts of calls that raised come after all rows were asked once
        while waiting:
            rows_now = waiting.popleft()
            if asked >= n:
                self.count_again(len(rows_now))
            asked += len(rows_now)
            some = slice(rows_now.start, rows_now.stop, rows_now.step)
            # Copies, since a box may write into its arguments, and return the same tensors each time.
            try:
                y, after = self.function.advance(*(t[some].clone() for t in everything), seed=seed)
            except BoxError as error:
                if len(rows_now) == 1:
                    errors[rows_now.start] = error
                else:  # each part has rows from everywhere, so that the first few rows alone are, too
                    waiting += [rows_now[first::DIVISION] for first in range(min(DIVISION, len(rows_now)))]
                if is_mistake(error) or (size > 1 and not answers and len(errors) == TRIED_ROWS):
                    raise
            else:
                answers.append((some, y if len(y) == n else y.clone(), tuple(leaf.clone() for leaf in after)))
        return self._joined(everything, answers, errors)

    def _joined(
        self, given: Leaves, answers: list[tuple[slice, Tensor, Leaves]], errors: dict[int, BoxError]
    ) -> Tensor:
        """The outputs [N, d_out] of all calls. Raises `RowsFailed` if there are errors."""
        if not answers:
            raise RowsFailed(None, errors)
        _, y, after = answers[0]
        n = len(given[0])
        if len(y) < n:
            before = given[len(given) - len(after) :]
            y = y.new_full((n, y.shape[1]), math.nan)
            after = tuple(leaf.new_empty((n, *leaf.shape[1:])) for leaf in after)
            for some, outputs, states in answers:
                y[some] = outputs
                for leaf, state in zip(after, states, strict=True):
                    leaf[some] = state
            for row in errors:
                for leaf, old in zip(after, before, strict=True):
                    leaf[row] = old[row]
        self._after.append(after)
        if self.readings > 1:
            self._finite.append(torch.isfinite(y).all(1))
        if errors:
            raise RowsFailed(y, errors)
        return y

    def take(self, rows: int) -> Leaves:
        """The state of the last `rows` rows that were evaluated. Earlier calls may have been attempts that failed.

        Of several readings, a row has the state after the last one that brought a finite output; after the last of all,
        if none did.
        """
        (after, finite), self._after, self._finite = (self._after, self._finite), [], []
        if len(after) == 1:
            return after[0]
        if not finite:
            return tuple(torch.cat(leaves)[-rows:] for leaves in zip(*after, strict=True))
        states = [torch.stack(leaves) for leaves in zip(*after, strict=True)]  # [calls, rows, ...] each
        came = torch.stack(finite)  # [calls, rows]
        order = torch.arange(1, 1 + len(came), device=came.device)[:, None]
        last = torch.where(came.any(0), (came * order).argmax(0), len(came) - 1)  # [rows]
        return tuple(leaf[last, torch.arange(rows, device=last.device)] for leaf in states)


def _copied(leaves: Leaves | None) -> Leaves | None:
    return None if leaves is None else tuple(leaf.clone() for leaf in leaves)


def _overwritten(old: Leaves | None, new: Leaves) -> bool:
    """Copy the new state into the tensors of the old one, if shapes and dtypes agree. Returns whether they do."""
    if old is None or list(map(_kind, old)) != list(map(_kind, new)):
        return False
    torch._foreach_copy_(old, new)
    return True


def _kind(t: Tensor) -> tuple[torch.Size, torch.dtype, torch.device, bool]:
    """What two tensors must have in common, for one to be copied into the other in place."""
    return t.shape, t.dtype, t.device, t.is_inference() and not torch.is_inference_mode_enabled()
