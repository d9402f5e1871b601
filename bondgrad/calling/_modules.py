"""A box that is an nn.Module: its mode, its tensors, and where they are."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bondgrad.errors import BoxError


class ModuleTensors:
    """The parameters and buffers that a function works with, if it is a module; none otherwise.

    Dictionaries and keys are kept instead of tensors, since the tensors may be replaced.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        modules = list(fn.modules()) if isinstance(fn, nn.Module) else []
        self._parameters = entries([m._parameters for m in modules])
        self._tensors = self._parameters + entries([m._buffers for m in modules])

    def device(self) -> torch.device | None:
        """Where the module works; None: it has no tensors."""
        for tensors, name in self._tensors:
            if (current := tensors.get(name)) is not None:
                return current.device  # type: ignore[no-any-return]
        return None

    def parameters(self) -> list[Tensor | None]:
        """Those that the module works with at this moment."""
        return [tensors.get(name) for tensors, name in self._parameters]

    def check_parameters(self, before: list[Tensor | None]) -> None:
        """Refuse to go on with others than those of the forward pass: those that `functional_call` gave are gone."""
        try:
            same = all(a is b or torch.equal(a, b) for a, b in zip(before, self.parameters(), strict=True))  # type: ignore[arg-type]
        except (RuntimeError, TypeError, ValueError):  # of a transform that is over; gone; of a box with more or fewer
            same = False
        if not same:
            raise BoxError(
                "the parameters of the box are not those of the forward pass any more: leave them out of what "
                "functional_call replaces"
            )


def entries(dictionaries: list[Any]) -> list[tuple[dict[str, Any], str]]:
    """What is in them. Compiled modules (TorchScript) have none that can be looked into."""
    real = [tensors for tensors in dictionaries if isinstance(tensors, dict)]
    return [(tensors, name) for tensors in real for name, t in tensors.items() if t is not None]


def freeze(module: nn.Module) -> nn.Module:
    """The module, not to be trained and in eval mode, as far as it can be: exported ones have no modes."""
    for parameter in module.parameters():
        if not nn.parameter.is_lazy(parameter):
            parameter.requires_grad_(False)
    with contextlib.suppress(NotImplementedError):
        module.eval()
    return module


@contextlib.contextmanager
def in_eval_mode(fn: object) -> Iterator[None]:
    """Meanwhile every module of fn, if it is one, is in eval mode; afterwards each is as it was."""
    modules = [module for module in fn.modules() if module.training] if isinstance(fn, nn.Module) else []
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.callback(setattr, module, "training", True)
            module.training = False
        yield
