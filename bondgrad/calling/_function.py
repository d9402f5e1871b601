"""`RowFunction` calls the user's function with tensors or numpy arrays, and checks what it returns."""

import math
import numbers
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_structure, tree_unflatten

from bondgrad.calling._answers import UnusableAnswer, answer_tensor, stacked
from bondgrad.calling._event_loop import settled
from bondgrad.calling._hints import ANNOTATE, ONE_NUMBER, ONE_ROW, SILENT, call_hint, takes_samples
from bondgrad.calling._modules import ModuleTensors
from bondgrad.calling._per_row import PerRow
from bondgrad.calling._signature import Interface, find_interfaces, function_name, seed_position
from bondgrad.errors import MISTAKES, BoxError, RowsFailed, is_out_of_memory, shortened

CPU = torch.device("cpu")
COUNTING = threading.Lock()  # shared by all instances, since an instance with a lock could not be copied


class RowFunction:
    """Calls fn, written for torch or for numpy, on rows of tensors, and counts calls, evaluations and seconds.

    An nn.Module is given tensors. For other functions the annotation of the first parameter decides. Without one, the
    libraries that the code refers to decide which of the two is tried first; the other is tried if the first call
    raises TypeError, AttributeError or ValueError. A function of one sample (`PerRow`) is tried with numpy first, and
    with the other only at the first row. What is to be awaited, as of a coroutine function, is awaited.

    Args:
        fn: The user's function.
        out_features: The number of outputs. None: taken from the first call.
        time_features: The number of inputs per time step, for a function of sequences: a row has shape
            [T·time_features] here, and is passed to fn as [T, time_features]. None: fn is not a function of sequences.
        form: An example of the state, for a function fn(x, state, *context) -> (y, state). The tensors of the state
            are then the last of the `rows` of a call. None: fn has no state.
    """

    def __init__(
        self, fn: Callable[..., Any], out_features: int | None, time_features: int | None = None, form: object = None
    ) -> None:
        self.fn = fn
        self.name = function_name(fn)  # for messages
        self.time_features, self.state_form = time_features, form
        self.out_features = out_features  # None before the first call
        # In the order in which they are tried; a single one once it is known.
        self.interfaces = find_interfaces(fn.f, "numpy") if isinstance(fn, PerRow) else find_interfaces(fn)
        self.seed_position = seed_position(fn)
        self.rounding = 0.0  # relative rounding of the outputs, in the dtype that fn returns
        self.dtype = torch.float32  # of the outputs after `_checked`: that of fn, or that of x if it is more precise
        self.answered = False  # whether a call has shown `out_features`, `rounding` and `dtype`
        self.tensors = ModuleTensors(fn)
        self.calls, self.evaluations, self.seconds = 0, 0, 0.0

    def __call__(self, points: Tensor, *rows: Tensor, seed: int | None = None) -> Tensor:
        """The outputs [N, d_out] at points [N, d], on the device of points.

        The tensor may be one that fn keeps and overwrites later.

        Args:
            points: [N, d] the inputs.
            rows: [N, ...] each: the contexts, then the tensors of the state.
            seed: Passed to fn, if it has a parameter `seed` and no context takes its place. None: not passed.
        """
        return self.advance(points, *rows, seed=seed)[0]

    def advance(self, points: Tensor, *rows: Tensor, seed: int | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The outputs as `__call__` returns them, and the tensors [N, ...] of the new state; () without a state."""
        if isinstance(self.fn, PerRow):
            return self._by_row(points, rows, seed), ()
        answer, state = self._answer(points, rows, seed), None
        if self.state_form is not None:
            if not isinstance(answer, (tuple, list)) or len(answer) != 2:
                raise self._error(f"has a state: it must return a pair (y, state), got {type(answer).__name__}")
            answer, state = answer
        y = self._checked(answer, points)
        after = () if self.state_form is None else self._checked_state(state, points)
        return y if self.time_features is None else y.flatten(1), after

    def compute_device(self, device: torch.device) -> torch.device:
        """The device on which fn computes, if x is on `device`. Points should be made there."""
        return CPU if self.interfaces == ("numpy",) else self.tensors.device() or device

    def count(self, calls: int, evaluations: int, seconds: float) -> None:
        """Count calls that were made elsewhere."""
        with COUNTING:
            self.calls += calls
            self.evaluations += evaluations
            self.seconds += seconds

    def learn(self, points: Tensor, y: Tensor, rounding: float) -> None:
        """Take note of outputs y at points, [N, ...] each, that were computed elsewhere, with that relative rounding.

        Raises BoxError if their number is not the one known before.
        """
        width = y.shape[1] if self.time_features is None else y.shape[1] * self.time_features // points.shape[1]
        if self.out_features not in (None, width):
            raise self._error(
                f"returned {width} outputs, where {self.out_features} are expected. Its output width must not change, "
                "and must equal out_features or what follows from structure, if given"
            )
        self.out_features, self.rounding, self.dtype, self.answered = width, rounding, y.dtype, True

    def learnt(self) -> dict[str, Any]:
        """What calls have shown of the outputs, as it is saved with a layer."""
        return {"out_features": self.out_features, "rounding": self.rounding, "dtype": self.dtype}

    def expected_width(self, learnt: dict[str, Any] | None) -> int | None:
        """The number of outputs that is to be expected; None: there is none.

        Before the first call it is that which calls have shown in another run, `learnt` there, with their rounding and
        dtype: fn may be another function now, and its first answer decides.
        """
        if learnt is None or self.answered:
            return self.out_features
        self.rounding, self.dtype = learnt["rounding"], learnt["dtype"]
        return self.out_features or learnt["out_features"]

    def replaced(self, fn: Callable[..., Any], time_features: int | None) -> "RowFunction":
        """A `RowFunction` of another fn with the same outputs and state, which continues the counters of this one."""
        other = RowFunction(fn, self.out_features, time_features, self.state_form)
        other.calls, other.evaluations, other.seconds = self.calls, self.evaluations, self.seconds
        return other

    def _answer(self, points: Tensor, rows: tuple[Tensor, ...], seed: int | None) -> Any:  # noqa: ANN401
        """What fn returns. In the first call, the interface is found out if it is not known."""
        interfaces = self.interfaces  # read once, since another thread of an evaluator may set it meanwhile
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
            first_try = error.__context__ if len(interfaces) == 2 else None  # the error of the first of two interfaces
            # A ValueError may come by chance, although it led to the other interface, which the function does not take.
            is_failure = isinstance(first_try, ValueError) and isinstance(error, (TypeError, AttributeError))
            also = (
                ""
                if str(first_try) in ("None", str(error))
                else f" (and, tried otherwise, {type(first_try).__name__}: {first_try})"
            )
            arguments = 1 + len(rows) if self.state_form is None else 2 + len(rows) - len(tree_leaves(self.state_form))
            hint = call_hint(self.fn, error, arguments) or (ONE_ROW if takes_samples(error) else "")
            wrong_arrays = len(interfaces) == 2 or isinstance(error, (TypeError, AttributeError))
            hint = hint or (ANNOTATE if wrong_arrays and not isinstance(self.fn, nn.Module) else "")
            hint += "" if self.state_form is None else " It is called as fn(x, state, *context)."
            shape = list(self._as_given(points).shape)
            raise self._error(
                f"raised {type(error).__name__} on rows of shape {shape}, {points.dtype}: "
                f"{str(error) or SILENT}{also}. Call it yourself on an array of that shape to see why. {hint}".rstrip()
            ) from (first_try if is_failure else error)

    def _by_row(self, points: Tensor, rows: tuple[Tensor, ...], seed: int | None) -> Tensor:
        """The outputs of a function of one sample. Raises `RowsFailed` if it raises errors at some rows."""
        outcomes, n = self._row_outcomes(points, rows, seed), len(points)
        errors: dict[int, BoxError] = {}
        for row, outcome in enumerate(outcomes):
            if not isinstance(outcome, BaseException):
                continue
            if isinstance(outcome, (KeyboardInterrupt, SystemExit)) or is_out_of_memory(outcome):
                raise outcome
            errors[row] = self._row_error(points, row, outcome, 1 + len(rows))
            if isinstance(outcome, MISTAKES) or snapshot_owner(self.fn) is not None:
                raise errors[row]
        answered = [row for row in range(n) if row not in errors]
        if not answered:
            raise RowsFailed(None, errors)
        try:
            y = stacked([outcomes[row] for row in answered], answered)
        except UnusableAnswer as error:
            raise self._error(f"{error}.") from None
        y = self._checked(y, points[answered] if errors else points)
        if errors:
            everywhere = y.new_full((n, *y.shape[1:]), math.nan)
            everywhere[answered] = y
            raise RowsFailed(everywhere.flatten(1), errors)
        return y if self.time_features is None else y.flatten(1)

    def _row_outcomes(self, points: Tensor, rows: tuple[Tensor, ...], seed: int | None) -> list[Any]:
        """See `PerRow.outcomes`. The other interface is tried if the first one is wrong for the first row."""
        wrong, (first, *others) = (TypeError, AttributeError), self.interfaces
        owner: Any = snapshot_owner(self.fn)
        before = owner.snapshot() if owner is not None and others else None
        outcomes: list[Any] = self._call(first, points, rows, seed)
        for other in others if isinstance(outcomes[0], wrong) else ():
            if owner is not None:
                owner.restore(before)
            again: list[Any] = self._call(other, points, rows, seed)
            if not isinstance(again[0], wrong):
                first, outcomes = other, again
        if not isinstance(outcomes[0], BaseException):
            self.interfaces = (first,)
        return outcomes

    def _row_error(self, points: Tensor, row: int, error: BaseException, arguments: int) -> BoxError:
        """What is said of an error of a function of one sample at one of the rows."""
        x = self._as_given(points[row : row + 1])[0]
        hint = call_hint(self.fn, error, arguments, sample=True) or (ONE_NUMBER if takes_samples(error) else "")
        hint = hint or (ANNOTATE if isinstance(error, (TypeError, AttributeError)) else "")
        values = shortened(", ".join(f"{value:.4g}" for value in x.flatten().tolist()))
        said = self._error(
            f"raised {type(error).__name__} on row {row} of {len(points)}, of shape {list(x.shape)}, [{values}]: "
            f"{str(error) or SILENT}. Call it yourself on that row to see why. {hint}".rstrip()
        )
        said.__cause__ = error
        return said

    def _as_given(self, points: Tensor) -> Tensor:
        """The points [N, d] in the shape that fn takes: [N, T, time_features] for a function of sequences."""
        return points if self.time_features is None else points.view(len(points), -1, self.time_features)

    def _call(self, interface: Interface, points: Tensor, rows: tuple[Tensor, ...], seed: int | None) -> Any:  # noqa: ANN401
        """What fn returns for arrays of this interface; of a function of one sample, its outcomes.

        The call is counted, also if it raises an error.
        """
        start = time.perf_counter()
        arrays: list[Any] = [self._as_given(points), *rows]
        if interface == "numpy":
            arrays = [t.cpu().numpy() for t in arrays]
        if self.state_form is not None:
            form = tree_structure(self.state_form)
            first = len(arrays) - form.num_leaves
            arrays = [arrays[0], tree_unflatten(arrays[first:], form), *arrays[1:first]]
        options: dict[str, Any] = {}
        if seed is not None and (self.seed_position or 0) >= len(arrays):  # otherwise a context is in its place
            options["seed"] = seed
        calls, evaluations = 1, points.shape[0]
        try:
            if not isinstance(self.fn, PerRow):
                return settled(self.fn(*arrays, **options))
            remembers = snapshot_owner(self.fn) is not None
            outcomes = self.fn.outcomes(*arrays, first_error=remembers, **options)
            calls = evaluations = len(outcomes)
            return outcomes
        finally:
            self.count(calls, evaluations, time.perf_counter() - start)

    def _checked(self, answer: object, points: Tensor) -> Tensor:
        """The outputs [N, d_out] or [N, T, d_out] as a detached tensor, at least as precise as the points."""
        *lead, _ = self._as_given(points).shape
        if (
            self.answered
            and type(answer) is Tensor
            and answer.shape == (*lead, self.out_features)
            and answer.dtype == points.dtype == self.dtype
            and answer.device == points.device
            and answer.layout == torch.strided
            and not answer.requires_grad
        ):
            return answer  # the usual case; the checks below would take longer than a small box
        one_number, was_list = isinstance(answer, numbers.Real), isinstance(answer, (list, tuple))
        try:
            answer = answer_tensor(answer)
        except UnusableAnswer as error:
            raise self._error(f"{error}. {ONE_ROW if one_number else ''}".rstrip()) from None
        if answer.layout != torch.strided:
            raise self._error(f"must return a dense tensor, got {answer.layout}: call y.to_dense()")
        if answer.dtype.is_complex:
            raise self._error("returned complex numbers; return real and imaginary parts as two outputs")
        shape, width = list(answer.shape), self.out_features
        if shape[:-1] != lead or shape[-1] == 0 or width not in (None, shape[-1]):
            what = "row" if self.time_features is None else "time step"
            expected = f"[{', '.join(map(str, lead))}, {width or 'out_features'}]"
            dimension = "return [[y0], [y1], ...]" if was_list else "add a dimension: y[..., None]"
            hint = f" ({dimension})" if shape == lead else ""
            if shape[:-1] == lead:  # the rows are right
                hint = ". Its output width must not change, and must equal out_features or what follows from structure"
            by_column = shape[:1] != lead or (shape == lead and lead == [points.shape[1]])  # perhaps
            of_rows = self.time_features is None and not isinstance(self.fn, PerRow)
            also = f" {ONE_ROW}" if by_column and of_rows else ""
            raise self._error(
                f"must return one row of outputs per {what} of inputs, {expected}, got shape {shape}{hint}.{also}"
            )
        self.out_features = shape[-1]
        self.rounding = torch.finfo(answer.dtype).eps if answer.dtype.is_floating_point else 0.0
        self.dtype, self.answered = torch.promote_types(answer.dtype, points.dtype), True
        return answer.detach().to(points.device, self.dtype)

    def _checked_state(self, state: object, points: Tensor) -> tuple[Tensor, ...]:
        """The tensors of a state that fn returned, detached and on the device of points."""
        try:
            tensors = [state_tensor(t) for t in tree_structure(self.state_form).flatten_up_to(state)]
        except (TypeError, ValueError, RuntimeError) as error:
            raise self._error(f"must return a state of the form it was given, of tensors or arrays: {error}") from None
        rows, shapes = len(points), [list(t.shape) for t in tensors]
        if any(shape[:1] != [rows] for shape in shapes):
            raise self._error(f"must return a state with one entry per row first, [{rows}, ...], got {shapes}")
        return tuple(t.detach().to(points.device) for t in tensors)

    def _error(self, what: str) -> BoxError:
        return BoxError(f"the box {self.name} {what}")


def snapshot_owner(fn: object) -> object | None:
    """The object with methods `snapshot` and `restore`: fn, or the object that fn is a method of; None: neither has."""
    fn = fn.f if isinstance(fn, PerRow) else fn
    for candidate in (fn, getattr(fn, "__self__", None)):
        if callable(getattr(candidate, "snapshot", None)) and callable(getattr(candidate, "restore", None)):
            return candidate
    return None


def state_tensor(value: object) -> Tensor:
    """The value as a tensor, copied if it is an array. Raises TypeError if it is neither a tensor nor an array."""
    if isinstance(value, np.ndarray):
        return torch.as_tensor(value.copy(), device="cpu")
    if not isinstance(value, Tensor):
        raise TypeError(f"{type(value).__name__} is neither a tensor nor an array")
    return value
