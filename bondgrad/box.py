"""BlackBox: the layer."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bondgrad.calling._elsewhere import chosen_box
from bondgrad.calling._function import RowFunction
from bondgrad.calling._inputs import Limits, check_callable, check_input, context_rows
from bondgrad.calling._memory import ExplicitState, find_memory
from bondgrad.calling._modules import freeze
from bondgrad.errors import BoxError, checked_noise, chosen, positive_int
from bondgrad.estimators import Estimator
from bondgrad.evaluators import Driver, Evaluator, Local, Progress
from bondgrad.policies import Policy
from bondgrad.step._ahead import check_eager, check_seed
from bondgrad.step._assignable import ESTIMATORS, POLICIES, AssignableLayer
from bondgrad.step._records import Step
from bondgrad.step._state import PolicyState
from bondgrad.step._stats import Stats
from bondgrad.step._trials import standard_error
from bondgrad.structure import Structure
from bondgrad.structure.discovery._tracker import AutoStructure, resolve
from bondgrad.torch_support import _autograd as autograd
from bondgrad.torch_support._precision import autocast_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class BlackBox(AssignableLayer):
    """A layer around a function that has no gradient.

    The forward pass calls the function once on the batch (on sequences, with a state, in a few pieces). The backward
    pass evaluates it near each row, and turns the answers and the gradient that arrives from the loss into the gradient
    at the inputs. Under `torch.no_grad`, or when x needs no gradient, the layer is one call of the function. In `eval`
    mode gradients work too, but the policy learns nothing from them.

    Args:
        fn: Maps rows to rows, [N, in_features] -> [N, out_features], as torch tensors, numpy arrays or lists of
            numbers; a coroutine function is awaited, and one of a single sample is `bondgrad.per_row(f)`. After x it is
            given the rows of any `context`, and if it has a parameter `seed`, a number, the same for both ends of a
            move. An nn.Module is registered, frozen (`requires_grad_(False)`) and kept in eval mode. None: the box
            belongs to the evaluator.
        in_features: Width of x.
        out_features: Width of the answer. None: learnt from the first call.
        estimator: "central" (BOND), "forward", "simultaneous" (BONDS), or an instance from `bondgrad.estimators`.
        policy: "calibrated" (measures the noise), "bond" (the paper's), or an instance from `bondgrad.policies`.
        noise: Half-width b of the noise on the function's outputs, for policy="bond" and structure="auto". None: the
            rounding of their floating-point type. "auto": measured at the first training step, and now and then again.
        limits: (low, high), each a number or one number per input. No point outside is ever evaluated: x is clamped,
            and the gradient found at the clamped point is passed on. A row of x with a NaN or an infinite entry is not
            evaluated: it is treated as a row without an output, see `on_failure`. (On an accelerator nothing waits to
            find such rows: they are evaluated inside the limits, and their output, and so the loss, is NaN.)
        resolution: The step in which inputs can be set, as that of a DAC, a number or one per input. Every point of the
            box is a whole number of steps above the lower limit, or from zero where there is none: x is rounded, moves
            are one step at least, and differences are divided by what was set. Rows that are not finite are treated as
            with limits. It can be assigned later, as limits can.
        structure: Which outputs depend on which inputs; inputs that share none move together, and a gradient costs
            evaluations per group instead of per input. A bool pattern [out_features, in_features], an instance from
            `bondgrad.structure` (`Blocks`, or `Sequence` for x [..., T, in_features]), "dense" (all on all), or "auto"
            (found out at the first training step, and watched from then on). None: what fn says of itself as
            `fn.structure`, or "dense".
        state: For a box with memory, fn(x, state, *context) -> (y, state): the state it begins with, tensors [N, ...]
            with one entry per row, or [1, ...]. The forward pass moves it on, the backward pass starts from what it
            was. Evaluation mode has a state of its own, which is reset whenever that mode is entered. An fn with
            methods `snapshot()` and `restore(snapshot)` keeps its own state, and is recognised.
        evaluator: Where rows are evaluated. None: `evaluators.Local()`, in this process.
        repeats: How many readings of a noisy box are taken at every point. Their mean is the answer: its noise is
            1/sqrt(repeats) of that of one reading. Each reading is an evaluation, with a `seed` of its own if fn takes
            one; those of the two ends of a move take turns. It can be assigned later.
        on_failure: What becomes of a row without a finite output, after all `retries` of the evaluator. "degrade" goes
            on, and warns once, on an accelerator when `stats` is read. A perturbed row is left out of the gradient;
            where the other end of its pair has an output, that is used. A row of the forward pass gets the mean of the
            outputs and no gradient, in evaluation NaN; `last_ok` says which rows these are. "raise" raises `BoxError`.
            A mistake in the code (TypeError, NameError, AttributeError, a wrong shape), and a request to which there
            is no answer at all, raise `BoxError` in any case.
        eager: Make the evaluations of a gradient in the forward pass of a training step: with `Local` in the same call
            as the rows themselves, so that a box with a cost per call is called once a step; with other evaluators
            beside the rest of the network. For boxes whose calls are slow: what is evaluated for a gradient that is
            never asked for is wasted, and counted in `stats.wasted`. Steps with a trial or a search are as without.
        full_precision: Run the function with autocast, TF32 and other shortcuts of float32 switched off, since they
            round away the differences that a gradient is made of. False: with the settings that hold around the layer.
        process_group: The processes that train this model together, whose policies are to learn as one. None: those of
            the DistributedDataParallel around the layer, if there is one; give it with other wrappers, such as FSDP.
        seed: The seed of the layer's own random numbers. None: drawn from torch's.

    Example:
        >>> box = BlackBox(lambda x: torch.sin(x), in_features=3)
        >>> model = nn.Sequential(nn.Linear(8, 3), box, nn.Linear(3, 1))
        >>> model(torch.randn(16, 8)).sum().backward()
    """

    def __init__(
        self,
        fn: Callable[..., Any] | None,
        in_features: int,
        out_features: int | None = None,
        *,
        estimator: str | Estimator = "central",
        policy: str | Policy = "calibrated",
        noise: float | str | None = None,
        limits: tuple[Any, Any] | None = None,
        resolution: Any = None,  # noqa: ANN401
        structure: "str | Structure | Tensor | np.ndarray | None" = None,
        state: Any = None,  # noqa: ANN401
        evaluator: Evaluator | None = None,
        repeats: int = 1,
        on_failure: str = "degrade",
        eager: bool = False,
        full_precision: bool = True,
        process_group: "ProcessGroup | None" = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.progress = Progress()
        fn = chosen_box(fn, evaluator, state)
        check_callable(fn)
        if on_failure not in ("degrade", "raise"):
            raise ValueError(f"on_failure must be 'degrade' or 'raise', got {on_failure!r}")
        self.in_features = positive_int("in_features", in_features)
        self.noise = checked_noise(noise)
        self._limits = Limits.of(limits, self.in_features, resolution)
        self.on_failure, self.full_precision = on_failure, full_precision
        self._estimator: Estimator = chosen("estimator", estimator, ESTIMATORS, Estimator)
        self._policy: Policy = chosen("policy", policy, POLICIES, Policy)
        self.driver = Driver(Local() if evaluator is None else evaluator, self.progress, limits=self._limits)
        self.repeats = repeats
        width = None if out_features is None else positive_int("out_features", out_features)
        self._seed, self.tracker = seed, None
        self._adopt_structure(structure, fn, width)
        self.memory = find_memory(fn, state, self.training)
        form = self.memory.form if isinstance(self.memory, ExplicitState) else None
        width = width or self.structure.width(self.in_features)
        self.function = RowFunction(fn, width, self.in_features if self.structure.in_time else None, form)
        check_seed(self.function, self.estimator, stacklevel=3)
        check_eager(eager, self.memory, self.estimator, self.function)
        self.eager = bool(eager)
        self.fn = fn
        self.policy_state = PolicyState(self.policy, self.in_features, seed, process_group, self.progress)

    # ---- forward

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        """Evaluate the box.

        Args:
            x: [..., in_features], floating point; of sequences [..., T, in_features].
            context: Further inputs of fn, one entry per row of x, or per sequence ([..., anything]); handed on as they
                are, never moved, and given no gradient.

        Returns:
            [..., out_features], in the dtype of x.
        """
        in_time = self.function.time_features is not None
        check_input(x, self.in_features, in_time)
        autograd.check_tangent(x)
        lead = x.shape[:-1]
        batch = lead[:-1] if in_time else lead
        contexts = context_rows(context, batch)
        # Differences need at least single precision, whatever the network around the box runs in.
        rows = x if x.ndim == 2 and not in_time else x.reshape(batch.numel(), -1).contiguous()
        if x.dtype.itemsize < 4:
            rows = rows.float()
        autocast = None if self.full_precision else autocast_dtype(x)
        if not autograd.needs_operators():
            y = self._attached(rows, contexts, autocast)
        elif self.memory is not None and not torch.compiler.is_compiling():
            raise BoxError(
                "a box with memory cannot be transformed by torch.func, since its calls depend on their order: use "
                "backward() or torch.autograd.grad instead"
            )
        elif torch.compiler.is_compiling() and (self.memory is not None or self.out_features is None):
            # An error where breaks are not allowed.
            torch._dynamo.graph_break(
                msg="a BlackBox with memory, or of unknown width: give out_features, or call it once before"
            )
            y = torch.compiler.disable(self._attached)(rows, contexts, autocast)  # type: ignore[no-untyped-call]
        else:
            y = autograd.attach(rows, self._number, autocast, self.training, contexts)
        out = y.to(x.dtype)
        return out if x.ndim == 2 and not in_time else out.reshape(*lead, -1)

    def reset(self) -> None:
        """Return a box with memory to its initial state, to begin a new stream. Eval mode has a stream of its own."""
        if self.memory is None:
            raise BoxError("this BlackBox has no memory to reset: give state=, or an fn with snapshot() and restore()")
        self.memory.reset(self.training)
        self.answers.clear()

    # ---- seeing what it does

    @property
    def stats(self) -> Stats:
        """Counters since construction, and the lengths of the last moves. They are not saved with the model."""
        health = self.health.last
        if health is not None and self.tracker is not None:
            health = health._replace(woken=self.tracker.woken)
        return self.trace.stats(self.function, self.driver.record, health)

    @property
    def last_ok(self) -> Tensor | None:
        """Which rows [B] of the last forward pass the box answered; B counts all rows of x, or all sequences.

        Other rows have a substitute as output, and no gradient: a loss may leave them out. None before the first
        forward pass. On an accelerator, rows that are not finite are not looked for.
        """
        return self.trace.last_ok

    def standard_error(self, step: Step) -> Tensor:
        """The standard deviation that noise gives each entry of the gradient which a step hook was just given.

        It needs a policy that measures noise, and is NaN until the noise is known. With an estimator that scales rows
        to norm 1, it is that of the gradient before scaling.
        """
        return standard_error(self.parts(), self.policy_state, self.trace.last, step)

    def register_step_hook(self, hook: "Callable[[BlackBox, Step], None]") -> RemovableHandle:
        """Call hook(box, step) after every backward pass, until `.remove()` of the handle that is returned."""
        handle = RemovableHandle(self.hooks)
        self.hooks[handle.id] = hook
        return handle

    def extra_repr(self) -> str:
        """See `nn.Module.extra_repr`."""
        return (
            f"{self.function.name}, in_features={self.in_features}, out_features={self.out_features}, "
            f"estimator={self.estimator}, policy={self.policy}, structure={self.structure}"
        )

    # ---- state

    def train(self, mode: bool = True) -> "BlackBox":
        """As `nn.Module.train`, except that the box itself stays in eval mode."""
        if self.memory is not None and mode != self.training:
            self.memory.switch(mode)
        super().train(mode)
        if isinstance(self.fn, nn.Module):
            freeze(self.fn)
        return self

    def __setattr__(self, name: str, value: Any) -> None:  # noqa: ANN401
        """Set an attribute; another `fn` replaces the box, and a policy or estimator may be a module or not."""
        if isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
            return
        if name in ("_policy", "_estimator"):
            self._modules.pop(name, None)  # a part that is no module may take its place
        if name == "fn":
            check_callable(value)
            value = freeze(value) if isinstance(value, nn.Module) else value
            if hasattr(self, "fn"):
                self._replace_box(value)
            self.function = self.function.replaced(value, self.function.time_features)
            self._modules.pop("fn", None)  # a function may take the place of a module
        super().__setattr__(name, value)

    def _replace_box(self, fn: Callable[..., Any]) -> None:
        """Drop everything that was learnt about the box so far, or refuse a box for which this layer was not made."""
        memory = self.memory if isinstance(self.memory, ExplicitState) else find_memory(fn, None, self.training)
        if not self._structure_given:
            found = resolve(None, fn)
            if isinstance(found, AutoStructure) or self.tracker or found.in_time != self.structure.in_time:
                raise ValueError(f"a box with structure {getattr(fn, 'structure', None)} needs a BlackBox of its own")
            found.check(self.in_features, self.out_features)
            self._structure = found
        elif self.tracker is not None:
            self.tracker.forget()
        self.memory = memory
        if isinstance(memory, ExplicitState):
            for training in (True, False):
                memory.reset(training)
        self.answers.clear()
        self._forget()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or unpickled layer, which gets a number of its own."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._number = autograd.register(self)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:  # noqa: ANN401
        """Load a state; those saved when `tracker` was called `findings` are accepted, too."""
        before, now = f"{prefix}findings._extra_state", f"{prefix}tracker._extra_state"
        if before in state_dict:
            state_dict[now] = state_dict.pop(before)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "BlackBox":
        """Move the box with the model, except to half precision, in which differences would be lost."""

        def keep_precision(t: Tensor) -> Tensor:
            moved = fn(t)
            return t.to(moved.device) if moved.is_floating_point() and moved.itemsize < 4 and t.itemsize >= 4 else moved

        super()._apply(keep_precision, recurse)  # type: ignore[no-untyped-call]
        return self
