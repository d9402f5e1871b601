"""Outputs and gradients of the box under check, and the evaluations that they take."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bondgrad.box import BlackBox
from bondgrad.calling._inputs import Limits
from bondgrad.calling._modules import in_eval_mode
from bondgrad.checking._progress import RequestPace
from bondgrad.evaluators import Driver, Evaluator, Local
from bondgrad.measuring._no_trace import no_trace

ROWS_AT_ONCE = 8192  # rows in one call of the box, so that memory does not grow with the budget


class GradientSampler:
    """Evaluates a box and its gradient on copies of rows, and counts evaluations.

    Args:
        box: [N, d] -> [N, d_out], with a gradient.
        budget: The most evaluations to spend. Callers compare costs with `left` before they ask.
        evaluator: Evaluates the rows of which only the outputs are needed. None: `Local()`.
        pace: Limits the time, and reports progress. None: no limit, and no reports.
    """

    def __init__(
        self, box: Callable[..., Any], budget: int, evaluator: Evaluator | None, pace: RequestPace | None = None
    ) -> None:
        self._box, self.budget, self._driver = box, budget, Driver(Local() if evaluator is None else evaluator)
        self.rows_at_once = self._driver.most = min(ROWS_AT_ONCE, self._driver.max_rows or ROWS_AT_ONCE)
        modules = box.modules() if isinstance(box, nn.Module) else ()
        self._layers = [module for module in modules if isinstance(module, BlackBox)]
        if any(layer.memory is not None for layer in self._layers):
            raise ValueError(
                "check is for boxes without memory, and this one remembers earlier calls: give a box that begins "
                "with the same state at each call"
            )
        self._rows, self._before = 0, self._evaluations_inside()
        self.pace = pace or RequestPace(None, None)

    @property
    def evaluations(self) -> int:
        """The number of rows evaluated by the box, or, if it is larger, by the functions inside every BlackBox."""
        return max(self._rows, self._evaluations_inside() - self._before)

    @property
    def left(self) -> int:
        """Evaluations that may still be spent, and for which there is time."""
        return int(min(self.budget - self.evaluations, self.pace.affordable))

    @property
    def is_late(self) -> bool:
        """Whether it is the time that is short, rather than the evaluations."""
        return self.pace.affordable < self.budget - self.evaluations

    @property
    def has_layers(self) -> bool:
        """Whether the box is or contains a BlackBox."""
        return bool(self._layers)

    def limits(self, given: tuple[Any, Any] | None, resolution: Any, in_features: int) -> Limits:  # noqa: ANN401
        """The limits of the inputs, and their resolution: as given, if there is no BlackBox; otherwise its own.

        The inputs of a BlackBox inside a module need not be those of the module. They count as the same if `limits` and
        `resolution` of the module are those of the BlackBox. Otherwise attributes of these names may mean anything, and
        are left aside.
        """
        for name, value in (("limits", given), ("resolution", resolution)):
            if value is not None and self._layers:
                # For its gradient the layer would evaluate other points, and the values it can set begin at its limits.
                raise ValueError(
                    f"{name} must be None for a box that is or contains a BlackBox, which keeps to its own "
                    f"limits and resolution: give {name} there, BlackBox({name}=...), or assign box.{name}"
                )
        for layer in self._layers:
            own = layer.limits, layer.resolution
            said = getattr(self._box, "limits", None), getattr(self._box, "resolution", None)
            if repr(said) == repr(own):  # numbers, arrays or tensors, which have no comparison in common
                return Limits(layer.limits, in_features, layer.resolution)
        return Limits(given, in_features, resolution)

    @property
    def output_cost(self) -> int:
        """Evaluations per row that outputs take: the readings of a BlackBox that averages."""
        return max(1, sum(layer.repeats for layer in self._layers))

    def gradient_cost(self, rows: int) -> int:
        """The largest number of evaluations that gradients at `rows` rows can take."""
        return max(rows, sum(layer.gradient_evaluations(rows) for layer in self._layers))

    def outputs(self, x: Tensor, context: tuple[Tensor, ...]) -> Tensor:
        """Outputs [N, d_out] at rows x [N, d]; NaN where an output is not finite."""
        tensors, parts, first = (x, *context), [], 0
        while first < len(x):
            rows = slice(first, min(len(x), first + self.pace.rows(len(x), 1)))
            parts.append(self._request(self._outputs, tensors, rows, whole=False))
            first = rows.stop
        y = torch.cat(parts)
        return torch.where(torch.isfinite(y), y, math.nan)

    def gradients(self, x: Tensor, context: tuple[Tensor, ...], gy: Tensor, generator: torch.Generator) -> Tensor:
        """Gradients [N, d] by autograd of the loss gy [N, d_out] · box(x) at rows x [N, d], in float64.

        They are NaN where an output is not finite, and infinite where outputs are finite and the gradient is not.

        The gradient of a layer depends on the rows of its batch, at which it may find its first step. So batches are
        the same whether time is limited or not.
        """
        self.pace.require(self.gradient_cost(len(x)), len(x))
        ask, tensors = functools.partial(self._gradient, generator=generator), (x, gy, *context)
        batches = (slice(first, first + self.rows_at_once) for first in range(0, len(x), self.rows_at_once))
        return torch.cat([self._request(ask, tensors, rows, whole=True) for rows in batches])

    def _request(self, ask: Callable[..., Tensor], tensors: tuple[Tensor, ...], rows: slice, *, whole: bool) -> Tensor:
        """Answers to some rows of tensors [N, ...]."""
        before, begun = self.evaluations, self.pace.begin()
        asked = [t[rows] for t in tensors]
        self._rows += len(asked[0])
        answers = ask(*asked)
        self.pace.end(begun, self.evaluations - before, self.evaluations, self.budget, whole=whole)
        return answers

    def _outputs(self, x: Tensor, *context: Tensor) -> Tensor:
        with torch.no_grad():
            return self._driver.run(lambda: self._driver.ask(self._call, x, context, purpose="probe")).y

    def _gradient(self, x: Tensor, gy: Tensor, *context: Tensor, generator: torch.Generator) -> Tensor:
        x = x.detach().requires_grad_()
        for layer in self._layers:  # in eval mode, a layer draws the same random numbers at every call
            layer.reseed(int(torch.randint(2**63 - 1, (), generator=generator)))
        with torch.enable_grad():
            try:
                y = self._call(x, *context)
                if not y.requires_grad:
                    raise ValueError(
                        "box must give a gradient, but its output at an x that requires grad has none: do not detach "
                        "it, or give a BlackBox around the function"
                    )
                (g,) = torch.autograd.grad(y, x, gy.to(y.dtype), materialize_grads=True)
            except RuntimeError as error:
                if "inplace" not in str(error) and "in-place" not in str(error):
                    raise
                raise ValueError(
                    f"box must not change tensors that its gradient needs: leave out the operation in place. {error}"
                ) from error
        g = torch.where(torch.isfinite(g), g, math.inf).double()
        return torch.where(torch.isfinite(y.detach()).all(1, keepdim=True), g, math.nan)

    def _call(self, x: Tensor, *context: Tensor, seed: int | None = None) -> Tensor:
        """Outputs [N, d_out] at copies of the arguments, since the box may change what it is given."""
        y = self._box(x.clone(), *(c.clone() for c in context))
        if not isinstance(y, Tensor) or y.ndim != 2 or len(y) != len(x) or not y.dtype.is_floating_point:
            shape = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(f"box must return a floating-point tensor [N, d_out] for N={len(x)} rows, got {shape}")
        return y

    def _evaluations_inside(self) -> int:
        return sum(layer.function.evaluations for layer in self._layers)

    @contextlib.contextmanager
    def without_trace(self) -> Iterator[None]:
        """A context in which modules are in eval mode, and after which all state is restored, even on errors."""
        with no_trace(self._box), in_eval_mode(self._box), contextlib.ExitStack() as stack:
            for layer in self._layers:
                stack.enter_context(layer.without_trace())
            yield
