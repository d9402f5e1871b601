"""Several processes that train one model: what the policy learns is what one process on the joint batch would learn."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bondgrad.policies import Differences, Observation, Policy, State, Steps

OLDEST_PASS = 128  # forward passes ago, of which a gradient is still waited for


class JointBatch(NamedTuple):
    """Where the rows of this process stand in the joint batch. As it is here: there is one process."""

    ranks: int = 1
    rows: int = 0  # of all processes
    first: int = 0  # that is ours
    sums: Tensor | None = None  # [k] `Policy.measure` of all rows
    number: int = 0  # of the forward pass


ALONE = JointBatch()


class Ranks:
    """Exchanges sums over rows with the other processes.

    All processes come through their forward passes in step, but one may have computed a gradient that another has not.
    So every exchange speaks of the same forward passes everywhere, and of each says who has a gradient. What all have
    is learnt.

    Args:
        group: The processes. None: those of the DistributedDataParallel whose forward pass is running, if any.
        in_features: d.
    """

    def __init__(self, group: "dist.ProcessGroup | None", in_features: int) -> None:
        self.group, self.in_features = group, in_features
        self.last: dist.ProcessGroup | None = None  # exchanged with
        self._passes = 0
        # By the number of the forward pass: how many rows all processes had in it, and what its gradient said here.
        self._pending: dict[int, int] = {}
        self._summaries: dict[int, Tensor] = {}

    def __deepcopy__(self, _memo: dict[int, Any]) -> "Ranks":
        return Ranks(self.group, self.in_features)  # a group cannot be copied, nor need it be

    def __reduce__(self) -> Any:  # noqa: ANN401
        return Ranks, (None, self.in_features)  # nor can it be pickled

    def current(self) -> "dist.ProcessGroup | None":
        """The processes to exchange with at this moment, if there is more than one."""
        ddp = torch.nn.parallel.DistributedDataParallel._active_ddp_module
        if ddp is not None and ddp._join_config.enable:  # some processes may have no more batches to bring
            return None
        group = self.group if self.group is not None or ddp is None else ddp.process_group
        return group if group is not None and dist.get_world_size(group) > 1 else None

    def remember(self, part: JointBatch, summary: Tensor) -> None:
        """Keep what a gradient said here until the next `exchange`. Of several to one forward pass, the last counts."""
        if part.number in self._pending:
            self._summaries[part.number] = summary

    def unlearnt(self) -> JointBatch:
        """The place of a forward pass that the other processes do not know of: nothing is learnt from it."""
        return ALONE if self.last is None else JointBatch(dist.get_world_size(self.last), number=-1)

    def forget(self) -> None:
        """Drop what gradients said so far: another state was loaded, which is not to learn from them."""
        self._summaries.clear()

    def exchange(
        self, group: "dist.ProcessGroup", policy: Policy, differences: Differences, state: State, x: Tensor
    ) -> tuple[JointBatch, State]:
        """Where the rows x [B, d] stand in the joint batch, and the state after what all processes have computed.

        All of them call this at the same points of their programs. It belongs into the forward pass: in the backward
        pass it would get between the wrapper's own reductions. Outside of both, all have no rows, and stand alone.
        """
        self.last = group
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        sizes = torch.zeros(ranks, dtype=torch.float64, device=x.device)
        sizes[rank] = x.shape[0]
        # In the place of a summary that this process does not have: one of no rows.
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
            if count > 0 or number <= self._passes - OLDEST_PASS:  # of others the backward pass may be yet to come
                del self._pending[number]
                self._summaries.pop(number, None)
        counts = [int(n) for n in joint_sizes.tolist()]
        if sum(counts) == 0:
            return ALONE, state
        self._passes += 1
        self._pending[self._passes] = sum(counts)
        return JointBatch(ranks, sum(counts), sum(counts[:rank]), sums.to(x.dtype), self._passes), state
