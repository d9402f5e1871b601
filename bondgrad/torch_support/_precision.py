"""The arithmetic of the box: by default full single precision, whatever autocast and TF32 settings are around it."""

import contextlib
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

KINDS = ("cpu", "cuda")
IEEE = {"ieee", "none"}  # settings without rounding to TF32 or bf16; "none" is the default


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype of autocast on the device of x; None: autocast is off."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def arithmetic(full: bool, device: torch.device, autocast: torch.dtype | None) -> AbstractContextManager[None]:
    """A context without gradients, in full single precision; or, if not `full`, with autocast to the given dtype."""
    changes: list[AbstractContextManager[Any]] = [torch.no_grad()] if torch.is_grad_enabled() else []
    if full:  # on both kinds of device, since a function may move its rows
        changes += [torch.autocast(kind, enabled=False) for kind in KINDS if torch.is_autocast_enabled(kind)]
        changes += [_full_float32] if _full_float32.needed() else []
    elif autocast is not None or torch.is_autocast_enabled(device.type):
        changes.append(torch.autocast(device.type, dtype=autocast, enabled=autocast is not None))
    if len(changes) > 1:
        return all_of(changes)
    return changes[0] if changes else contextlib.nullcontext()  # the usual case


@contextlib.contextmanager
def all_of(managers: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
    """A context that enters all of these."""
    with contextlib.ExitStack() as stack:
        for manager in managers:
            stack.enter_context(manager)
        yield


# Settings of whether a kind of operation may round float32, to TF32 on GPUs, also to bf16 on CPUs. They are
# `torch.backends.cuda.matmul.fp32_precision` and the like, read in every step, hence without the overhead of those.
BACKENDS = ("mkldnn", "cuda") if torch.backends.cuda.is_built() else ("mkldnn",)  # type: ignore[no-untyped-call]
SETTINGS = [(backend, kind) for backend in BACKENDS for kind in ("matmul", "conv", "rnn")]
read, write = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter


class _FullFloat32:
    """A context in which float32 is not rounded to TF32 or bf16.

    The settings are those of the process: the first thread to enter saves them, the last to leave restores them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = contextlib.ExitStack()

    def needed(self) -> bool:
        """Whether a setting allows rounding, or another thread is inside, which will restore such a setting."""
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
        """Save all settings, and set them such that float32 is not rounded."""
        for backend, kind in SETTINGS:
            now = read(backend, kind)
            inherited = now == read(backend, "all")
            self._before.callback(write, backend, kind, "none" if inherited else now)
        # The older interfaces are set too, since torch raises an error when they are read and disagree with the new
        # ones. They are restored first, since they write to the settings above.
        with contextlib.suppress(RuntimeError):  # they disagreed before
            self._before.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("highest")
        with contextlib.suppress(RuntimeError):
            self._before.callback(setattr, torch.backends.cudnn, "allow_tf32", torch.backends.cudnn.allow_tf32)
            torch.backends.cudnn.allow_tf32 = False
        for setting in SETTINGS:
            write(*setting, "ieee")


_full_float32 = _FullFloat32()
