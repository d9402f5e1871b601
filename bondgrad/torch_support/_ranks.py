"""Training in several processes: the policy learns what it would learn from the joint batch in one process."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bondgrad.policies import Differences, Observation, Policy, State, Steps

OLDEST_PASS = 128  # forward passes whose gradients are waited for; older ones are dropped


class JointBatch(NamedTuple):
    """The place of the rows of this process in the joint batch. The default values stand for a single process."""

    ranks: int = 1  # the number of processes
    rows: int = 0  # the number of rows in all processes
    first: int = 0  # the position of the first row of this process
    sums: Tensor | None = None  # [k] `Policy.measure` of all rows
    number: int = 0  # the number of the forward pass; -1: other processes do not have this forward pass


ALONE = JointBatch()


class Ranks:
    """Exchanges sums over rows with the other processes.

    All processes make their forward passes in the same order, but one may have computed a gradient that another has
    not. So every exchange is about the same forward passes in all processes, and counts for each of them the processes
    with a gradient. The policy observes those for which all processes have one.

    Args:
        group: The processes. None: those of the DistributedDataParallel whose forward pass is running, if any.
        in_features: The number of inputs d.
    """

    def __init__(self, group: "dist.ProcessGroup | None", in_features: int) -> None:
        self.group, self.in_features = group, in_features
        self.last: dist.ProcessGroup | None = None  # the group of the last exchange
        self._passes = 0
        # Both by the number of the forward pass.
        self._pending: dict[int, int] = {}  # the number of rows in all processes
        self._summaries: dict[int, Tensor] = {}  # `Policy.summarize` of this process

    def __deepcopy__(self, _memo: dict[int, Any]) -> "Ranks":
        return Ranks(self.group, self.in_features)  # the copy uses the same group, which cannot be copied

    def __reduce__(self) -> Any:  # noqa: ANN401
        return Ranks, (None, self.in_features)  # a group cannot be pickled

    def current(self) -> "dist.ProcessGroup | None":
        """The group of processes to exchange with now; None: there is only one process."""
        ddp = torch.nn.parallel.DistributedDataParallel._active_ddp_module
        if ddp is not None and ddp._join_config.enable:  # some processes may have run out of batches
            return None
        group = self.group if self.group is not None or ddp is None else ddp.process_group
        return group if group is not None and dist.get_world_size(group) > 1 else None

    def remember(self, part: JointBatch, summary: Tensor) -> None:
        """Keep the summary of a gradient until the next `exchange`; the last one, if a forward pass has several."""
        if part.number in self._pending:
            self._summaries[part.number] = summary

    def unlearnt(self) -> JointBatch:
        """The place of a forward pass that other processes do not have. The policy does not learn from it."""
        return ALONE if self.last is None else JointBatch(dist.get_world_size(self.last), number=-1)

    def forget(self) -> None:
        """Drop all summaries. Called when a state was loaded, which must not learn from earlier gradients."""
        self._summaries.clear()

    def exchange(
        self, group: "dist.ProcessGroup", policy: Policy, differences: Differences, state: State, x: Tensor
    ) -> tuple[JointBatch, State]:
        """The place of the rows x [B, d] in the joint batch, and the state after the gradients of all processes.

        All processes call this at the same points of their programs, in the forward pass: in the backward pass it would
        be mixed up with the reductions of DistributedDataParallel. Where no process has any rows, as outside of a
        forward pass, the place is that of a single process.
        """
        self.last = group
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        sizes = torch.zeros(ranks, dtype=torch.float64, device=x.device)
        sizes[rank] = x.shape[0]
        # A summary of no rows stands for one that this process does not have.
        no_rows, ones = x[:0], x.new_ones(self.in_features)
        no_steps = Steps(no_rows[None], no_rows[None], ones, ones)
        blank = policy.summarize(state, Observation(no_rows, no_rows, no_steps, differences))
        known = sizes.new_tensor([number in self._summaries for number in self._pending])
        summaries = [self._summaries.get(number, blank) for number in self._pending]
        parts = [sizes, policy.measure(x), known, *summaries]
        joint = torch.cat([part.flatten().to(x.device, torch.float64) for part in parts])
        dist.all_reduce(joint, group=group)
        joint_sizes, sums, joint_known, *joint_summaries = joint.split([part.numel() for part in parts])  # type: ignore[no-untyped-call]
        passes = zip(list(self._pending.items()), joint_known.tolist(), joint_summaries, strict=True)
        for (number, rows), count, summary in passes:
            mine = self._summaries.get(number)
            if count == ranks and mine is not None:
                state = policy.observe(state, summary.view_as(mine).to(mine.dtype), rows, differences)
            if count > 0 or number <= self._passes - OLDEST_PASS:  # otherwise its backward pass may still come
                del self._pending[number]
                self._summaries.pop(number, None)
        counts = [int(n) for n in joint_sizes.tolist()]
        if sum(counts) == 0:
            return ALONE, state
        self._passes += 1
        self._pending[self._passes] = sum(counts)
        return JointBatch(ranks, sum(counts), sum(counts[:rank]), sums.to(x.dtype), self._passes), state
