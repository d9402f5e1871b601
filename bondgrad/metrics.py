"""How good a gradient is, and where to write that down."""

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from bondgrad.errors import positive_int

if TYPE_CHECKING:
    from bondgrad.box import BlackBox
    from bondgrad.step._records import Step
    from bondgrad.step._stats import Stats


def sign_accuracy(g: Tensor, reference: Tensor) -> Tensor:
    """The fraction of entries whose sign is that of the reference.

    Entries with a zero reference are left out; NaN where that leaves none. A zero or NaN in g counts as wrong.

    Args:
        g: The estimate.
        reference: The exact gradient, of the same shape.

    Returns:
        A tensor without dimensions, on the device of g.

    Example:
        >>> sign_accuracy(torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0.1, 0.1, 0.0]))
        tensor(0.5000)
    """
    if g.shape != reference.shape:
        raise ValueError(f"g and reference must have the same shape, got {list(g.shape)} and {list(reference.shape)}")
    counted = reference != 0
    return ((g.sign() == reference.sign()) & counted).sum() / counted.sum()


def exact_vjp(fn: Callable[[Tensor], Tensor], x: Tensor, gy: Tensor) -> Tensor:
    """The gradient [B, d] at x [B, d], for gy [B, d_out], of a function that autograd can see through."""
    with torch.enable_grad():
        point = x.detach().requires_grad_()
        return torch.autograd.grad(fn(point), point, gy)[0]


class Writer(Protocol):
    """The one method that a writer needs, such as `torch.utils.tensorboard.SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Record one number."""


class TensorBoard:
    """A step hook that writes the statistics of a box, and on request its sign accuracy.

    Rows on which the box raised an error are written by its type, as `errors/TYPE`. Where there are several workers,
    `worker_0/rows` and the like say what each has done.

    Args:
        writer: A SummaryWriter.
        tag: Prefix of the names written.
        every: Steps between records. Reading the numbers waits for the device.
        exact: The box as a differentiable function, if there is one; then the sign accuracy is written too.

    Example:
        >>> import tempfile
        >>> from torch.utils.tensorboard import SummaryWriter
        >>> box = bondgrad.BlackBox(torch.sin, in_features=3)
        >>> handle = box.register_step_hook(TensorBoard(SummaryWriter(tempfile.mkdtemp()), exact=torch.sin))
    """

    def __init__(
        self, writer: Writer, tag: str = "box", every: int = 1, exact: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.writer, self.tag, self.exact = writer, tag, exact
        self.every = positive_int("every", every)
        self._step = 0

    def __deepcopy__(self, _memo: dict[int, Any]) -> "TensorBoard":
        return copy.copy(self)  # a copy of the model writes to the same place

    def __call__(self, box: "BlackBox", step: "Step") -> None:
        """Write the numbers of every `every`-th step."""
        if self._step % self.every == 0:
            stats = box.stats
            counted = ("calls", "evaluations", "failures", "seconds", "retried", "wasted")
            values = {name: getattr(stats, name) for name in counted} | _by_kind_and_worker(stats)
            values |= {name: float(getattr(stats, name).mean()) for name in ("lower", "upper", "step")}
            if stats.health is not None:
                health = stats.health._asdict() | {"jumps": len(stats.health.jumps)}
                values |= {name: float(value) for name, value in health.items()}
            if self.exact is not None:
                values["sign_accuracy"] = float(sign_accuracy(step.g, exact_vjp(self.exact, step.x, step.gy)))
            for name, value in values.items():
                self.writer.add_scalar(f"{self.tag}/{name}", value, self._step)
        self._step += 1


def _by_kind_and_worker(stats: "Stats") -> dict[str, float]:
    """Errors by their type, and what each worker has done, where there are several."""
    values: dict[str, float] = {f"errors/{kind}": rows for kind, rows in stats.errors.items()}
    for worker in stats.workers if len(stats.workers) > 1 else ():
        median, _, highest = worker.latency
        numbers = {"rows": worker.rows, "busy": worker.busy, "failures": worker.failures}
        numbers |= {"latency_median": median, "latency_0.99": highest}
        values |= {f"worker_{worker.worker}/{name}": number for name, number in numbers.items()}
    return values
