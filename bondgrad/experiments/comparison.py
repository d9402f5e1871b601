"""The gradient of a step, compared with the exact one."""

import math
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from bondgrad._trace import Step
from bondgrad.experiments.model import Parts
from bondgrad.metrics import exact_vjp, sign_accuracy

# What is written down of a step that is looked at.
LOOK = ("step", "train_loss", "sign_accuracy", "step_mean", "step_max", "lower", "upper", "gradient_norm")
WINDOWS = 200  # to which these are reduced in the end
STEEPEST = {"step_max": max, "upper": max, "lower": min}  # where a mean would hide what matters


class Comparison:
    """Looks at steps of training, without a trace in them.

    Args:
        parts: Of the model.
        behind: The loss, from the box's outputs and the targets on.
        precision: Of the networks.
        device: Where the work is done.
    """

    def __init__(
        self,
        parts: Parts,
        behind: Callable[[Tensor, Tensor], Tensor],
        precision: Callable[[], AbstractContextManager[Any]],
        device: torch.device,
    ) -> None:
        self.parts, self.behind, self.precision, self.device = parts, behind, precision, device
        self._seen: Step | None = None
        if parts.black_box is not None:
            parts.black_box.register_step_hook(self._saw)

    def _saw(self, _: object, step: Step) -> None:
        self._seen = step

    def before(self, x: Tensor, y: Tensor) -> Any:  # noqa: ANN401
        """What the exact gradient needs that the step changes: the box's memory, or for SPSA all the weights."""
        exact, black_box = self.parts.exact, self.parts.black_box
        assert exact is not None
        if black_box is not None:
            memory = black_box.memory
            return None if memory is None else memory.before(1, True, self.device)[0]
        assert self.parts.through is not None
        if exact.state is not None and self.parts.through.state is not None:
            exact.state.copy_(self.parts.through.state)
        buffers = {name: t.clone() for name, t in self.parts.read_in.named_buffers()}  # averages must not notice
        exact.still = True
        with self.precision():
            a = torch.func.functional_call(self.parts.read_in, buffers, (x,))
        loss = self.behind(exact(a), y)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(self.parts.read_in.parameters()))])

    def look(self, number: int, loss: Tensor, before: Any) -> Tensor:  # noqa: ANN401
        """What there is to see of the step just taken: [len(LOOK)], on the device; NaN where there is nothing."""
        nothing = torch.full((), math.nan, device=self.device)
        if self.parts.black_box is None:
            estimated = torch.cat([p.grad.flatten() for p in self.parts.read_in.parameters() if p.grad is not None])
            rest = [sign_accuracy(estimated, before), *[nothing] * 4, torch.linalg.vector_norm(before)]
        else:
            step, exact = self._seen, self.parts.exact
            assert step is not None
            assert exact is not None
            if before is None:
                reference = exact_vjp(exact.reservoir, step.x, step.gy)
            else:
                reference = exact_vjp(lambda x: exact.reservoir(x, before)[0], step.x, step.gy)
            last = self.parts.black_box._trace.last
            assert last is not None
            sizes = last.size.mean((0, 1))  # [d]
            bounds = (sizes.mean(), sizes.amax(), last.lower.amin(), last.upper.amax())
            rest = [sign_accuracy(step.g, reference), *bounds, torch.linalg.vector_norm(reference)]
        count = torch.full((), float(number), device=self.device)
        return torch.stack([t.detach().float() for t in (count, loss, *rest)])


def thinned(trace: list[list[float]], windows: int = WINDOWS) -> dict[str, list[float | None]]:
    """By name, reduced to so many windows: means, and extremes where they are what matters."""
    size = -(-len(trace) // windows)
    result: dict[str, list[float | None]] = {}
    for i, name in enumerate(LOOK):
        parts = ([row[i] for row in trace[j : j + size] if math.isfinite(row[i])] for j in range(0, len(trace), size))
        result[name] = [(STEEPEST.get(name, statistics.fmean)(part) if part else None) for part in parts]
    return result


def mean(values: list[float]) -> float | None:
    """Of those that are known."""
    known = [value for value in values if value == value]
    return statistics.fmean(known) if known else None
