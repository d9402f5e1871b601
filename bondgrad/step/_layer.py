"""A layer as its training steps see it: forward and backward passes, what they change, and graphs of them."""

import contextlib
import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bondgrad.calling._function import RowFunction
from bondgrad.calling._inputs import Limits
from bondgrad.calling._memory import InternalState, Memory
from bondgrad.errors import BoxError
from bondgrad.estimators import Estimator
from bondgrad.evaluators import Driver, Progress
from bondgrad.evaluators._record import CallRecord
from bondgrad.policies import MeasuringPolicy, Policy, State
from bondgrad.step._ahead import Ahead, fits_into_memory, plan_gradient
from bondgrad.step._backward import needs_start, take_step
from bondgrad.step._forward import ForwardInputs, evaluate
from bondgrad.step._health import HealthMonitor, TrialResult
from bondgrad.step._records import ForwardRecord, HostChanges, Parts, Step, StepInputs, StepResult
from bondgrad.step._state import PolicyState
from bondgrad.step._stats import Trace
from bondgrad.step._substitutes import with_substitutes
from bondgrad.step._trials import SETTINGS, trial_due, trial_share
from bondgrad.structure import Structure
from bondgrad.structure.discovery._tracker import StructureTracker
from bondgrad.torch_support import _autograd as autograd
from bondgrad.torch_support import _device as device
from bondgrad.torch_support._checkpoint import Answers, in_backward, in_checkpoint
from bondgrad.torch_support._device import is_capturing
from bondgrad.torch_support._precision import arithmetic
from bondgrad.torch_support._random import Generators
from bondgrad.torch_support._ranks import ALONE

SEED_STRIDE = 1_000_003  # between seeds of calls; a prime, so that layers with neighbouring seeds differ


class Layer(nn.Module):
    """The part of `BlackBox` that carries out forward and backward passes. `BlackBox` sets its attributes."""

    in_features: int
    function: RowFunction  # the user's function, as it is called
    memory: Memory | None
    _limits: Limits | None
    noise: float | str | None
    on_failure: str
    eager: bool
    full_precision: bool
    driver: Driver  # sends requests to the evaluator
    progress: Progress
    tracker: StructureTracker | None  # finds out the structure, for structure="auto"
    policy_state: PolicyState
    _estimator: Estimator
    _policy: Policy
    structure: Structure  # which outputs depend on which inputs, as far as it is known

    def __init__(self) -> None:
        super().__init__()
        self.health, self.trace, self.answers = HealthMonitor(), Trace(), Answers()
        self.eval_start: State | None = None  # of a measuring policy, for gradients in eval mode
        self.hooks: OrderedDict[int, Callable[[Any, Step], None]] = OrderedDict()
        self._number = autograd.register(self)
        self._recorded: list[HostChanges] | None = None  # while a CUDA graph is captured

    # ---- forward

    @property
    def out_features(self) -> int | None:
        """The number of outputs; None until it was given or the box has answered."""
        return self.function.out_features

    def _attached(self, x: Tensor, context: tuple[Tensor, ...], autocast: torch.dtype | None) -> Tensor:
        """The outputs of the box at x [B, d] in eager code, attached to autograd's graph if x needs a gradient."""
        graded = x.requires_grad and torch.is_grad_enabled()
        y, forward = self.evaluate_rows(x.detach(), context, autocast, graded)
        if not graded:
            return y
        vjp = functools.partial(self.differentiate_rows, forward)
        return autograd.Bridge.apply(x, y, vjp, *context)  # type: ignore[no-untyped-call, no-any-return]

    def evaluate_rows(
        self, x: Tensor, context: tuple[Tensor, ...], autocast: torch.dtype | None, graded: bool
    ) -> tuple[Tensor, ForwardRecord]:
        """The outputs of the box at x [B, d], outside autograd, and the record that its backward pass needs.

        Inside an activation checkpoint the answer is kept, and given again when the forward pass is run again.
        """
        training, limited = self.training, self._limits is not None
        take_in = functools.partial(self.trace.add_answer, limited, training, self.on_failure == "raise")
        call = ForwardInputs(self.parts(), x, context, training, graded, autocast, take_in)
        check = self.unchanged() if graded else None

        def ask(learns: bool) -> tuple[Tensor, ForwardRecord]:
            part, goes_ahead = ALONE, self.eager and graded and learns
            if dist.is_available() and dist.is_initialized():
                differences, learns = self._estimator.differences, learns and self.training
                part = self.policy_state.joint_batch(self._policy, differences, self._limits, x, learns)
            self._choose_readings(x.device)
            forward = ForwardRecord(self.training, autocast, part)
            plan = functools.partial(self._plan_ahead, forward) if goes_ahead else None
            with self.policy_state.schedule.kept_after_errors():
                y, ok, states, ahead = evaluate(call._replace(plan=plan))
            if ahead is not None:
                self.policy_state.random.join(ahead.device, ahead.generator)
            finite = None if ok is None else torch.isfinite(y)
            if device.reading_is_free(self.function.compute_device(y.device)):
                y = with_substitutes(self.progress, y, finite, self.training)
            return y, ForwardRecord(self.training, autocast, part, states, finite, ahead, check=check)

        if is_capturing(x.device) or not in_checkpoint():
            return ask(graded and not in_backward())
        ordered = self.memory is not None
        (y, forward), ticket = self.answers.answer((x, *context), ordered, graded, ask)
        return y.clone(), forward._replace(ticket=ticket, check=check)

    def _choose_readings(self, where: torch.device) -> None:
        """Take as many readings of every point as the policy wants, if it has a say in this."""
        policy = self._policy
        if isinstance(policy, MeasuringPolicy) and not is_capturing(where):
            readings = policy.readings(self.policy_state.read(self.policy_state.device))
            self.driver.repeats = self.driver.repeats if readings is None else readings

    def parts(self) -> Parts:
        """The parts of the layer that its forward and backward passes work with."""
        return Parts(
            self.in_features,
            self.function,
            self.driver,
            self._estimator,
            self._policy,
            self.structure,
            self._limits,
            self.memory,
            None if self.function.seed_position is None else self._next_seed,
            self.full_precision,
        )

    def unchanged(self) -> Callable[[], None]:
        """A check that raises BoxError if the box has, by then, other parameters or limits than now."""
        parameters, limits = self.function.tensors.parameters(), self._limits

        def check() -> None:
            self.function.tensors.check_parameters(parameters)
            if self._limits is not limits:  # the outputs are those at points that may be outside now
                raise BoxError(
                    "limits or resolution were assigned after the forward pass whose gradient is asked for: assign "
                    "them between a backward pass and the next forward pass"
                )

        return check

    def _next_seed(self) -> int:
        """The seed for the next calls of a box that takes one. In eval mode it is always the same."""
        schedule = self.policy_state.schedule
        schedule.seeds += self.training
        return (self.policy_state.random.seed + SEED_STRIDE * schedule.seeds) % 2**31

    # ---- backward

    def differentiate_rows(self, forward: ForwardRecord, x: Tensor, y: Tensor, gy: Tensor, *context: Tensor) -> Tensor:
        """The gradient [B, d] at x [B, d], given the outputs y and the loss's gradient gy there, [B, d_out] each."""
        if autograd.transforming():  # of gradients, which the operator knows how to do
            rest = (self._number, forward.autocast, torch.empty(0, device=x.device), forward.training)
            return autograd.differentiate([x, y.double(), gy, *context], *rest)  # type: ignore[no-any-return]
        if torch._C._functorch.is_legacy_batchedtensor(gy):
            raise BoxError("is_grads_batched=True does not pass through a BlackBox: use torch.func.vmap instead")
        if forward.check is not None:
            forward.check()
        where = self.function.compute_device(x.device)
        here = (x, y, gy, *context)
        there = here if where == x.device else tuple(t.to(where) for t in here)
        with arithmetic(self.full_precision, where, forward.autocast):
            g = self._take_step(forward, *there).to(x.device)
        self.answers.forget(forward.ticket)
        return g

    def _take_step(self, forward: ForwardRecord, x: Tensor, y: Tensor, gy: Tensor, *context: Tensor) -> Tensor:
        """Put together the inputs of a backward pass on the device of the box, take the step, and keep its result."""
        if forward.finite is not None:
            return self._take_step_without_failures(forward, x, y, gy, *context)
        step = self._step_inputs(forward, x, y, gy, context)
        memory = self.memory
        state_kept = memory.kept() if isinstance(memory, InternalState) else contextlib.nullcontext()
        with state_kept, self.policy_state.schedule.kept_after_errors():
            result = take_step(step)
            if result.failures is not None:  # which raises where failures are errors
                self.trace.add_failures(result.failures, raises=self.on_failure == "raise")
        self._commit(result, forward)
        return result.g

    def _step_inputs(
        self, forward: ForwardRecord, x: Tensor, y: Tensor, gy: Tensor, context: tuple[Tensor, ...]
    ) -> StepInputs:
        """Everything that a backward pass needs to know, on the device of the box."""
        capturing, policy_state, parts = is_capturing(x.device), self.policy_state, self.parts()
        random = policy_state.random
        return StepInputs(
            parts=parts,
            forward=forward,
            x=x if self._limits is None else self._limits.clamped(x),
            y=y,
            gy=gy,
            context=context,
            state=policy_state.settable(self._policy, parts.grid, x.device),
            generator=random.on(x.device) if capturing else random.fork(x.device),
            tracker=self.tracker,
            schedule=policy_state.schedule,
            noise=self.noise,
            eval_start=self.eval_start,
            ahead=forward.ahead,
            capturing=capturing,
        )

    def _plan_ahead(self, forward: ForwardRecord, x: Tensor, context: tuple[Tensor, ...]) -> Ahead | None:
        """The evaluations for the gradient at x [B, W], to be made in the forward pass; None: not in this step.

        A step with a trial or a search that may well change the structure, or one that is captured, is taken as without
        `eager`.
        """
        time = x.shape[1] // self.in_features
        due = self.trial_due or (self.tracker is not None and self.tracker.unsettled(time))
        width = self.function.expected_width(self.progress.learnt)
        if not self.training or due or width is None or is_capturing(x.device):
            return None
        if self._limits is not None and device.reading_is_free(x.device) and not bool(torch.isfinite(x).all()):
            return None  # such rows have no gradient, and are not evaluated
        y = x.new_zeros(x.shape[0], time * width, dtype=self.function.dtype)
        step = self._step_inputs(forward, x, y, y, context)
        if forward.part.ranks > 1 and needs_start(self._policy, step.state):
            return None
        self.eager = fits_into_memory(step)
        if not self.eager:
            return None
        return Ahead(plan_gradient(step), self.driver, step.generator)

    def _take_step_without_failures(
        self, forward: ForwardRecord, x: Tensor, y: Tensor, gy: Tensor, *context: Tensor
    ) -> Tensor:
        """The gradient [B, d], where some outputs of the forward pass were substitutes, which have no gradient."""
        assert forward.finite is not None
        finite, forward = forward.finite.to(x.device), forward._replace(finite=None)
        y, gy = y.masked_fill(~finite, math.nan), gy.masked_fill(~finite, 0)
        some = finite.any(1)
        if self.memory is not None or forward.part.ranks > 1 or bool(some.all()):  # all rows of a batch belong together
            return self._take_step(forward, x, y, gy, *context)
        g = torch.zeros_like(x)
        if bool(some.any()):
            g[some] = self._take_step(forward._replace(kept=some), *(t[some] for t in (x, y, gy, *context)))
        elif forward.ahead is not None:
            forward.ahead.drop()
        return g

    def _commit(self, result: StepResult, forward: ForwardRecord) -> None:
        """Keep what a step changes, after everything in it that can fail. Step hooks run last."""
        if result.eval_start is not self.eval_start:
            self.eval_start = result.eval_start
        for error in result.errors:
            self.health.raised(error)
        if forward.training:
            self._commit_on_device(result, forward)
        if result.discovery is not None and self.tracker is not None:
            self.tracker.accept(result.discovery)
        if self._recorded is not None:
            self._recorded.append(result.changes)  # a replay will do what is left to do
            return
        if result.noise_trial is not None:
            self._commit_trial(result.noise_trial)
        self._commit_on_host(result.changes)
        if result.trial is not None:
            self._commit_trial(result.trial)
        if result.restart:
            self.policy_state.schedule.begin()
        self._run_hooks(result.changes.seen)

    def _commit_on_device(self, result: StepResult, forward: ForwardRecord) -> None:
        """Copy new values on the device in place into the buffers, which a captured graph uses."""
        policy_state = self.policy_state
        policy_state.random.join(result.g.device, result.generator)
        if result.summary is not None:
            policy_state.ranks.remember(forward.part, result.summary)
        if result.state is not None:
            policy_state.write(result.state)

    def _commit_on_host(self, changes: HostChanges) -> None:
        """Keep new values on the host, which a captured graph cannot change: every replay calls this again."""
        self.trace.last = changes.steps
        if changes.training:
            self.progress.steps, self.progress.learnt = self.progress.steps + 1, self.function.learnt()
        if changes.training and trial_share(self._policy, self.noise) > 0:
            self.policy_state.schedule.step(changes.evaluations)
        if changes.training and self.tracker is not None:
            self.tracker.step(changes.evaluations // self.driver.repeats)

    def _commit_trial(self, trial: TrialResult) -> None:
        self.policy_state.schedule.tried(trial.evaluations, trial.noise)
        self._choose_readings(self.policy_state.device)  # at once, since replays of a captured step do not ask for it
        if trial.report is not None:
            self.health.watch(trial.report)

    def _run_hooks(self, step: Step) -> None:
        for hook in tuple(self.hooks.values()):
            hook(self, step)

    @contextlib.contextmanager
    def without_trace(self) -> Iterator[None]:
        """Send statistics to a temporary trace inside; restore counters and what was learnt of fn afterwards.

        Only the numbers of requests go on, since a journal must not have two requests of one number.

        The random numbers of the layer, which `reseed` may change inside, are restored as well.
        """
        trace, start, known = self.trace, self.eval_start, dict(vars(self.function))
        random, self.trace = self.policy_state.random, Trace(warns=False)
        record, self.driver.record = self.driver.record, CallRecord()
        try:
            yield
        finally:
            self.trace, self.eval_start, self.policy_state.random = trace, start, random
            self.driver.record = record
            vars(self.function).update(known)

    def reseed(self, seed: int) -> None:
        """Draw random numbers from another seed from now on."""
        self.policy_state.random = Generators(seed)

    def gradient_evaluations(self, rows: int) -> int:
        """The most evaluations that the next forward and backward pass of that number of rows takes in eval mode.

        A policy that measures looks for a first step in the first of them.
        """
        gradient, start = self._estimator.evaluations(self.in_features), 0
        begins = self.policy_state.schedule.trials == 0 and self.eval_start is None
        if begins and isinstance(self._policy, MeasuringPolicy):
            start = SETTINGS.start_rows * (self._policy.start_slopes * gradient + 2)
        return (rows * (1 + gradient) + start) * self.driver.repeats

    @property
    def trial_due(self) -> bool:
        """Whether the next training step measures more than a gradient needs."""
        return trial_due(self._policy, self.noise, self.policy_state.schedule)
