"""Boxes that are an nn.Module: their parameters and buffers, their device, and their mode."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bondgrad.errors import BoxError


class ModuleTensors:
    """The parameters and buffers of a function that is an nn.Module; of other functions, none.

    Dictionaries and keys are kept instead of tensors, since the tensors may be replaced.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        modules = list(fn.modules()) if isinstance(fn, nn.Module) else []
        self._parameters = entries([m._parameters for m in modules])
        self._tensors = self._parameters + entries([m._buffers for m in modules])

    def device(self) -> torch.device | None:
        """The device of the first parameter or buffer; None: there are none."""
        for tensors, name in self._tensors:
            if (current := tensors.get(name)) is not None:
                return current.device  # type: ignore[no-any-return]
        return None

    def all(self) -> list[Tensor | None]:
        """The parameters and buffers that the module has now; None in the place of one that was removed."""
        return [tensors.get(name) for tensors, name in self._tensors]

    def parameters(self) -> list[Tensor | None]:
        """The parameters that the module has now; None in the place of one that was removed."""
        return [tensors.get(name) for tensors, name in self._parameters]

    def check_parameters(self, before: list[Tensor | None]) -> None:
        """Raise BoxError if the parameters are not those `before`, as after `functional_call`, which replaces them."""
        try:
            same = all(a is b or torch.equal(a, b) for a, b in zip(before, self.parameters(), strict=True))  # type: ignore[arg-type]
        except (RuntimeError, TypeError, ValueError):  # a tensor of a transform that is over; None; other lengths
            same = False
        if not same:
            raise BoxError(
                "the parameters of the box are not those of the forward pass any more: leave them out of what "
                "functional_call replaces"
            )


def entries(dictionaries: list[Any]) -> list[tuple[dict[str, Any], str]]:
    """Each dictionary with each key that has a value. TorchScript modules have no dictionaries: they are left out."""
    real = [tensors for tensors in dictionaries if isinstance(tensors, dict)]
    return [(tensors, name) for tensors in real for name, t in tensors.items() if t is not None]


def freeze(module: nn.Module) -> nn.Module:
    """The module itself, with parameters that need no gradient, and in eval mode if it has modes."""
    for parameter in module.parameters():
        if not nn.parameter.is_lazy(parameter):
            parameter.requires_grad_(False)
    with contextlib.suppress(NotImplementedError):  # exported modules have no modes
        module.eval()
    return module


@contextlib.contextmanager
def in_eval_mode(fn: object) -> Iterator[None]:
    """A context in which fn, if it is a module, and its submodules are in eval mode; their modes are restored after."""
    modules = [module for module in fn.modules() if module.training] if isinstance(fn, nn.Module) else []
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module in modules:
            module.training = True
