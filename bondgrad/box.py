"""BlackBox: the layer."""

import functools
import math
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bondgrad._arguments import Limits, check_input, chosen, context_rows, positive_float, positive_int
from bondgrad._bridge import attach
from bondgrad._device import look_is_free
from bondgrad._function import RowFunction, describe
from bondgrad._random import Generators
from bondgrad.errors import BoxError
from bondgrad.estimators import Central, Estimator, Forward, Simultaneous, Site
from bondgrad.evaluators import Evaluator, Local
from bondgrad.policies import Bond, Policy, Steps

ESTIMATORS: dict[str, Callable[[], Estimator]] = {
    "central": Central,
    "forward": Forward,
    "simultaneous": Simultaneous,
}
POLICIES: dict[str, Callable[[], Policy]] = {"bond": Bond}
ULPS = 4  # the least step, in units of the rounding of x
POLICY = "policy_"  # prefix of the buffers that hold the policy's state


class Stats(NamedTuple):
    """What a box has cost and done so far. Reading it waits for the device."""

    calls: int  # invocations of the function
    evaluations: int  # rows sent to it
    failures: int  # perturbed rows that came back non-finite
    seconds: float  # spent in the function
    lower: Tensor | None  # [d] the last step's bounds as the policy's formulas gave them, before any cap
    upper: Tensor | None  # [d]
    step: Tensor | None  # [d] mean size of the last step's perturbations, before limits


class Step(NamedTuple):
    """What one backward pass saw, for step hooks."""

    x: Tensor  # [B, d] the rows, inside the limits
    gy: Tensor  # [B, d_out] the loss's gradient at the box's outputs
    g: Tensor  # [B, d] the estimate, as handed on


@dataclass
class _Trace:
    """What the layer remembers for people, not for its work."""

    last: Steps | None = None
    failures: Tensor | int = 0
    warned: bool = False


class BlackBox(nn.Module):
    """A layer around a function that has no gradient.

    The forward pass calls the function once on the batch. The backward pass evaluates it near each row, and turns the
    answers and the gradient that arrives from the loss into the gradient at the inputs. Nothing happens in a backward
    pass that is never asked for: under `torch.no_grad`, or when x needs no gradient, the layer is the function. In
    `eval` mode gradients work too, but leave no trace in the layer's state.

    Args:
        fn: Maps rows to rows, [N, in_features] -> [N, out_features], as torch tensors or as numpy arrays; after x it is
            given the rows of any `context`. An nn.Module is registered, frozen (`requires_grad_(False)`) and kept in
            eval mode.
        in_features: Width of x.
        out_features: Width of the answer. None: learnt from the first call.
        estimator: "central" (BOND), "forward", "simultaneous" (BONDS), or an instance from `bondgrad.estimators`.
        policy: "bond", or an instance from `bondgrad.policies`.
        noise: Half-width b of the noise on the function's outputs. None: the rounding of their floating-point type.
        limits: (low, high), each a number or one number per input. No point outside is ever evaluated: x is clamped,
            and the gradient found at the clamped point is passed on. (A NaN in x is passed on to fn.)
        structure: Which outputs depend on which inputs. None or "dense": all on all.
        state: Not supported yet, leave None: boxes with memory between calls.
        evaluator: Where rows are evaluated. None: `evaluators.Local()`, in this process.
        on_failure: When a perturbed row comes back non-finite: "degrade" uses what is left (the other side of the pair,
            or nothing: a zero) for its entry of the gradient and warns once, on an accelerator when `stats` is read;
            "raise" raises `BoxError`.
        eager: Not supported yet, leave False.
        seed: Of the layer's own random numbers. None: drawn from torch's.

    Example:
        >>> box = BlackBox(lambda x: torch.sin(x), in_features=3)
        >>> model = nn.Sequential(nn.Linear(8, 3), box, nn.Linear(3, 1))
        >>> model(torch.randn(16, 8)).sum().backward()
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        in_features: int,
        out_features: int | None = None,
        *,
        estimator: str | Estimator = "central",
        policy: str | Policy = "bond",
        noise: float | None = None,
        limits: tuple[Any, Any] | None = None,
        structure: str | None = None,
        state: None = None,
        evaluator: Evaluator | None = None,
        on_failure: str = "degrade",
        eager: bool = False,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        if not callable(fn):
            raise TypeError(f"fn must be callable, got {type(fn).__name__}")
        dense = structure is None or (isinstance(structure, str) and structure == "dense")
        if not dense or state is not None or eager:
            raise ValueError("structure other than 'dense', state and eager are not supported yet: leave them out")
        if on_failure not in ("degrade", "raise"):
            raise ValueError(f"on_failure must be 'degrade' or 'raise', got {on_failure!r}")
        if evaluator is not None and not isinstance(evaluator, Evaluator):
            raise ValueError(f"evaluator must be an instance from bondgrad.evaluators, or None, got {evaluator!r}")
        self.in_features = positive_int("in_features", in_features)
        self.estimator: Estimator = chosen("estimator", estimator, ESTIMATORS, Estimator)
        self.policy: Policy = chosen("policy", policy, POLICIES, Policy)
        self.noise = None if noise is None else positive_float("noise", noise)
        self.limits = None if limits is None else Limits(limits, self.in_features)
        self.evaluator = Local() if evaluator is None else evaluator
        self.on_failure = on_failure
        width = None if out_features is None else positive_int("out_features", out_features)

        self.fn = fn.requires_grad_(False).eval() if isinstance(fn, nn.Module) else fn
        self._function = RowFunction(fn, width)
        self._policy_names = []
        for name, value in self.policy.init(self.in_features).items():
            self.register_buffer(POLICY + name, value)
            self._policy_names.append(name)
        self._random = Generators(seed)
        self._trace = _Trace()
        self._step_hooks: OrderedDict[int, Callable[[BlackBox, Step], None]] = OrderedDict()

    # ---- the layer

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        """Evaluate the box.

        Args:
            x: [..., in_features], floating point.
            context: Further inputs of fn, one entry per row of x ([..., anything]); handed on as they are, never moved,
                and given no gradient.

        Returns:
            [..., out_features], in the dtype of x.
        """
        check_input(x, self.in_features)
        lead = x.shape[:-1]
        contexts = context_rows(context, lead)
        # Differences need at least single precision, whatever the network around the box runs in.
        rows = x.reshape(-1, self.in_features) if x.ndim != 2 else x
        if x.dtype.itemsize < 4:
            rows = rows.float()
        point = rows.detach()
        if self.limits is not None:
            point = point.clamp(*self.limits.like(point))
        y = self._evaluate_base(point, contexts)
        if rows.requires_grad and torch.is_grad_enabled():
            # A copy of y is kept, since the answer may lie in a buffer that the next call fills.
            out = attach(rows, point, y.clone(), functools.partial(self._vjp, self.training), contexts).to(x.dtype)
        else:
            out = y.to(x.dtype, copy=True)
        return out if x.ndim == 2 else out.reshape(*lead, -1)

    def _evaluate_base(self, x: Tensor, context: tuple[Tensor, ...]) -> Tensor:
        """The box at x [B, d] itself. What a call that fails may have taught about the function is forgotten."""
        function = self._function
        known = function.out_features, function.interfaces
        try:
            return self.evaluator.run(
                # Copies, since the function may write into its arguments.
                lambda: self.evaluator.evaluate(
                    function, x.clone(memory_format=torch.contiguous_format), tuple(c.clone() for c in context)
                )
            )[0]
        except BaseException:
            function.out_features, function.interfaces = known
            raise

    def _vjp(self, training: bool, x: Tensor, y: Tensor, gy: Tensor, *context: Tensor) -> Tensor:
        """The gradient [B, d] at x [B, d]. All changes of state come last, so an exception leaves none."""
        eps = torch.finfo(x.dtype).eps
        noise = max(eps, self._function.rounding) if self.noise is None else self.noise
        generator = self._random.fork(x.device)
        buffers: dict[str, Any] = self._buffers
        state = {name: buffers[POLICY + name] for name in self._policy_names}
        steps = self.policy.steps(state, x, self.estimator.draws, noise, generator)
        # A step below the rounding of x would vanish in x + step.
        steps = steps._replace(size=torch.add(steps.size, x.abs(), alpha=ULPS * eps))
        low, high = (None, None) if self.limits is None else self.limits.like(x)
        site = Site(x, y, gy, torch.copysign(steps.size, steps.sign), low, high)
        row_bytes = sum(t.itemsize * (t.numel() // len(x)) for t in (x, y, *context))
        wanted = len(x) * self.estimator.evaluations(self.in_features)
        failed: list[Tensor] = []

        def evaluate(points: Tensor, rows: slice) -> tuple[Tensor, Tensor | None]:
            shape = points.shape[:-1]
            nearby = tuple(c[rows].repeat_interleave(shape[1:].numel(), 0) for c in context)
            y, ok = self.evaluator.evaluate(self._function, points.view(-1, self.in_features), nearby)
            # A sum is finite only if all its terms are, which spares the closer look.
            if ok is not None or not look_is_free(y.device) or not math.isfinite(y.sum()):
                finite = torch.isfinite(torch.linalg.vector_norm(y, math.inf, dim=1))  # one pass over y
                ok = (finite if ok is None else finite & ok).view(shape)
                failed.append(ok.numel() - ok.sum())
            return y.view(*shape, -1), ok

        def estimate() -> Tensor:
            failed.clear()
            return self.estimator.vjp(site, evaluate, self.evaluator.portion(row_bytes, wanted, x.device))

        g = self.evaluator.run(estimate).to(x.dtype)
        if not look_is_free(x.device) or not math.isfinite(g.sum()):
            # What could not be estimated is zero; but where the loss's own gradient is not finite neither is ours, as
            # loss scalers expect.
            g = g.nan_to_num(0, 0, 0) + (gy * 0).sum(1, keepdim=True)
        failures = torch.stack(failed).sum() if failed else None
        if failures is not None:
            self._report_failures(failures)
        new_state = self.policy.observe(state, g, steps) if training else state
        if self.estimator.normalize_rows:
            # Scaled to a largest entry of 1 first, lest the squares of the norm over- or underflow.
            g = g / g.abs().amax(1, keepdim=True).clamp_min(torch.finfo(g.dtype).tiny)
            g = nn.functional.normalize(g, dim=1)

        self._trace.last = steps
        if failures is not None:
            self._trace.failures = self._trace.failures + failures
        if training:
            self._random.join(x.device, generator)
            for name, value in new_state.items():
                state[name].copy_(value)
        for hook in tuple(self._step_hooks.values()):
            hook(self, Step(x, gy, g))
        return g

    def _report_failures(self, failures: Tensor) -> None:
        """Raise, or warn once. Where a look at the number is not free, the warning comes when `stats` is read."""
        if self.on_failure == "raise" and failures > 0:
            raise BoxError(
                f"{int(failures)} perturbed rows came back non-finite. Give limits= within which the box answers, or "
                "on_failure='degrade' to go on without them."
            )
        if look_is_free(failures.device):
            self._warn(int(failures))

    def _warn(self, failures: int) -> None:
        if failures > 0 and not self._trace.warned:
            self._trace.warned = True
            warnings.warn(
                f"{failures} perturbed rows came back non-finite; their entries of the gradient are degraded. "
                "box.stats.failures counts them; limits= keeps points inside the range where the box answers.",
                stacklevel=3,
            )

    # ---- seeing what it does

    @property
    def stats(self) -> Stats:
        """Counters since construction, and the last step's perturbations. Not part of the state."""
        function, last, failures = self._function, self._trace.last, int(self._trace.failures)
        self._warn(failures)
        return Stats(
            calls=function.calls,
            evaluations=function.evaluations,
            failures=failures,
            seconds=function.seconds,
            lower=None if last is None else last.lower.cpu().expand(self.in_features),
            upper=None if last is None else last.upper.cpu(),
            step=None if last is None else last.size.mean((0, 1)).cpu(),
        )

    @property
    def out_features(self) -> int | None:
        """Width of the output; None until it was given or seen."""
        return self._function.out_features

    def register_step_hook(self, hook: "Callable[[BlackBox, Step], None]") -> RemovableHandle:
        """Call hook(box, step) after every backward pass; `.remove()` on what this returns ends it."""
        handle = RemovableHandle(self._step_hooks)
        self._step_hooks[handle.id] = hook
        return handle

    def extra_repr(self) -> str:
        """See `nn.Module.extra_repr`."""
        return (
            f"{describe(self.fn)}, in_features={self.in_features}, out_features={self.out_features}, "
            f"estimator={self.estimator}, policy={self.policy}"
        )

    # ---- state

    def train(self, mode: bool = True) -> "BlackBox":
        """As `nn.Module.train`, except that the box itself stays in eval mode."""
        super().train(mode)
        if isinstance(self.fn, nn.Module):
            self.fn.eval()
        return self

    def get_extra_state(self) -> dict[str, Any]:
        """The random numbers, for `state_dict`."""
        return self._random.state()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """The counterpart of `get_extra_state`."""
        self._random.load(state)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "BlackBox":
        """Moves with the model, but neither the box nor the policy's state goes to half precision with it.

        Differences between outputs would be lost to its rounding, and squares of gradients to its range.
        """
        names = [POLICY + name for name in self._policy_names]
        kept = [self.get_buffer(name) for name in names]

        def keep_precision(t: Tensor) -> Tensor:
            moved = fn(t)
            return t.to(moved.device) if moved.is_floating_point() and moved.itemsize < 4 and t.itemsize >= 4 else moved

        super()._apply(keep_precision, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in zip(names, kept, strict=True):
            if not buffer.is_meta:
                self._buffers[name] = buffer.to(self.get_buffer(name).device)
        return self
