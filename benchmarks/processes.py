"""One model trained by several processes, and by one on the joint batch: do they agree?

    python benchmarks/processes.py

Fifty steps with Adam, on 1, 2 and 4 processes (gloo, on the CPU), under DistributedDataParallel, and with read-in and
read-out sharded by FSDP. Every fifth joint batch has ten rows, which do not divide evenly. Buffers are not broadcast:
if the moments agree it is because they were exchanged. As a control, the same without any exchange.
"""

import os
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from record import save
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import bondgrad
from bondgrad.networks import ffnn

STEPS, ROWS, UNEVEN_ROWS, NOISE = 50, 24, 10, 1e-2
Where = dict[str, Any]  # dtype and device
WRAPPERS = ("DDP", "FSDP", "DDP, no exchange")


def make_model(where: Where, group: Any = None, **how: Any) -> nn.Sequential:
    """Read-in, box, read-out. BOND's steps are long and the box bends, so that they decide the gradient."""
    torch.manual_seed(0)
    read_in, exact, read_out = ffnn([8, 32, 5]), ffnn([5, 64, 5]), ffnn([5, 32, 1])
    how = {"policy": "bond"} | how
    box = bondgrad.BlackBox(exact, 5, 5, noise=NOISE, process_group=group, seed=0, **how)
    return nn.Sequential(read_in, box, read_out).to(**where)


def joint_batches(where: Where) -> list[tuple[Tensor, Tensor]]:
    """The data, the same for all."""
    random = torch.Generator().manual_seed(1)
    sizes = [UNEVEN_ROWS if step % 5 == 4 else ROWS for step in range(STEPS)]
    return [tuple(torch.randn(n, d, generator=random).to(**where) for d in (8, 1)) for n in sizes]  # type: ignore[misc]


def train(model: nn.Module, loss: Any, batches: list[Any]) -> None:
    """The plain loop."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()


def final_state(model: nn.Module, box: bondgrad.BlackBox) -> dict[str, Tensor]:
    """Parameters and moments, whole."""
    box.exchange()
    parameters = [p.detach() for p in model.parameters()]
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in parameters]
    sums, weights = box.policy_state.sums
    return {"parameters": torch.cat([p.flatten() for p in whole]).cpu(), "moments": (sums / weights).cpu()}


def on_one_process(ranks: int, where: Where) -> dict[str, Tensor]:
    """The joint batch, with the loss that `ranks` processes minimise: the mean of the means over their shares."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        errors = (model(x) - y).square()
        return torch.stack([share.mean() for share in errors.tensor_split(ranks)]).mean()

    model = make_model(where)
    train(model, loss, joint_batches(where))
    return final_state(model, model[1])


def on_this_rank(rank: int, ranks: int, wrapper: str, where: Where, folder: str) -> None:
    """One of several processes: its share of every batch."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    model = make_model(where, dist.group.WORLD if wrapper == "FSDP" else None)
    box = model[1]
    assert isinstance(box, bondgrad.BlackBox)
    if wrapper == "DDP, no exchange":
        box.policy_state.ranks.current = lambda: None  # type: ignore[method-assign]
    trained: nn.Module = model
    if wrapper == "FSDP":
        mesh = init_device_mesh("cpu", (ranks,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model[2], mesh=mesh)
    else:
        warnings.simplefilter("ignore", FutureWarning)  # newer versions of torch have another name for the argument
        trained = DistributedDataParallel(model, broadcast_buffers=False)
    shares = [(x.tensor_split(ranks)[rank], y.tensor_split(ranks)[rank]) for x, y in joint_batches(where)]
    train(trained, lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]), shares)
    torch.save(final_state(model, box), f"{folder}/{rank}.pt")
    dist.barrier()
    os._exit(0)  # an orderly end waits for gloo's threads, now and then for ever


def spawn(program: Any, arguments: tuple[Any, ...], ranks: int, limit: float = 180.0) -> None:
    """Run program(rank, *arguments) in as many processes; processes that wait for one another do not wait for ever."""
    started = mp.spawn(program, arguments, nprocs=ranks, join=False)
    end = time.monotonic() + limit
    while not started.join(timeout=5):
        if time.monotonic() > end:
            for process in started.processes:
                process.kill()
            raise TimeoutError(f"not done after {limit:.0f} s: the processes probably wait for one another")


def on_several_processes(ranks: int, wrapper: str, where: Where) -> list[dict[str, Tensor]]:
    """What every process ends with."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(on_this_rank, (ranks, wrapper, where, folder), ranks)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(ranks)]


def largest_difference(ranks: int, wrapper: str, dtype: torch.dtype, device: str = "cpu") -> dict[str, float]:
    """Between any of several processes and one: of parameters, and of moments relative to their value."""
    where: Where = {"dtype": dtype, "device": device}
    alone = on_one_process(ranks, where)
    together = on_several_processes(ranks, wrapper, where)
    scale = {"parameters": torch.ones(()), "moments": alone["moments"].abs()}
    return {
        name: max(float(((state[name] - alone[name]) / scale[name]).abs().max()) for state in together)
        for name in alone
    }


def main() -> None:
    """Measure, print, save."""
    numbers = []
    for wrapper in WRAPPERS:
        for dtype in (torch.float32, torch.float64):
            for ranks in (1, 2, 4):
                differences = largest_difference(ranks, wrapper, dtype)
                numbers.append({"wrapper": wrapper, "dtype": str(dtype), "processes": ranks, **differences})
                print(wrapper, dtype, ranks, " ".join(f"{name} {value:.1e}" for name, value in differences.items()))
    save("processes", {"steps": STEPS, "runs": numbers})


if __name__ == "__main__":
    main()
