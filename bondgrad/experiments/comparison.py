"""The gradient of a training step, compared with the exact one."""

import math
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bondgrad.experiments.model import Parts
from bondgrad.metrics import exact_vjp, sign_accuracy
from bondgrad.step._records import Step
from bondgrad.torch_support._precision import arithmetic

# Ways to count the right signs of a step. The paper does not say which is its own.
SIGNS = (
    "sign_accuracy",  # of the gradient at the box's inputs
    "parameter_sign_accuracy",  # of the read-in's parameters, those with an exact gradient of zero left out
    "all_parameter_sign_accuracy",  # of all its parameters: two zeros agree
    "bias_sign_accuracy",  # of its last bias alone, which is the gradient at the box's inputs summed over the batch
)
# What is written down of a step that is compared.
LOOK = (
    "step",
    "train_loss",
    "sign_accuracy",
    "step_mean",
    "step_max",
    "lower",
    "upper",
    "gradient_norm",
    *SIGNS[1:],
)
WINDOWS = 200  # to which these are reduced in the end
STEEPEST = {"step_max": max, "upper": max, "lower": min}  # where a mean would hide what matters


class ReadInGraph(NamedTuple):
    """The read-in's outputs for one batch, attached to copies of its parameters, which the step then changes."""

    outputs: Tensor  # [B, d]
    parameters: list[Tensor]

    def gradient(self, g: Tensor) -> Tensor:
        """The parameters' gradient [p] that a gradient g [..., d] at the outputs gives."""
        parts = torch.autograd.grad(self.outputs, self.parameters, g.reshape_as(self.outputs), retain_graph=True)
        return torch.cat([part.flatten() for part in parts])


class StateBeforeStep(NamedTuple):
    """What a comparison needs and the step changes."""

    read_in: ReadInGraph | None = None  # None for SPSA, which estimates no gradient at the box's inputs
    memory: Any = None  # of a box that has one
    exact: Tensor | None = None  # [p] the exact gradient of the parameters, for SPSA


class Comparison:
    """Compares training steps with the exact gradient, and leaves no trace in them.

    Both gradients at the box's inputs, the estimated and the exact one, are also propagated to the read-in's parameters
    through the same graph, in float32, so that the signs there differ by the estimate and not by a network's rounding.

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

    def before(self, x: Tensor, y: Tensor) -> StateBeforeStep:
        """To be called before the step on this batch."""
        black_box = self.parts.black_box
        if black_box is None:
            return StateBeforeStep(exact=self._exact(x, y))
        memory = None if black_box.memory is None else black_box.memory.before(1, True, self.device)[0]
        parameters = {name: p.detach().clone().requires_grad_() for name, p in self.parts.read_in.named_parameters()}
        with arithmetic(True, self.device, None), torch.enable_grad():
            outputs = torch.func.functional_call(self.parts.read_in, parameters | self._buffers(), (x,))
        return StateBeforeStep(ReadInGraph(outputs, list(parameters.values())), memory)

    def _buffers(self) -> dict[str, Tensor]:
        """Copies of the read-in's buffers: running averages must not notice a comparison."""
        return {name: t.clone() for name, t in self.parts.read_in.named_buffers()}

    def _exact(self, x: Tensor, y: Tensor) -> Tensor:
        """The exact gradient [p] of the read-in's parameters, with what the box remembers now."""
        exact, through = self.parts.exact, self.parts.through
        assert exact is not None
        assert through is not None
        if exact.state is not None and through.state is not None:
            exact.state.copy_(through.state)
        exact.still = True
        with self.precision():
            a = torch.func.functional_call(self.parts.read_in, self._buffers(), (x,))
        loss = self.behind(exact(a), y)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(self.parts.read_in.parameters()))])

    def look(self, number: int, loss: Tensor, before: StateBeforeStep) -> Tensor:
        """What there is to see of the step just taken: [len(LOOK)], on the device; NaN where there is nothing."""
        nothing = torch.full((), math.nan, device=self.device)
        if before.read_in is None:
            assert before.exact is not None
            estimated = torch.cat([p.grad.flatten() for p in self.parts.read_in.parameters() if p.grad is not None])
            norm = torch.linalg.vector_norm(before.exact)
            rest = [*[nothing] * 5, norm, *self._parameter_signs(estimated, before.exact)]
        else:
            rest = self._at_the_box(before.read_in, before.memory)
        count = torch.full((), float(number), device=self.device)
        return torch.stack([t.detach().float() for t in (count, loss, *rest)])

    def _at_the_box(self, read_in: ReadInGraph, memory: Any) -> list[Tensor]:  # noqa: ANN401
        """The numbers of `LOOK` after the loss, of a step with an estimate at the box's inputs."""
        step, exact, black_box = self._seen, self.parts.exact, self.parts.black_box
        assert step is not None
        assert exact is not None
        assert black_box is not None
        if memory is None:
            reference = exact_vjp(exact.reservoir, step.x, step.gy)
        else:
            reference = exact_vjp(lambda x: exact.reservoir(x, memory)[0], step.x, step.gy)
        last = black_box.trace.last
        assert last is not None
        sizes = last.size.mean((0, 1))  # [d]
        bounds = (sizes.mean(), sizes.amax(), last.lower.amin(), last.upper.amax())
        with arithmetic(True, self.device, None):
            gradients = read_in.gradient(step.g), read_in.gradient(reference)
        signs = self._parameter_signs(*gradients)
        return [sign_accuracy(step.g, reference), *bounds, torch.linalg.vector_norm(reference), *signs]

    def _parameter_signs(self, g: Tensor, reference: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The share of right signs of a gradient g [p] of all parameters, counted in the ways of `SIGNS[1:]`."""
        *_, bias = self.parts.read_in.parameters()
        entries = slice(len(g) - bias.numel(), None)
        agreement = (g.sign() == reference.sign()).float().mean()
        return sign_accuracy(g, reference), agreement, sign_accuracy(g[entries], reference[entries])


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


def deviation(values: list[float]) -> float | None:
    """The standard deviation over single steps, of those that are known."""
    known = [value for value in values if value == value]
    return statistics.pstdev(known) if known else None


def column(looks: list[list[float]], name: str) -> list[float]:
    """One number of every step that was compared."""
    return [look[LOOK.index(name)] for look in looks]
