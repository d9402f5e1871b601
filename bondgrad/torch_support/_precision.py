"""The arithmetic that the box runs in: by default full single precision, whatever is allowed around it."""

import contextlib
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

KINDS = ("cpu", "cuda")
IEEE = {"ieee", "none"}  # settings under which float32 is float32; "none" says nothing, and that is the default


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The half precision that autocast brings at this moment to the device of x; None: autocast is off."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def arithmetic(full: bool, device: torch.device, autocast: torch.dtype | None) -> AbstractContextManager[None]:
    """Without gradients, and in full single precision; or with autocast as given and TF32 as it is."""
    changes: list[AbstractContextManager[Any]] = [torch.no_grad()] if torch.is_grad_enabled() else []
    if full:  # for both kinds, since a function may take its rows elsewhere
        changes += [torch.autocast(kind, enabled=False) for kind in KINDS if torch.is_autocast_enabled(kind)]
        changes += [_full_float32] if _full_float32.needed() else []
    elif autocast is not None or torch.is_autocast_enabled(device.type):
        changes.append(torch.autocast(device.type, dtype=autocast, enabled=autocast is not None))
    if len(changes) > 1:
        return all_of(changes)
    return changes[0] if changes else contextlib.nullcontext()  # as nearly always


@contextlib.contextmanager
def all_of(managers: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
    """A context that enters all of these."""
    with contextlib.ExitStack() as stack:
        for manager in managers:
            stack.enter_context(manager)
        yield


# Settings that say whether one kind of operation may round float32 to less: TF32 on GPUs, also bf16 on CPUs. They are
# `torch.backends.cuda.matmul.fp32_precision` and its like, without their overhead: they are read in every step.
BACKENDS = ("mkldnn", "cuda") if torch.backends.cuda.is_built() else ("mkldnn",)  # type: ignore[no-untyped-call]
SETTINGS = [(backend, kind) for backend in BACKENDS for kind in ("matmul", "conv", "rnn")]
read, write = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter


class _FullFloat32:
    """No TF32, nor bf16, for float32. The settings belong to the process: the first in saves, the last out restores."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = contextlib.ExitStack()

    def needed(self) -> bool:
        """Whether there is anything to switch off, or another thread has done so for its own time only."""
        with self._lock:
            return self._inside > 0 or not IEEE.issuperset([read(*setting) for setting in SETTINGS])

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._switch_off()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._before.close()

    def _switch_off(self) -> None:
        for backend, kind in SETTINGS:
            now = read(backend, kind)
            inherited = now == read(backend, "all")
            self._before.callback(write, backend, kind, "none" if inherited else now)
        # The older interfaces as well: torch refuses to answer through them where the two disagree. On the way back
        # they come first, since they write to the settings above.
        with contextlib.suppress(RuntimeError):  # they disagreed before
            self._before.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("highest")
        with contextlib.suppress(RuntimeError):
            self._before.callback(setattr, torch.backends.cudnn, "allow_tf32", torch.backends.cudnn.allow_tf32)
            torch.backends.cudnn.allow_tf32 = False
        for setting in SETTINGS:
            write(*setting, "ieee")


_full_float32 = _FullFloat32()
