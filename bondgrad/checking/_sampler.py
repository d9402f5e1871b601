"""Outputs and gradients of the box under check, and what they cost."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bondgrad.box import BlackBox
from bondgrad.calling._modules import in_eval_mode
from bondgrad.evaluators import Driver, Evaluator, Local, Request
from bondgrad.measuring._no_trace import no_trace

ROWS_AT_ONCE = 8192  # rows in one call of the box, so that memory does not grow with the budget


class GradientSampler:
    """Evaluates a box and its gradient on copies of rows, and counts evaluations.

    Args:
        box: [N, d] -> [N, d_out], with a gradient.
        budget: The most evaluations to spend. Callers compare costs with `left` before they ask.
        evaluator: Evaluates the rows of which only the outputs are asked for. None: `Local()`.
    """

    def __init__(self, box: Callable[..., Any], budget: int, evaluator: Evaluator | None) -> None:
        self.budget, self.evaluations = budget, 0
        self._box, self._driver = box, Driver(Local() if evaluator is None else evaluator)
        modules = box.modules() if isinstance(box, nn.Module) else ()
        self._layers = [module for module in modules if isinstance(module, BlackBox)]
        if any(layer.memory is not None for layer in self._layers):
            raise ValueError("check is for boxes without memory: this one remembers earlier calls")

    @property
    def left(self) -> int:
        """Evaluations that may still be spent."""
        return self.budget - self.evaluations

    @property
    def rows_at_once(self) -> int:
        """The most rows in one call of the box."""
        return min(ROWS_AT_ONCE, self._driver.max_rows or ROWS_AT_ONCE)

    def gradient_cost(self, rows: int) -> int:
        """The most evaluations that the next gradients at so many rows can take."""
        return max(rows, sum(layer.gradient_evaluations(rows) for layer in self._layers))

    def outputs(self, x: Tensor, context: tuple[Tensor, ...]) -> Tensor:
        """The box at rows x [N, d]: [N, d_out], NaN where an output is not finite."""
        with torch.no_grad(), self._counted(len(x)):
            parts = [
                self._driver.run(
                    functools.partial(self._driver.ask, Request(self._call, some, tuple(rest), purpose="probe"))
                )
                for some, *rest in self._portions(x, *context)
            ]
        y = torch.cat(parts)
        return torch.where(torch.isfinite(y), y, math.nan)

    def gradients(self, x: Tensor, context: tuple[Tensor, ...], gy: Tensor, generator: torch.Generator) -> Tensor:
        """What autograd gives at rows x [N, d] for the loss gy [N, d_out] · box(x): [N, d] in float64.

        It is NaN where the box has no output, and infinite where it has one and the gradient is not finite.
        """
        return torch.cat([self._gradient(*part, generator=generator) for part in self._portions(x, gy, *context)])

    def _portions(self, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Rows [N, ...] each, in portions for one call of the box."""
        for first in range(0, len(rows[0]), self.rows_at_once):
            yield tuple(t[first : first + self.rows_at_once] for t in rows)

    def _gradient(self, x: Tensor, gy: Tensor, *context: Tensor, generator: torch.Generator) -> Tensor:
        x = x.detach().requires_grad_()
        for layer in self._layers:  # in eval mode, a layer draws the same random numbers at every call
            layer.reseed(int(torch.randint(2**63 - 1, (), generator=generator)))
        with torch.enable_grad(), self._counted(len(x)):
            try:
                y = self._call(x, *context)
                if not y.requires_grad:
                    raise ValueError("box must give a gradient: its output at an x that requires grad has none")
                (g,) = torch.autograd.grad(y, x, gy.to(y.dtype), allow_unused=True)
            except RuntimeError as error:
                if "inplace" not in str(error) and "in-place" not in str(error):
                    raise
                raise ValueError(f"box must not change tensors that its gradient needs: {error}") from error
        g = torch.zeros_like(x) if g is None else g
        g = torch.where(torch.isfinite(g), g, math.inf).double()
        return torch.where(torch.isfinite(y.detach()).all(1, keepdim=True), g, math.nan)

    def _call(self, x: Tensor, *context: Tensor, seed: int | None = None) -> Tensor:
        """The box at copies of its arguments, since it may change what it is given."""
        y = self._box(x.clone(), *(c.clone() for c in context))
        if not isinstance(y, Tensor) or y.ndim != 2 or len(y) != len(x) or not y.dtype.is_floating_point:
            shape = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(f"box must return a floating-point tensor [N, d_out] for N={len(x)} rows, got {shape}")
        return y

    @contextlib.contextmanager
    def _counted(self, rows: int) -> Iterator[None]:
        """Count the evaluations of the functions inside every BlackBox; where there is none, the rows."""
        before = sum(layer.function.evaluations for layer in self._layers)
        yield
        self.evaluations += max(rows, sum(layer.function.evaluations for layer in self._layers) - before)

    @contextlib.contextmanager
    def without_trace(self) -> Iterator[None]:
        """Modules are in eval mode meanwhile; afterwards everything is as it was, whatever happens."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(no_trace(self._box))
            stack.enter_context(in_eval_mode(self._box))
            for layer in self._layers:
                stack.enter_context(layer.without_trace())
            yield
