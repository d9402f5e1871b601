"""The user's function, called with the arrays it understands, and its answer checked."""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from bondgrad.calling._modules import ModuleTensors
from bondgrad.calling._signature import Interface, find_interfaces, seed_position
from bondgrad.calling._state_form import StateForm, snapshot_owner, state_tensor
from bondgrad.errors import BoxError
from bondgrad.evaluators._driver import is_out_of_memory

CPU = torch.device("cpu")
COUNTING = threading.Lock()  # one for all functions: a lock of their own could not be copied with them
ANNOTATE = "If it expects numpy arrays, or tensors, annotate its first parameter so (x: np.ndarray, x: torch.Tensor)."


class RowFunction:
    """Calls fn on rows of tensors, whether it is written for torch or for numpy, and counts what that costs.

    An nn.Module takes tensors, and an annotation of the first parameter is believed. Otherwise the libraries that the
    code names tell which of the two to try first; the other is tried if the first call raises what a wrong type does.

    Args:
        fn: The user's function.
        out_features: Width of its answers. None: learnt from the first.
        time_features: Its inputs per time step, for a function of sequences: their rows are [T·time_features] here, and
            [T, time_features] to the function. None: it is one of rows.
        memory: The form of its state, for a function fn(x, state, *context) -> (y, state). The tensors of the state are
            the last of the rows that it is given here.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        out_features: int | None,
        time_features: int | None = None,
        memory: StateForm | None = None,
    ) -> None:
        self.fn = fn
        self.time_features, self.memory = time_features, memory
        self.out_features = out_features  # None until the first answer
        self.interfaces = find_interfaces(fn)  # to be tried in this order; one, once it is known
        self.seed_position = seed_position(fn)
        self.rounding = 0.0  # of the answers, in their own precision
        self.dtype = torch.float32  # of the answers, if it is not that of the rows
        self.tensors = ModuleTensors(fn)
        self.calls = 0
        self.evaluations = 0
        self.seconds = 0.0

    def __call__(self, points: Tensor, *rows: Tensor, seed: int | None = None) -> Tensor:
        """Evaluate points [N, d], with what else there is in rows. Returns [N, d_out] on the device of points.

        It may be in memory that belongs to fn.
        """
        answer = self._answer(points, rows, seed)
        return self._as_rows(answer if self.memory is None else self._split(answer)[0], points)

    def advance(self, points: Tensor, *rows: Tensor, seed: int | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As a call, of a function with memory; also returns its new state, [N, ...] each."""
        answer, state = self._split(self._answer(points, rows, seed))
        return self._as_rows(answer, points), self._checked_state(state, points)

    def _as_rows(self, answer: object, points: Tensor) -> Tensor:
        as_expected = (
            type(answer) is Tensor
            and answer.shape == self._shape(points)
            and answer.dtype == points.dtype
            and answer.device == points.device
            and answer.layout == torch.strided
            and not answer.requires_grad
        )
        y: Tensor = answer if as_expected else self._checked(answer, points)  # type: ignore[assignment]
        return y if self.time_features is None else y.flatten(1)

    def _shape(self, points: Tensor) -> tuple[int | None, ...]:
        """Of the answer; None where it is not known yet."""
        if self.time_features is None:
            return points.shape[0], self.out_features
        return points.shape[0], points.shape[1] // self.time_features, self.out_features

    def _split(self, answer: object) -> tuple[object, object]:
        """The answer of a function with memory, and its state."""
        if not isinstance(answer, (tuple, list)) or len(answer) != 2:
            raise BoxError(
                f"the box {describe(self.fn)} has a state, so it must return a pair (y, state), got "
                f"{type(answer).__name__}"
            )
        return answer[0], answer[1]

    def _checked_state(self, state: object, points: Tensor) -> tuple[Tensor, ...]:
        assert self.memory is not None
        try:
            leaves = self.memory.spec.flatten_up_to(state)
            tensors = [state_tensor(t) for t in leaves]
        except (TypeError, ValueError, RuntimeError) as error:
            raise BoxError(
                f"the box {describe(self.fn)} must return a state of the form it was given, of tensors or arrays: "
                f"{error}"
            ) from error
        if any(t.ndim == 0 or t.shape[0] != points.shape[0] for t in tensors):
            raise BoxError(
                f"the box {describe(self.fn)} must return a state with one entry per row first, "
                f"[{points.shape[0]}, ...], got {[list(t.shape) for t in tensors]}"
            )
        return tuple(t.detach().to(points.device) for t in tensors)

    @property
    def known(self) -> tuple[int | None, tuple[Interface, ...]]:
        """What calls have taught about the function: the width of its answers, and which arrays it takes."""
        return self.out_features, self.interfaces

    @known.setter
    def known(self, known: tuple[int | None, tuple[Interface, ...]]) -> None:
        self.out_features, self.interfaces = known

    def compute_device(self, device: torch.device) -> torch.device:
        """Where the function works, given that its rows come from `device`: they are best made there."""
        return CPU if self.interfaces == ("numpy",) else self.tensors.device() or device

    def replaced(self, fn: Callable[..., Any], time_features: int | None) -> "RowFunction":
        """Another function in the place of this one, with the counters going on."""
        other = RowFunction(fn, self.out_features, time_features, self.memory)
        other.calls, other.evaluations, other.seconds = self.calls, self.evaluations, self.seconds
        return other

    def _answer(self, points: Tensor, rows: tuple[Tensor, ...], seed: int | None) -> object:
        start = time.perf_counter()
        interfaces = self.interfaces  # as they are now: an evaluator may call from several threads
        try:
            if len(interfaces) == 1:
                return self._call(interfaces[0], points, rows, seed)
            first, second = interfaces
            owner: Any = snapshot_owner(self.fn)
            before = None if owner is None else owner.snapshot()
            try:
                answer = self._call(first, points.clone(), tuple(t.clone() for t in rows), seed)
            except (TypeError, AttributeError, ValueError):
                if owner is not None:
                    owner.restore(before)
                answer = self._call(second, points, rows, seed)
                first = second
            self.interfaces = (first,)
            return answer
        except Exception as error:
            if is_out_of_memory(error):
                raise
            first_try = error.__context__ if len(interfaces) == 2 else None  # with the other kind of array
            also = "" if first_try is None else f" (and, tried otherwise, {type(first_try).__name__}: {first_try})"
            hint = "" if isinstance(self.fn, nn.Module) else f" {ANNOTATE}"
            hint += "" if self.memory is None else " It is called as fn(x, state, *context)."
            raise BoxError(
                f"the box {describe(self.fn)} raised {type(error).__name__} on {self._words(points)}: {error}{also}. "
                f"Call it yourself on an array of that shape to see why.{hint}"
            ) from error
        finally:
            with COUNTING:
                self.seconds += time.perf_counter() - start

    def _words(self, points: Tensor) -> str:
        """What the function is given."""
        n, width = points.shape
        d = self.time_features or width
        what = f"{n} rows of" if self.time_features is None else f"{n} sequences of {width // d} x"
        return f"{what} {d} inputs, {points.dtype}" + ("" if self.memory is None else ", and a state")

    def _call(self, interface: Interface, points: Tensor, rows: tuple[Tensor, ...], seed: int | None) -> object:
        with COUNTING:
            self.calls += 1
            self.evaluations += points.shape[0]
        x = points if self.time_features is None else points.view(len(points), -1, self.time_features)
        arrays: list[Any] = [x, *rows] if interface == "torch" else [t.cpu().numpy() for t in (x, *rows)]
        if self.memory is not None:
            first = len(arrays) - self.memory.spec.num_leaves
            arrays = [arrays[0], tree_unflatten(arrays[first:], self.memory.spec), *arrays[1:first]]
        if seed is None or (self.seed_position or 0) < len(arrays):  # a context stands there
            return self.fn(*arrays)
        return self.fn(*arrays, seed=seed)

    def _checked(self, answer: object, points: Tensor) -> Tensor:
        name = describe(self.fn)
        if isinstance(answer, np.ndarray) and answer.dtype.kind in "fiub":
            answer = from_numpy(answer)
        if not isinstance(answer, Tensor):
            kind = f"an array of {answer.dtype}" if isinstance(answer, np.ndarray) else type(answer).__name__
            raise BoxError(f"the box {name} must return a real torch tensor or numpy array, got {kind}. {ANNOTATE}")
        if answer.layout != torch.strided:
            raise BoxError(f"the box {name} must return a dense tensor, got {answer.layout}: call y.to_dense()")
        if answer.dtype.is_complex:
            raise BoxError(f"the box {name} returned complex numbers; return real and imaginary parts as two outputs")
        *lead, width = self._shape(points)
        expected = f"[{', '.join(map(str, lead))}, {'out_features' if width is None else width}]"
        if list(answer.shape[:-1]) != lead or answer.ndim != len(lead) + 1 or answer.shape[-1] == 0:
            hint = " (add a dimension: y[..., None])" if list(answer.shape) == lead else ""
            what = "row" if self.time_features is None else "time step"
            raise BoxError(
                f"the box {name} must return one row of outputs per {what} of inputs, {expected}, got shape "
                f"{list(answer.shape)}{hint}"
            )
        if width is not None and answer.shape[-1] != width:
            raise BoxError(
                f"the box {name} must return {expected}, got {list(answer.shape)}: its output width must not change, "
                "and must equal out_features or what follows from structure, where they were given"
            )
        self.out_features = answer.shape[-1]
        self.rounding = torch.finfo(answer.dtype).eps if answer.dtype.is_floating_point else 0.0
        if not answer.dtype.is_floating_point or answer.dtype.itemsize < points.dtype.itemsize:
            answer = answer.to(points.dtype)
        self.dtype = answer.dtype
        return answer.detach().to(points.device)


def from_numpy(array: np.ndarray) -> Tensor:
    """A tensor of the array, whatever its byte order, precision or write protection."""
    known = array.dtype.isnative and array.dtype.itemsize <= 8 and array.dtype.kind in "fib"
    array = np.ascontiguousarray(array, dtype=array.dtype if known else np.float64)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def describe(fn: Callable[..., Any]) -> str:
    """A name for messages."""
    return str(getattr(fn, "__name__", type(fn).__name__))
