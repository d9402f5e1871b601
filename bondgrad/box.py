"""BlackBox: the layer."""

import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bondgrad.calling import _arguments as arguments
from bondgrad.calling._function import RowFunction, describe, freeze
from bondgrad.calling._memory import Carried, find_memory
from bondgrad.errors import BoxError
from bondgrad.estimators import Central, Estimator, Forward, Simultaneous
from bondgrad.evaluators import Evaluator, Local
from bondgrad.policies import Bond, Calibrated, Policy
from bondgrad.step._backward import Circumstances, differentiate
from bondgrad.step._forward import evaluate
from bondgrad.step._health import Health
from bondgrad.step._state import PolicyState
from bondgrad.step._trace import Stats, Step, Trace
from bondgrad.step._trials import half_width, standard_error, trial_due
from bondgrad.structure import Structure
from bondgrad.structure._resolve import resolve
from bondgrad.structure.discovery._tracker import Findings, Unknown
from bondgrad.torch_support import _operators as operators
from bondgrad.torch_support._bridge import attach, check_tangent
from bondgrad.torch_support._checkpoint import Answers
from bondgrad.torch_support._precision import arithmetic, autocast_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ESTIMATORS: dict[str, Callable[[], Estimator]] = {"central": Central, "forward": Forward, "simultaneous": Simultaneous}
POLICIES: dict[str, Callable[[], Policy]] = {"bond": Bond, "calibrated": Calibrated}


class BlackBox(nn.Module):
    """A layer around a function that has no gradient.

    The forward pass calls the function once on the batch (on sequences, with a state, in a few pieces). The backward
    pass evaluates it near each row, and turns the answers and the gradient that arrives from the loss into the gradient
    at the inputs. Nothing happens in a backward pass that is never asked for: under `torch.no_grad`, or when x needs no
    gradient, the layer is the function. In `eval` mode gradients work too, but leave no trace in the layer's state.

    Args:
        fn: Maps rows to rows, [N, in_features] -> [N, out_features], as torch tensors or as numpy arrays; after x it is
            given the rows of any `context`, and if it has a parameter `seed`, a number, the same for both ends of a
            move. An nn.Module is registered, frozen (`requires_grad_(False)`) and kept in eval mode.
        in_features: Width of x.
        out_features: Width of the answer. None: learnt from the first call.
        estimator: "central" (BOND), "forward", "simultaneous" (BONDS), or an instance from `bondgrad.estimators`.
        policy: "calibrated" (measures the noise), "bond" (the paper's), or an instance from `bondgrad.policies`.
        noise: Half-width b of the noise on the function's outputs, for policy="bond" and structure="auto". None: the
            rounding of their floating-point type. "auto": measured at the first training step, and now and then again.
        limits: (low, high), each a number or one number per input. No point outside is ever evaluated: x is clamped,
            and the gradient found at the clamped point is passed on. (A NaN in x is passed on to fn.)
        structure: Which outputs depend on which inputs; inputs that share none move together, and a gradient costs
            evaluations per group instead of per input. A bool pattern [out_features, in_features], an instance from
            `bondgrad.structure` (`Blocks`, or `Sequence` for x [..., T, in_features]), "dense" (all on all), or "auto"
            (found out at the first training step, and watched from then on). None: what fn says of itself as
            `fn.structure`, or "dense".
        state: For a box with memory, fn(x, state, *context) -> (y, state): the state it begins with, tensors [N, ...]
            with one entry per row, or [1, ...]. The forward pass moves it on, the backward pass starts from what it
            was. Evaluation mode has a state of its own, which begins anew whenever that mode is entered. An fn with
            methods `snapshot()` and `restore(snapshot)` keeps its own state, and is recognised.
        evaluator: Where rows are evaluated. None: `evaluators.Local()`, in this process.
        on_failure: When a perturbed row comes back non-finite: "degrade" uses what is left (the other side of the pair,
            or nothing: a zero) for its entry of the gradient and warns once, on an accelerator when `stats` is read;
            "raise" raises `BoxError`.
        eager: Not supported yet, leave False.
        full_precision: Run the function with autocast, TF32 and other shortcuts of float32 switched off, since they
            round away the differences that a gradient is made of. False: as it is around the layer.
        process_group: The processes that train this model together, whose policies are to learn as one. None: those of
            the DistributedDataParallel around the layer, if there is one; give it with other wrappers, such as FSDP.
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
        policy: str | Policy = "calibrated",
        noise: float | str | None = None,
        limits: tuple[Any, Any] | None = None,
        structure: "str | Structure | Tensor | np.ndarray | None" = None,
        state: Any = None,  # noqa: ANN401
        evaluator: Evaluator | None = None,
        on_failure: str = "degrade",
        eager: bool = False,
        full_precision: bool = True,
        process_group: "ProcessGroup | None" = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        arguments.check_callable(fn)
        arguments.check_eager(eager)
        if on_failure not in ("degrade", "raise"):
            raise ValueError(f"on_failure must be 'degrade' or 'raise', got {on_failure!r}")
        if evaluator is not None and not isinstance(evaluator, Evaluator):
            raise ValueError(f"evaluator must be an instance from bondgrad.evaluators, or None, got {evaluator!r}")
        self.in_features = arguments.positive_int("in_features", in_features)
        self.estimator: Estimator = arguments.chosen("estimator", estimator, ESTIMATORS, Estimator)
        self.policy: Policy = arguments.chosen("policy", policy, POLICIES, Policy)
        self.noise = arguments.checked_noise(noise)
        self.limits = None if limits is None else arguments.Limits(limits, self.in_features)
        self.evaluator = Local() if evaluator is None else evaluator
        self.on_failure = on_failure
        self.full_precision = full_precision
        width = None if out_features is None else arguments.positive_int("out_features", out_features)

        found = resolve(structure, fn)
        self.findings = Findings(found, self.in_features, seed) if isinstance(found, Unknown) else None
        self._structure = found if isinstance(found, Structure) else None
        self._told = structure is not None  # and not by the box itself
        self.structure.check(self.in_features, width)
        self.memory = find_memory(fn, state)
        time_features = self.in_features if self.structure.in_time else None
        form = self.memory.form if isinstance(self.memory, Carried) else None
        self._function = RowFunction(fn, width or self.structure.width(self.in_features), time_features, form)
        arguments.warn_of_seed(self._function.seed_position is not None and self.estimator.shared)
        self.fn = fn
        self.policy_state = PolicyState(self.policy, self.in_features, seed, process_group)
        self.health = Health()
        self._trace = Trace()
        self._answers = Answers()
        self._number = operators.register(self)
        self._step_hooks: OrderedDict[int, Callable[[BlackBox, Step], None]] = OrderedDict()

    # ---- the layer

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        """Evaluate the box.

        Args:
            x: [..., in_features], floating point; of sequences [..., T, in_features].
            context: Further inputs of fn, one entry per row of x, or per sequence ([..., anything]); handed on as they
                are, never moved, and given no gradient.

        Returns:
            [..., out_features], in the dtype of x.
        """
        in_time = self.structure.in_time
        arguments.check_input(x, self.in_features, in_time)
        check_tangent(x)
        lead = x.shape[:-1]
        batch = lead[:-1] if in_time else lead
        contexts = arguments.context_rows(context, batch)
        # Differences need at least single precision, whatever the network around the box runs in.
        rows = x if x.ndim == 2 and not in_time else x.reshape(batch.numel(), -1).contiguous()
        if x.dtype.itemsize < 4:
            rows = rows.float()
        autocast = None if self.full_precision else autocast_dtype(x)
        if not operators.needed():
            y = self._plain(rows, contexts, autocast)
        elif self.memory is not None and not torch.compiler.is_compiling():
            raise BoxError("a box with memory cannot be transformed by torch.func: its calls depend on their order")
        elif torch.compiler.is_compiling() and (self.memory is not None or self.out_features is None):
            # An error where breaks are not allowed.
            torch._dynamo.graph_break(
                msg="a BlackBox with memory, or of unknown width: give out_features, or call it once before"
            )
            y = torch.compiler.disable(self._plain)(rows, contexts, autocast)  # type: ignore[no-untyped-call]
        else:
            y = operators.attach(rows, self._number, autocast, self.training, contexts)
        out = y.to(x.dtype)
        return out if x.ndim == 2 and not in_time else out.reshape(*lead, -1)

    def _plain(self, x: Tensor, context: tuple[Tensor, ...], autocast: torch.dtype | None) -> Tensor:
        """The box at x [B, d], in eager code."""
        if not (x.requires_grad and torch.is_grad_enabled()):
            return evaluate(self, x.detach(), context, autocast, graded=False)[0]
        y, forward = evaluate(self, x.detach(), context, autocast, graded=True)
        how = Circumstances(self.training, autocast, forward, self._function.parameters())
        return attach(x, y, functools.partial(self._differentiate, how), context)

    # ---- backward

    def _differentiate(self, how: Circumstances, x: Tensor, y: Tensor, gy: Tensor, *context: Tensor) -> Tensor:
        """The gradient [B, d] at x [B, d], y [B, d_out] being the box there."""
        if operators.transforming():  # of gradients, which the operator knows how to do
            rest = (list(context), self._number, how.autocast, how.training, torch.empty(0, device=x.device))
            return operators.differentiate(x, y.double(), gy, *rest)  # type: ignore[no-any-return]
        if torch._C._functorch.is_legacy_batchedtensor(gy):
            raise BoxError("is_grads_batched=True does not pass through a BlackBox: use torch.func.vmap instead")
        if how.parameters is not None:
            self._function.check_parameters(how.parameters)
        home = self._function.home(x.device)
        tensors = (x, y, gy, *context) if home == x.device else tuple(t.to(home) for t in (x, y, gy, *context))
        with arithmetic(self.full_precision, home, how.autocast):
            g = differentiate(self, how, tensors[0], tensors[1], tensors[2], tensors[3:]).to(x.device)
        self._answers.forget(how.forward.ticket)
        return g

    def _run_hooks(self, step: Step) -> None:
        for hook in tuple(self._step_hooks.values()):
            hook(self, step)

    # ---- several processes, and graphs

    def exchange(self) -> None:
        """Learn now what all processes of `process_group`, or of DistributedDataParallel, saw in the last step.

        The next forward pass would do so. To be called by all of them, before one saves a `state_dict` that training is
        to go on from bit for bit.
        """
        policy_state = self.policy_state
        if policy_state.ranks.last is not None and policy_state.names:
            state = dict(policy_state.named_buffers())
            joint = policy_state.ranks.exchange(policy_state.ranks.last, self.policy, self.estimator, state, None)
            policy_state.write(joint[1])

    def due(self) -> bool:
        """Whether the next training step has to run as Python, since a captured one would miss something.

        So it is before the function is known, where it or the layer looks at values (numpy, `on_failure="raise"`, a
        look at the structure, a trial), where the function keeps a state to itself or takes a seed, while several
        processes exchange what they learn, and in eval mode, which always draws the same random numbers.
        """
        function = self._function
        known = function.out_features is not None and function.interfaces == ("torch",)
        memory = self.memory
        remembering = memory is not None and (not isinstance(memory, Carried) or memory.places(self.training) is None)
        looking = remembering or (self.findings is not None and self.findings.due())
        looking |= trial_due(self) or function.seed_position is not None
        exchanging = self.policy_state.ranks.last is not None
        return not known or looking or exchanging or not self.training or self.on_failure == "raise"

    @property
    def version(self) -> Hashable:
        """Changes, in the sense of ==, when a captured step would no longer do what the layer does.

        Policies, estimators and evaluators are known by identity: to change one, assign a new one.
        """
        noise = half_width(self, torch.float32)
        own = (self._function, self.training, noise, self.full_precision, self.limits, self._function.rounding)
        parts = (self.policy, self.estimator, self.structure, self.evaluator, self.evaluator.version)
        memory = self.memory.places(self.training) if isinstance(self.memory, Carried) else None
        return (*own, *parts, memory, *self.policy_state.random.generators("cuda"))

    def reset(self) -> None:
        """Let a box with memory forget what it has seen: a new stream begins. In eval mode, that for evaluation."""
        if self.memory is None:
            raise BoxError("this BlackBox has no memory to reset: give state=, or an fn with snapshot() and restore()")
        self.memory.reset(self.training)
        self._answers.clear()

    # ---- seeing what it does

    @property
    def structure(self) -> Structure:
        """Which outputs depend on which inputs: as it was given, or as it was found out so far."""
        if self.findings is not None:
            return self.findings.structure
        assert self._structure is not None
        return self._structure

    @property
    def stats(self) -> Stats:
        """Counters since construction, and the last step's perturbations. Not part of the state."""
        return self._trace.stats(self._function, self.health.last)

    def standard_error(self, step: Step) -> Tensor:
        """What noise does to the gradient that a step hook was just given: the standard deviation of each entry.

        For policies that measure noise; NaN until they have. Of rows scaled to norm 1, before that.
        """
        return standard_error(self, step)

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
        """As usual, except that another `fn` takes the place of the box."""
        if name == "fn":
            arguments.check_callable(value)
            value = freeze(value) if isinstance(value, nn.Module) else value
            if hasattr(self, "fn"):
                self._replace_box(value)
            self._function = self._function.replaced(value)
            self._modules.pop("fn", None)  # a function may take the place of a module
        super().__setattr__(name, value)

    def _replace_box(self, fn: Callable[..., Any]) -> None:
        """What was known of another box does not hold any more. Refuses a box that this layer was not made for."""
        memory = self.memory if isinstance(self.memory, Carried) else find_memory(fn, None, self.training)
        if not self._told:
            found = resolve(None, fn)
            if isinstance(found, Unknown) or self.findings is not None or found.in_time != self.structure.in_time:
                raise ValueError(f"a box with structure {getattr(fn, 'structure', None)} needs a BlackBox of its own")
            found.check(self.in_features, self.out_features)
            self._structure = found
        elif self.findings is not None:
            self.findings.forget()
        self.memory = memory
        if isinstance(memory, Carried):
            for training in (True, False):
                memory.reset(training)
        self._answers.clear()
        self.policy_state.forget(self.policy)
        self.health, self._trace.begun = Health(), None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """After a copy or unpickling, which is another layer."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._number = operators.register(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "BlackBox":
        """Moves with the model, but the box does not go to half precision with it: differences would be lost."""

        def keep_precision(t: Tensor) -> Tensor:
            moved = fn(t)
            return t.to(moved.device) if moved.is_floating_point() and moved.itemsize < 4 and t.itemsize >= 4 else moved

        super()._apply(keep_precision, recurse)  # type: ignore[no-untyped-call]
        return self
