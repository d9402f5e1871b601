"""Whether a function takes tensors or arrays, as far as that can be told without calling it."""

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, Literal

import numpy as np
from torch import nn

Interface = Literal["torch", "numpy"]


def find_interfaces(fn: Callable[..., Any]) -> tuple[Interface, ...]:
    """Whether fn takes tensors or arrays, as far as that can be told without calling it: what to try, in order."""
    if isinstance(fn, nn.Module):
        return ("torch",)
    if isinstance(fn, np.ufunc):
        return ("numpy",)
    try:
        first = next(iter(inspect.signature(fn).parameters.values()), None)
    except (ValueError, TypeError):  # a builtin that does not say
        first = None
    annotation = "" if first is None else str(first.annotation)
    if "Tensor" in annotation:
        return ("torch",)
    if "ndarray" in annotation or "NDArray" in annotation or "ArrayLike" in annotation:
        return ("numpy",)
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = inspect.unwrap(fn)
    function = fn if inspect.isroutine(fn) else type(fn).__call__
    function = getattr(function, "__func__", function)  # of a bound method
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return ("torch", "numpy")
    libraries = {library_of(value) for value in referenced_values(function, code)}
    # Code that names both takes tensors and converts.
    return ("numpy", "torch") if "numpy" in libraries and "torch" not in libraries else ("torch", "numpy")


def seed_position(fn: Callable[..., Any]) -> float | None:
    """Where among its arguments fn takes a parameter called `seed`; infinity, if by name only; None: it takes none."""
    try:
        parameters = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn).parameters
    except (ValueError, TypeError):
        return None
    for position, (name, parameter) in enumerate(parameters.items()):
        if name == "seed" and parameter.kind is parameter.KEYWORD_ONLY:
            return math.inf
        if name == "seed" and parameter.kind is parameter.POSITIONAL_OR_KEYWORD and position > 0:
            return position
    return None


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
