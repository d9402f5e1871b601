"""Reading the signature and the code of a function: array types that it takes, and its `seed` parameter."""

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any, Literal

import numpy as np
from torch import nn

Interface = Literal["torch", "numpy"]


def function_name(fn: Callable[..., Any]) -> str:
    """The name of a function, of the one in a `functools.partial`, or of the class of a callable object."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return str(getattr(fn, "__name__", type(fn).__name__))


def find_interfaces(fn: Callable[..., Any], usual: Interface = "torch") -> tuple[Interface, ...]:
    """The kinds of arrays that fn may take, in the order in which to try them; a single one where that is certain.

    Where nothing tells them apart, the `usual` one is the first.
    """
    annotation = str(next((parameter.annotation for parameter in parameters(fn).values()), ""))
    while isinstance(fn, functools.partial):
        fn = fn.func
    if isinstance(fn, nn.Module) or "Tensor" in annotation:
        return ("torch",)
    if isinstance(fn, np.ufunc) or any(kind in annotation for kind in ("ndarray", "NDArray", "ArrayLike")):
        return ("numpy",)
    fn = inspect.unwrap(fn)
    function = fn if inspect.isroutine(fn) else type(fn).__call__
    function = getattr(function, "__func__", function)  # the function of a bound method
    values = referenced_values(function) if inspect.isfunction(function) else ()
    libraries = {library_of(value) for value in values}
    # A function that refers to both libraries takes tensors, and converts them.
    first = "torch" if "torch" in libraries else "numpy" if "numpy" in libraries else usual
    return ("torch", "numpy") if first == "torch" else ("numpy", "torch")


def seed_position(fn: Callable[..., Any]) -> float | None:
    """The position of the parameter `seed` of fn; infinity if it is keyword-only; None if fn does not have it."""
    known = parameters(fn.forward if isinstance(fn, nn.Module) else fn)
    seed = known.get("seed")
    if seed is None or seed.kind not in (seed.POSITIONAL_OR_KEYWORD, seed.KEYWORD_ONLY):
        return None
    position = math.inf if seed.kind is seed.KEYWORD_ONLY else list(known).index("seed")
    return position if position > 0 else None  # the first argument is the rows


def parameters(fn: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of fn by name; none for a builtin without a signature."""
    try:
        return inspect.signature(fn).parameters
    except (ValueError, TypeError):
        return {}


def referenced_values(function: FunctionType) -> Iterator[object]:
    """The values of the closure variables, and of the global variables that the code of the function refers to."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # the variable is not assigned yet
            yield cell.cell_contents
    yield from (function.__globals__[name] for name in names(function.__code__) if name in function.__globals__)


def names(code: CodeType) -> Iterator[str]:
    """The names of globals and attributes in the code, and in the code of functions defined inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names(constant)


def library_of(value: object) -> str:
    """The top-level package that a module, class, function or instance comes from."""
    name = getattr(value, "__name__", "") if inspect.ismodule(value) else getattr(value, "__module__", None)
    return str(name or type(value).__module__).split(".")[0]
