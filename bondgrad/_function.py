"""The user's function, called with the arrays it understands, and its answer checked."""

import inspect
import time
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from bondgrad.errors import BoxError

Interface = Literal["torch", "numpy"]


class RowFunction:
    """Calls fn on rows of tensors, whether it is written for torch or for numpy, and counts what that costs.

    Which of the two is found out without calling fn: an nn.Module takes tensors; else the annotation of the first
    parameter decides; else the libraries that the code names. Where none of that tells, the first call tries a tensor
    and, if that raises TypeError or AttributeError, an array.
    """

    def __init__(self, fn: Callable[..., Any], out_features: int | None) -> None:
        self.fn = fn
        self.out_features = out_features  # None until the first answer
        self.interface = find_interface(fn)
        self.calls = 0
        self.evaluations = 0
        self.seconds = 0.0

    def __call__(self, points: Tensor, *context: Tensor) -> Tensor:
        """Evaluate points [N, d]. Returns [N, d_out] on the device of points, in memory that may be fn's own."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                answer = self._answer(points, context)
        else:  # in a backward pass: a context manager less
            answer = self._answer(points, context)
        as_expected = (
            type(answer) is Tensor
            and answer.shape == (len(points), self.out_features)
            and answer.dtype == points.dtype
            and answer.device == points.device
        )
        return answer if as_expected else self._checked(answer, points)  # type: ignore[return-value]

    def _answer(self, points: Tensor, context: tuple[Tensor, ...]) -> object:
        start = time.perf_counter()
        self.calls += 1
        self.evaluations += len(points)
        try:
            if self.interface is not None:
                return self._call(self.interface, points, context)
            try:
                answer = self._call("torch", points, context)
                self.interface = "torch"
            except (TypeError, AttributeError):
                answer = self._call("numpy", points, context)
                self.interface = "numpy"
            return answer
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise BoxError(
                f"the box {describe(self.fn)} raised {type(error).__name__} on {len(points)} rows of "
                f"{points.shape[1]} inputs: {error}. Call it yourself on an array of that shape to see why; if it "
                "expects numpy arrays, or tensors, annotate its first parameter so (x: np.ndarray, x: torch.Tensor)."
            ) from error
        finally:
            self.seconds += time.perf_counter() - start

    def _call(self, interface: Interface, points: Tensor, context: tuple[Tensor, ...]) -> object:
        if interface == "torch":
            return self.fn(points, *context)
        return self.fn(points.cpu().numpy(), *(c.detach().cpu().numpy() for c in context))

    def _checked(self, answer: object, points: Tensor) -> Tensor:
        name = describe(self.fn)
        if isinstance(answer, np.ndarray) and answer.dtype.kind in "fiub":
            answer = torch.from_numpy(np.ascontiguousarray(answer))
        if not isinstance(answer, Tensor):
            kind = f"an array of {answer.dtype}" if isinstance(answer, np.ndarray) else type(answer).__name__
            raise BoxError(f"the box {name} must return a real torch tensor or numpy array, got {kind}")
        if answer.dtype.is_complex:
            raise BoxError(f"the box {name} returned complex numbers; return real and imaginary parts as two outputs")
        rows, width = len(points), self.out_features
        expected = f"[{rows}, {'out_features' if width is None else width}]"
        if answer.ndim != 2 or answer.shape[0] != rows or answer.shape[1] == 0:
            hint = " (add a dimension: y[:, None])" if answer.shape == (rows,) else ""
            raise BoxError(
                f"the box {name} must return one row of outputs per row of inputs, {expected}, got shape "
                f"{list(answer.shape)}{hint}"
            )
        if width is not None and answer.shape[1] != width:
            raise BoxError(
                f"the box {name} must return {expected}, got {list(answer.shape)}: its output width must not change, "
                "and must equal out_features where that was given"
            )
        self.out_features = answer.shape[1]
        if not answer.dtype.is_floating_point or answer.dtype.itemsize < points.dtype.itemsize:
            answer = answer.to(points.dtype)
        return answer.detach().to(points.device)


def describe(fn: Callable[..., Any]) -> str:
    """A name for messages."""
    return str(getattr(fn, "__qualname__", type(fn).__qualname__))


def find_interface(fn: Callable[..., Any]) -> Interface | None:
    """Whether fn takes tensors or arrays, as far as that can be told without calling it."""
    if isinstance(fn, nn.Module):
        return "torch"
    if isinstance(fn, np.ufunc):
        return "numpy"
    function = inspect.unwrap(fn) if inspect.isroutine(fn) else type(fn).__call__
    function = getattr(function, "__func__", function)  # of a bound method
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return None
    is_method = function is not fn
    names = code.co_varnames[is_method : code.co_argcount]
    annotation = str(function.__annotations__.get(names[0], "")) if names else ""
    if "Tensor" in annotation:
        return "torch"
    if "ndarray" in annotation or "NDArray" in annotation or "ArrayLike" in annotation:
        return "numpy"
    libraries = {library_of(value) for value in referenced_values(function, code)}
    if "torch" in libraries:  # code that names both takes tensors and converts
        return "torch"
    return "numpy" if "numpy" in libraries else None


def referenced_values(function: Any, code: CodeType) -> Iterator[object]:  # noqa: ANN401
    """What the globals and closure variables that the code names are bound to."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a variable not assigned yet
            continue
    pending = [code]
    while pending:
        code = pending.pop()
        for name in code.co_names:
            if name in function.__globals__:
                yield function.__globals__[name]
        pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def library_of(value: object) -> str:
    """The top-level package that a module, class, function or instance comes from."""
    name = getattr(value, "__name__", "") if inspect.ismodule(value) else getattr(value, "__module__", None)
    return str(name or type(value).__module__).split(".")[0]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on the CPU or on an accelerator."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("not enough memory" in text or "out of memory" in text)
