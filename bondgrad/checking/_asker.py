"""Asking a box for answers and gradients, on copies, without a trace, and counting what that costs."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bondgrad.box import BlackBox
from bondgrad.calling._modules import in_eval_mode
from bondgrad.measuring._no_trace import no_trace
from bondgrad.policies import MeasuringPolicy
from bondgrad.step._state import PolicyState
from bondgrad.step._trials import SETTINGS
from bondgrad.torch_support._random import Generators


class Asker:
    """The box, and how many rows it was asked about.

    Args:
        box: [N, d] -> [N, d_out].
        budget: The most rows to ask about. Whoever asks looks at `left` before.
    """

    def __init__(self, box: Callable[..., Any], budget: int) -> None:
        self.box, self.budget, self.evaluations = box, budget, 0
        modules = list(box.modules()) if isinstance(box, nn.Module) else []
        self.layers = [module for module in modules if isinstance(module, BlackBox)]
        self._states = [module for module in modules if isinstance(module, PolicyState)]
        if any(layer.memory is not None for layer in self.layers):
            raise ValueError("check is for boxes without memory: this one remembers earlier calls")

    @property
    def left(self) -> int:
        """Evaluations that may still be spent."""
        return self.budget - self.evaluations

    @property
    def gradient_cost(self) -> int:
        """The most evaluations that the gradient of one row takes. A BlackBox asks its function meanwhile."""
        return max(1, sum(1 + layer.estimator.evaluations(layer.in_features) for layer in self.layers))

    @property
    def beginning_cost(self) -> int:
        """The most evaluations that the first gradient takes beyond that: policies may have to find a first step."""
        cost = 0
        for layer in self.layers:
            policy = layer.policy
            if isinstance(policy, MeasuringPolicy) and layer.policy_state.schedule.trials == 0:
                gradient = layer.estimator.evaluations(layer.in_features) if layer.eval_start is None else 0
                cost += SETTINGS.start_rows * (policy.start_slopes * gradient + 2)
        return cost

    def answers(self, x: Tensor, context: tuple[Tensor, ...]) -> Tensor:
        """The box at rows x [N, d]: [N, d_out]."""
        with torch.no_grad(), self._counted(len(x)):
            return self._called(x, context)

    def gradient(
        self, x: Tensor, context: tuple[Tensor, ...], gy: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """What autograd gives at rows x [N, d], for the loss gy [N, d_out] · box(x).

        Returns:
            The gradient [N, d] in float64, and bool [N]: which rows have an answer.
        """
        x = x.detach().requires_grad_()
        with torch.enable_grad(), self._counted(len(x)), self._other_random_numbers(generator):
            try:
                y = self._called(x, context)
                if not y.requires_grad:
                    raise ValueError("box must give a gradient: its output at an x that requires grad has none")
                (g,) = torch.autograd.grad(y, x, gy.to(y.dtype), allow_unused=True)
            except RuntimeError as error:
                if "inplace" not in str(error) and "in-place" not in str(error):
                    raise
                raise ValueError(f"box must not change tensors that its gradient needs: {error}") from error
        g = torch.zeros_like(x) if g is None else g
        return g.double(), torch.isfinite(y.detach()).all(1)

    def _called(self, x: Tensor, context: tuple[Tensor, ...]) -> Tensor:
        """With copies, since a box may change what it is given."""
        y = self.box(x.clone(), *(c.clone() for c in context))
        if not isinstance(y, Tensor) or y.ndim != 2 or len(y) != len(x) or not y.dtype.is_floating_point:
            shape = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(f"box must return a floating-point tensor [N, d_out] for N={len(x)} rows, got {shape}")
        return y

    @contextlib.contextmanager
    def _counted(self, rows: int) -> Iterator[None]:
        """What a BlackBox asks of its function counts, else the rows."""
        before = sum(layer.function.evaluations for layer in self.layers)
        yield
        self.evaluations += max(rows, sum(layer.function.evaluations for layer in self.layers) - before)

    @contextlib.contextmanager
    def _other_random_numbers(self, generator: torch.Generator) -> Iterator[None]:
        """For every BlackBox: by itself, it draws the same in eval mode whenever it is called."""
        before = [state.random for state in self._states]
        for state in self._states:
            state.random = Generators(int(torch.randint(2**63 - 1, (), generator=generator)))
        try:
            yield
        finally:
            for state, random in zip(self._states, before, strict=True):
                state.random = random

    @contextlib.contextmanager
    def no_trace(self) -> Iterator[None]:
        """Meanwhile, modules are in eval mode; afterwards all is as it was, whatever happens.

        Statistics of every BlackBox go to a temporary trace, which says nothing of failures.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(no_trace(self.box))
            stack.enter_context(in_eval_mode(self.box))
            for layer in self.layers:
                stack.enter_context(layer.without_trace())
            yield


def portions(total: int, most: int) -> Iterator[int]:
    """Parts of a total, none larger than `most`."""
    for first in range(0, total, max(1, most)):
        yield min(max(1, most), total - first)
