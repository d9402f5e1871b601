"""What a layer carries from step to step."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bondgrad.calling._grid import Grid
from bondgrad.calling._inputs import Limits, seen_to_be_finite, with_typical_rows
from bondgrad.evaluators import Progress
from bondgrad.policies import Differences, Policy, State
from bondgrad.torch_support._checkpoint import in_backward
from bondgrad.torch_support._random import Generators
from bondgrad.torch_support._ranks import ALONE, JointBatch, Ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


EARLY_TRIALS = 5  # that come more often than the share pays for
FREE_GRADIENTS = 5  # that the first trials may cost together; what they cost beyond that is saved later


class PolicyState(nn.Module):
    """A policy's state in buffers, random numbers and counts of steps: saved, moved and copied with the model.

    It never goes to half precision with it: squares of gradients would be lost to its range.
    """

    def __init__(
        self, policy: Policy, in_features: int, seed: int | None, group: "ProcessGroup | None", progress: Progress
    ) -> None:
        super().__init__()
        self.progress = progress
        self.names: list[str] = []
        self.device = torch.empty(0).device  # where the buffers of the next policy belong, even if this one has none
        self.random = Generators(seed)
        self.schedule = Schedule()
        self.ranks = Ranks(group, in_features)
        self.adopt(policy)

    def adopt(self, policy: Policy) -> None:
        """Take the initial state of another policy into new buffers on the layer's device. An error changes nothing."""
        state = policy.init(self.ranks.in_features)
        for name, value in state.items():
            if name.startswith("_") or not name.isidentifier() or (hasattr(self, name) and name not in self.names):
                raise ValueError(
                    f"a policy's state cannot be called {name!r}, a name that is taken or cannot be saved: call it "
                    "otherwise"
                )
            if not isinstance(value, Tensor):
                raise ValueError(f"a policy's state must be tensors, but {policy}.init has {value!r} for {name!r}")
        for name in self.names:
            del self._buffers[name]
        self.names, self.first_state = list(state), policy.init
        for name, value in state.items():
            self.register_buffer(name, value.to(self.device))
        self.schedule.begin()
        self.ranks.forget()

    def read(self, device: torch.device) -> State:
        """The state as tensors on the given device."""
        buffers: dict[str, Any] = self._buffers
        return {name: t if (t := buffers[name]).device == device else t.to(device) for name in self.names}

    def settable(self, policy: Policy, grid: Grid | None, device: torch.device) -> State:
        """The state on the given device, as the next step uses it: with steps that can be set on the grid, if any."""
        state = self.read(device)
        return state if grid is None else policy.settable(state, grid)

    def write(self, state: State) -> None:
        """Copy a new state into the buffers, in place, since a captured graph may use them."""
        buffers: dict[str, Any] = self._buffers
        changed = {name: value for name, value in state.items() if value is not buffers[name]}
        if len(changed) > 1:  # a policy may give a value another name: it is read before anything is written
            changed = {name: value.clone() for name, value in changed.items()}
        for name, value in changed.items():
            buffers[name].copy_(value)

    def joint_batch(
        self, policy: Policy, differences: Differences, limits: Limits | None, x: Tensor, learns: bool
    ) -> JointBatch:
        """The place of the rows x in the joint batch of all processes, which exchange here what they learnt."""
        group = self.ranks.current() if learns else None
        if group is None:
            # A forward pass that is run again takes part in nothing: the processes must not learn apart.
            return self.ranks.unlearnt() if in_backward() else ALONE
        rows = (x if limits is None else limits.clamped(x)).reshape(-1, self.ranks.in_features)
        if limits is not None and not seen_to_be_finite(rows):
            rows = with_typical_rows(rows)
        state = self.settable(policy, None if limits is None else limits.grid, x.device)
        part, state = self.ranks.exchange(group, policy, differences, state, rows)
        self.write(state)
        return part

    def exchange(self, policy: Policy, differences: Differences, grid: Grid | None) -> None:
        """Let the policy learn at once what all processes saw in the last step."""
        if self.ranks.last is not None and self.names:
            no_rows = next(self.buffers()).new_empty(0, self.ranks.in_features)
            state = self.settable(policy, grid, no_rows.device)
            self.write(self.ranks.exchange(self.ranks.last, policy, differences, state, no_rows)[1])

    def get_extra_state(self) -> dict[str, Any]:
        """The random numbers, the schedule of trials and how far the layer has come, for `state_dict`."""
        return self.random.state() | {"schedule": dict(vars(self.schedule)), "progress": dict(vars(self.progress))}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Load what `get_extra_state` returned."""
        self.random.load(state)
        vars(self.schedule).update(state.get("schedule", {}))
        vars(self.progress).update(state.get("progress", {}))
        self.ranks.forget()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:  # noqa: ANN401
        """Load a state; where that of the policy has another form, as those of earlier versions, it begins anew."""
        own = {f"{prefix}{name}": value for name, value in self.first_state(self.ranks.in_features).items()}
        saved = {name: state_dict[name] for name in own if name in state_dict}
        other = bool(saved) and any(name not in saved or saved[name].shape != t.shape for name, t in own.items())
        if other:
            state_dict = state_dict | own
        super()._load_from_state_dict(state_dict, prefix, *args)
        if other:
            self.schedule.begin()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PolicyState":
        kept = {name: self.get_buffer(name) for name in self.names}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.device = fn(torch.empty(0, device=self.device)).device
        for name, buffer in kept.items():
            if not buffer.is_meta:
                self._buffers[name] = buffer.to(self.get_buffer(name).device)
        return self


@dataclass
class Schedule:
    """When trials come: often at first, then whenever a share of the evaluations of training pays for one."""

    trials: int = 0  # since it began
    steps: int = 0  # of training, since then
    credit: int = 0  # evaluations in training
    spent: int = 0  # evaluations in trials
    last: tuple[int, int, int] = (0, 0, 0)  # of the last trial: steps and credit then, and its price
    noise: float = 0.0  # half-width of the noise on the outputs as measured; 0: not known yet
    seeds: int = 0  # given to the box, if it takes them

    def due(self, share: float, early: bool) -> bool:
        """Whether the next step has a trial; with `early`, the first trials come sooner than the share pays for."""
        steps, credit, price = self.last
        soon = early and self.trials < EARLY_TRIALS and self.steps - steps >= 2 ** (self.trials - 1)
        paid = (self.credit - credit) * share >= price
        overdraft = FREE_GRADIENTS * self.credit / max(1, self.steps)
        return self.trials == 0 or soon or (paid and self.credit * share >= self.spent - overdraft)

    def step(self, evaluations: int) -> None:
        """Count a training step, and the evaluations that its gradient cost."""
        self.steps += 1
        self.credit += evaluations

    def tried(self, evaluations: int, noise: float) -> None:
        """Count a trial and the evaluations that it cost, and keep the half-width of the noise that it measured."""
        self.trials += 1
        self.spent += evaluations
        self.last = (self.steps, self.credit, evaluations)
        self.noise = noise

    @contextlib.contextmanager
    def kept_after_errors(self) -> Iterator[None]:
        """A context after which the count of seeds is what it was before, if an error ends it."""
        seeds = self.seeds
        try:
            yield
        except BaseException:
            self.seeds = seeds
            raise

    def begin(self) -> None:
        """Return to the beginning, where the box or its policy has changed. Only the count of seeds goes on."""
        vars(self).update(vars(Schedule(seeds=self.seeds)))
