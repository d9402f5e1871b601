"""A layer in several processes and in CUDA graphs: what is exchanged, what a captured step depends on and changes."""

from collections.abc import Hashable

from bondgrad.calling._memory import ExplicitState
from bondgrad.step._layer import Layer
from bondgrad.step._records import Recording, Step
from bondgrad.step._trials import half_width


class CapturableLayer(Layer):
    """The part of `BlackBox` that other processes and CUDA graphs work with."""

    def __init__(self) -> None:
        super().__init__()
        self._counted = (0, 0, 0)  # calls, evaluations and requests before a graph is captured

    def exchange(self) -> None:
        """Let the policy learn at once what all processes of `process_group`, or of DistributedDataParallel, saw last.

        The next forward pass would do the same. All processes must call it before one of them saves a `state_dict` from
        which training is to go on bit for bit.
        """
        self.policy_state.exchange(self._policy, self._estimator.differences, self.parts().grid)

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
        return (
            not (known and placed and self.training)
            or looking
            or exchanging
            or self.on_failure == "raise"
            or not self.driver.evaluator.capturable
        )

    @property
    def version(self) -> Hashable:
        """A value that differs (`!=`) from an earlier one if a step captured then would now do something else.

        Policies, estimators and evaluators are known by identity: to change one, assign a new one.
        """
        rounding = self.function.rounding
        noise = half_width(self.noise, self.policy_state.schedule.noise, rounding)
        own = (self.function, self.training, noise, self.full_precision, self._limits, rounding)
        parts = (self._policy, self._estimator, self.structure, self.driver.version)
        memory = self.memory.places(self.training) if isinstance(self.memory, ExplicitState) else None
        return (*own, *parts, memory, *self.policy_state.random.generators("cuda"))

    def start_recording(self) -> None:
        """Record from now on what steps change on the host, instead of changing it, while a CUDA graph is captured."""
        self._recorded = []
        self._counted = self.function.calls, self.function.evaluations, self.progress.requests

    def stop_recording(self) -> Recording:
        """End the recording, and return it. Its calls and evaluations count from the first replay on."""
        function, progress, changes = self.function, self.progress, tuple(self._recorded or ())
        calls, evaluations, requests = self._counted
        counts = (function.calls - calls, function.evaluations - evaluations, progress.requests - requests)
        function.calls, function.evaluations, progress.requests = self._counted
        self._recorded = None
        return Recording(*counts, changes)

    def replay(self, recording: Recording) -> None:
        """Make the recorded changes on the host. Hooks get copies, since the next replay overwrites the tensors."""
        self.function.calls += recording.calls
        self.function.evaluations += recording.evaluations
        self.progress.requests += recording.requests
        if isinstance(self.memory, ExplicitState):
            self.memory.went_on(self.training)
        for changes in recording.changes:
            self._commit_on_host(changes)
            self._run_hooks(Step(*(t.clone() for t in changes.seen)))
