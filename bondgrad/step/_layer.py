"""A layer as its training steps see it: forward and backward passes, what they change, and graphs of them."""

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bondgrad.calling._function import RowFunction
from bondgrad.calling._inputs import Limits
from bondgrad.calling._memory import ExplicitState, InternalState, Memory
from bondgrad.errors import BoxError
from bondgrad.estimators import Estimator
from bondgrad.evaluators import Driver
from bondgrad.policies import MeasuringPolicy, Policy, State
from bondgrad.step._backward import take_step
from bondgrad.step._forward import ForwardInputs, evaluate
from bondgrad.step._health import HealthMonitor, TrialResult
from bondgrad.step._records import ForwardRecord, HostChanges, Parts, Recording, Step, StepInputs, StepResult
from bondgrad.step._state import PolicyState
from bondgrad.step._stats import Trace
from bondgrad.step._trials import SETTINGS, half_width, trial_due, trial_share
from bondgrad.structure import Structure
from bondgrad.structure.discovery._tracker import StructureTracker
from bondgrad.torch_support import _autograd as autograd
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
    limits: Limits | None
    noise: float | str | None
    on_failure: str
    full_precision: bool
    driver: Driver  # sends requests to the evaluator
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
        self._counted = (0, 0)  # calls and evaluations before that

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
        call = ForwardInputs(self.parts(), x, context, self.training, graded, autocast)
        parameters = self.function.tensors.parameters() if graded else None

        def ask(learns: bool) -> tuple[Tensor, ForwardRecord]:
            y, states = evaluate(call)
            part = ALONE
            if dist.is_available() and dist.is_initialized():
                differences, learns = self._estimator.differences, learns and self.training
                part = self.policy_state.joint_batch(self._policy, differences, self.limits, x, learns)
            return y, ForwardRecord(self.training, autocast, part, states, 0, parameters)

        if is_capturing(x.device) or not in_checkpoint():
            return ask(graded and not in_backward())
        ordered = self.memory is not None
        (y, forward), ticket = self.answers.answer((x, *context), ordered, graded, ask)
        return y.clone(), forward._replace(ticket=ticket, parameters=parameters)

    def parts(self) -> Parts:
        """The parts of the layer that its forward and backward passes work with."""
        return Parts(
            self.in_features,
            self.function,
            self.driver,
            self._estimator,
            self._policy,
            self.structure,
            self.limits,
            self.memory,
            None if self.function.seed_position is None else self._next_seed,
            self.full_precision,
        )

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
        if forward.parameters is not None:
            self.function.tensors.check_parameters(forward.parameters)
        where = self.function.compute_device(x.device)
        here = (x, y, gy, *context)
        there = here if where == x.device else tuple(t.to(where) for t in here)
        with arithmetic(self.full_precision, where, forward.autocast):
            g = self._take_step(forward, *there).to(x.device)
        self.answers.forget(forward.ticket)
        return g

    def _take_step(self, forward: ForwardRecord, x: Tensor, y: Tensor, gy: Tensor, *context: Tensor) -> Tensor:
        """Put together the inputs of a backward pass on the device of the box, take the step, and keep its result."""
        capturing, policy_state = is_capturing(x.device), self.policy_state
        random = policy_state.random
        step = StepInputs(
            parts=self.parts(),
            forward=forward,
            x=x if self.limits is None else self.limits.clamped(x),
            y=y,
            gy=gy,
            context=context,
            state=policy_state.read(x.device),
            generator=random.on(x.device) if capturing else random.fork(x.device),
            tracker=self.tracker,
            schedule=policy_state.schedule,
            noise=self.noise,
            eval_start=self.eval_start,
            capturing=capturing,
        )
        memory = self.memory
        with memory.kept() if isinstance(memory, InternalState) else contextlib.nullcontext():
            result = take_step(step)
        self._commit(result, forward)
        return result.g

    def _commit(self, result: StepResult, forward: ForwardRecord) -> None:
        """Keep what a step changes, after everything in it that can fail. Step hooks run last."""
        if result.failures is not None:  # which raises where failures are errors
            self.trace.add_failures(result.failures, raises=self.on_failure == "raise")
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
        if changes.training and trial_share(self._policy, self.noise) > 0:
            self.policy_state.schedule.step(changes.evaluations)
        if changes.training and self.tracker is not None:
            self.tracker.credit += changes.evaluations

    def _commit_trial(self, trial: TrialResult) -> None:
        self.policy_state.schedule.tried(trial.evaluations, trial.noise)
        if trial.report is not None:
            self.health.watch(trial.report)

    def _run_hooks(self, step: Step) -> None:
        for hook in tuple(self.hooks.values()):
            hook(self, step)

    @contextlib.contextmanager
    def without_trace(self) -> Iterator[None]:
        """Send statistics to a temporary trace inside; restore counters and what was learnt of fn afterwards.

        The random numbers of the layer, which `reseed` may change inside, are restored as well.
        """
        trace, start, known = self.trace, self.eval_start, dict(vars(self.function))
        random, self.trace = self.policy_state.random, Trace(warns=False)
        try:
            yield
        finally:
            self.trace, self.eval_start, self.policy_state.random = trace, start, random
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
        return rows * (1 + gradient) + start

    # ---- several processes, and graphs

    def exchange(self) -> None:
        """Let the policy learn at once what all processes of `process_group`, or of DistributedDataParallel, saw last.

        The next forward pass would do the same. All processes must call it before one of them saves a `state_dict` from
        which training is to go on bit for bit.
        """
        self.policy_state.exchange(self._policy, self._estimator.differences)

    def due(self) -> bool:
        """Whether the next training step has to run as Python, since a captured one would miss something.

        So it is before the function is known, where it or the layer looks at values (numpy, `on_failure="raise"`, a
        look at the structure, a trial), where the function keeps a state to itself or takes a seed, while several
        processes exchange what they learn, and in eval mode, which always draws the same random numbers.
        """
        function, memory = self.function, self.memory
        known = function.out_features is not None and function.interfaces == ("torch",)
        placed = memory is None or (isinstance(memory, ExplicitState) and memory.places(self.training) is not None)
        looking = self.tracker is not None and self.tracker.due()
        looking |= self.trial_due or function.seed_position is not None
        exchanging = self.policy_state.ranks.last is not None
        return not (known and placed and self.training) or looking or exchanging or self.on_failure == "raise"

    @property
    def trial_due(self) -> bool:
        """Whether the next training step measures more than a gradient needs."""
        return trial_due(self._policy, self.noise, self.policy_state.schedule)

    @property
    def version(self) -> Hashable:
        """A value that differs (`!=`) from an earlier one if a step captured then would now do something else.

        Policies, estimators and evaluators are known by identity: to change one, assign a new one.
        """
        rounding = self.function.rounding
        noise = half_width(self.noise, self.policy_state.schedule.noise, rounding)
        own = (self.function, self.training, noise, self.full_precision, self.limits, rounding)
        parts = (self._policy, self._estimator, self.structure, self.driver.version)
        memory = self.memory.places(self.training) if isinstance(self.memory, ExplicitState) else None
        return (*own, *parts, memory, *self.policy_state.random.generators("cuda"))

    def start_recording(self) -> None:
        """Record from now on what steps change on the host, instead of changing it, while a CUDA graph is captured."""
        self._recorded = []
        self._counted = self.function.calls, self.function.evaluations

    def stop_recording(self) -> Recording:
        """End the recording, and return it. Its calls and evaluations count from the first replay on."""
        function, (calls, evaluations), changes = self.function, self._counted, tuple(self._recorded or ())
        recording = Recording(function.calls - calls, function.evaluations - evaluations, changes)
        function.calls, function.evaluations, self._recorded = calls, evaluations, None
        return recording

    def replay(self, recording: Recording) -> None:
        """Make the recorded changes on the host. Hooks get copies, since the next replay overwrites the tensors."""
        self.function.calls += recording.calls
        self.function.evaluations += recording.evaluations
        if isinstance(self.memory, ExplicitState):
            self.memory.went_on(self.training)
        for changes in recording.changes:
            self._commit_on_host(changes)
            self._run_hooks(Step(*(t.clone() for t in changes.seen)))
