"""Several processes that train one model: what the policy learns is what one process on the joint batch would learn."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bondgrad.policies import Policy, State


class Part(NamedTuple):
    """Where the rows of this process stand in the joint batch. As it is here: there is one process."""

    ranks: int = 1
    rows: int = 0  # of all processes
    first: int = 0  # that is ours
    sums: Tensor | None = None  # [k] `Policy.measure` of all rows


ALONE = Part()


class Ranks:
    """Exchanges sums over rows with the other processes.

    Args:
        group: The processes. None: those of the DistributedDataParallel whose forward pass is running, if any.
    """

    def __init__(self, group: "dist.ProcessGroup | None") -> None:
        self.group = group
        self.last: dist.ProcessGroup | None = None  # exchanged with
        self._pending: list[tuple[Tensor, int]] = []  # (our summary, joint rows) of steps not yet learnt from

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ranks":
        other = Ranks(self.group)  # a group cannot be copied, nor need it be
        other.last, other._pending = self.last, list(self._pending)
        return other

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"group": None, "last": None}  # a group cannot be pickled

    def current(self) -> "dist.ProcessGroup | None":
        """The processes to exchange with at this moment, if there is more than one."""
        group = self.group
        if group is None:
            if not dist.is_available() or not dist.is_initialized():
                return None
            ddp = torch.nn.parallel.DistributedDataParallel._active_ddp_module
            if ddp is None or ddp._join_config.enable:  # in a Join, some processes may have no more batches to bring
                return None
            group = ddp.process_group
        return group if dist.get_world_size(group) > 1 else None

    def remember(self, summary: Tensor, rows: int) -> None:
        """Keep what this process saw in one backward pass until the next `exchange`."""
        self._pending.append((summary, rows))

    def exchange(
        self, group: "dist.ProcessGroup", policy: Policy, state: State, x: Tensor | None
    ) -> tuple[Part, State]:
        """Where the rows x [B, d] stand in the joint batch, and the state after what is pending.

        All processes call this at the same points of their programs. It belongs into the forward pass: in the backward
        pass it would get between the wrapper's own reductions.
        """
        self.last = group
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        device = next(iter(state.values())).device if x is None else x.device
        sizes = torch.zeros(ranks, dtype=torch.float64, device=device)
        measured = sizes.new_empty(0)
        if x is not None:
            sizes[rank] = len(x)
            measured = policy.measure(x)
        summaries = [summary for summary, _ in self._pending]
        parts = [sizes, measured, *summaries]
        joint = torch.cat([part.flatten().double() for part in parts])
        dist.all_reduce(joint, group=group)
        joint_sizes, sums, *joint_summaries = joint.split([part.numel() for part in parts])  # type: ignore[no-untyped-call]
        for (local, rows), summary in zip(self._pending, joint_summaries, strict=True):
            state = policy.observe(state, summary.view(local.shape).to(local.dtype), rows)
        self._pending = []
        if x is None:
            return ALONE, state
        counts = [int(n) for n in joint_sizes.tolist()]
        return Part(ranks, sum(counts), sum(counts[:rank]), sums.to(x.dtype)), state
