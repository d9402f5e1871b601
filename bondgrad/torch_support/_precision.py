"""The arithmetic that the box runs in: by default full single precision, whatever is allowed around it."""

import contextlib
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

KINDS = ("cpu", "cuda")
IEEE = ("ieee", "none")  # settings under which float32 is float32; "none" says nothing, and that is the default


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The half precision that autocast brings at this moment to the device of x; None: autocast is off."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def arithmetic(full: bool, device: torch.device, autocast: torch.dtype | None) -> AbstractContextManager[None]:
    """Without gradients, and in full single precision; or with autocast as given and TF32 as it is."""
    kind = device.type
    if full and not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda") or _full_float32.needed()):
        return torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext()  # as nearly always
    changes: list[AbstractContextManager[Any]] = []
    if torch.is_grad_enabled():
        changes.append(torch.no_grad())
    if not full and autocast is not None:
        changes.append(torch.autocast(kind, dtype=autocast))
        return all_of(changes)
    # For both kinds, since a function may take its rows elsewhere.
    changes += [torch.autocast(k, enabled=False) for k in KINDS if torch.is_autocast_enabled(k) and (full or k == kind)]
    if full and _full_float32.needed():
        changes.append(_full_float32)
    if len(changes) > 1:
        return all_of(changes)
    return changes[0] if changes else contextlib.nullcontext()


@contextlib.contextmanager
def all_of(managers: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
    """Inside all of them."""
    with contextlib.ExitStack() as stack:
        for manager in managers:
            stack.enter_context(manager)
        yield


class Setting(NamedTuple):
    """Whether one kind of operation may round float32 to less: TF32 on GPUs, also bf16 on CPUs.

    `torch.backends.cuda.matmul.fp32_precision` and its like, without their overhead: they are read in every step.
    """

    backend: str
    kind: str

    def read(self) -> str:
        """Its value, which may come from the backend's."""
        return torch._C._get_fp32_precision_getter(*self)

    def save(self) -> str:
        """What `restore` needs. A value that comes from the backend's is to be inherited again."""
        now = self.read()
        return "none" if now == Setting(self.backend, "all").read() else now

    def restore(self, value: str) -> None:
        """The counterpart of `save`."""
        torch._C._set_fp32_precision_setter(*self, value)


class _FullFloat32:
    """No TF32, nor bf16, for float32. The settings belong to the process: the first in saves, the last out restores."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = contextlib.ExitStack()

    def needed(self) -> bool:
        """Whether there is anything to switch off, or another thread has done so for its own time only."""
        with self._lock:
            if self._inside > 0:
                return True
            for backend, kind in SETTINGS:  # noqa: SIM110 - this way is faster, and often taken
                if torch._C._get_fp32_precision_getter(backend, kind) not in IEEE:
                    return True
            return False

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
        for setting in SETTINGS:
            self._before.callback(setting.restore, setting.save())
        # The older interfaces as well: torch refuses to answer through them where the two disagree. On the way back
        # they come first, since they write to the settings above.
        with contextlib.suppress(RuntimeError):  # they disagreed before
            self._before.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("highest")
        with contextlib.suppress(RuntimeError):
            self._before.callback(setattr, torch.backends.cudnn, "allow_tf32", torch.backends.cudnn.allow_tf32)
            torch.backends.cudnn.allow_tf32 = False
        for setting in SETTINGS:
            setting.restore("ieee")


BACKENDS = ("mkldnn", "cuda") if torch.backends.cuda.is_built() else ("mkldnn",)  # type: ignore[no-untyped-call]
SETTINGS = [Setting(backend, kind) for backend in BACKENDS for kind in ("matmul", "conv", "rnn")]
_full_float32 = _FullFloat32()
