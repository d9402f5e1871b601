"""Several processes that train one model, with real ones over gloo."""

import contextlib
import copy
import os
import tempfile

import pytest
import torch
import torch.distributed as dist
from processes import largest_difference, make_model, spawn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from bondgrad import BlackBox, Central, Forward, Simultaneous
from bondgrad.policies import Bond, Fixed, Gaussian, Policy, Steps
from bondgrad.structure import Sequence
from tests.helpers import on_each_device, same_state


@on_each_device
@pytest.mark.parametrize("ranks", [2, 4])
def test_several_processes_do_what_one_does_on_the_joint_batch(ranks, device):
    agree(largest_difference(ranks, "DDP", torch.float64, device))


@pytest.mark.parametrize("ranks", [2, 4])
def test_so_they_do_with_sharded_neighbours(ranks):
    agree(largest_difference(ranks, "FSDP", torch.float64))


def agree(differences):
    assert differences["moments"] < 1e-6
    assert differences["parameters"] < 1e-13


def test_without_an_exchange_they_do_not():
    differences = largest_difference(2, "DDP, no exchange", torch.float64)
    assert differences["moments"] > 0.1
    assert differences["parameters"] > 1e-6


class RelativeStep(Policy):
    """Steps in proportion to the root mean square of an input in this batch and in the last ones: of all processes."""

    def init(self, in_features):
        return {"squares": torch.zeros(in_features, dtype=torch.float64), "rows": torch.zeros(())}

    def measure(self, x):
        return x.square().sum(0)

    def steps(self, state, batch, n, noise):
        squares = self.measure(batch.x) if batch.sums is None else batch.sums
        size = 0.1 * ((state["squares"] + squares) / (state["rows"] + batch.rows)).sqrt()
        return Steps(size.expand(n, *batch.x.shape), batch.uniform(n), size, size)

    def summarize(self, state, seen):
        return self.measure(seen.x)

    def observe(self, state, summary, rows, differences):
        return {"squares": 0.9 * state["squares"] + summary, "rows": 0.9 * state["rows"] + rows}


VARIANTS = [
    {"policy": policy, "estimator": estimator}
    for policy in (Bond("error-terms"), Bond(reduce="sum"), Fixed(0.3), Gaussian(0.3), RelativeStep())
    for estimator in (Central(), Forward(), Simultaneous(2), Central(normalize_rows=True))
] + [{"structure": Sequence(horizon)} for horizon in (None, 2)]


def every_variant(rank, folder):
    """A few steps of each on uneven shares, against the same on the joint batch in this process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)

    def train(model, wrapped, loss):
        in_time = model[1].structure.in_time
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        for x in torch.randn(4, 7, 8, generator=torch.Generator().manual_seed(1)).double():
            optimizer.zero_grad()
            rows = torch.stack((x, x.sin(), x.cos()), 1) if in_time else x
            loss(wrapped, rows.split([5, 2])).backward()
            optimizer.step()
        model[1].exchange()
        return model.state_dict()

    for variant in VARIANTS:
        alone, together = (make_model({"dtype": torch.float64}, **variant) for _ in range(2))
        expected = train(
            alone, alone, lambda f, shares: sum(s.square().mean() for s in f(torch.cat(shares)).split([5, 2])) / 2
        )
        got = train(together, DistributedDataParallel(together), lambda f, shares: f(shares[rank]).square().mean())
        random = [state.pop("1.policy_state._extra_state") for state in (expected, got)]
        assert same_state(*random, but=["output_mean"]), variant  # each process has that of its own rows
        for name in expected:
            assert torch.allclose(got[name], expected[name], rtol=1e-6, atol=1e-12), (variant, name)
    finish(rank, folder)


def finish(rank, folder):
    with open(f"{folder}/{rank}.done", "w"):
        dist.barrier()
    os._exit(0)  # an orderly end waits for gloo's threads, now and then for ever


def what_programs_do(rank, folder):
    """Whatever is done by one process alone must not wait for the other; what is done by both must keep them equal."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = make_model({"dtype": torch.float32})
    box = model[1]
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    data = torch.randn(20, 6, 8, generator=torch.Generator().manual_seed(rank))

    def train(batches, forward=ddp, together=contextlib.nullcontext):
        for x in batches:
            optimizer.zero_grad()
            with together():
                forward(x).square().mean().backward()
            optimizer.step()

    train(data[:3])
    if rank == 0:  # a validation, and a look at gradients
        model.eval()
        with torch.no_grad():
            model(data[0])
        model(data[0]).sum().backward()
        model.train()
        with torch.no_grad():
            model(data[0])
        model.state_dict()
    train(data[3:5], lambda x: checkpoint(ddp, x, use_reentrant=False))
    ddp(data[5]).sum()  # a forward pass without a backward pass
    train(data[6:8], together=ddp.no_sync)
    train(data[8:9])

    y = ddp(data[12]).square().mean()
    if rank == 0:  # looks at a gradient that nobody else looks at
        torch.autograd.grad(y, model[0][0].weight, retain_graph=True)
    y.backward()
    with ddp.no_sync():
        y = ddp(data[13]).square().mean()
        if rank == 1:  # the other skips this one
            y.backward()
    train(data[14:16])

    box.exchange()
    states = [None, None]
    dist.all_gather_object(states, {name: buffer.tolist() for name, buffer in box.policy_state.named_buffers()})
    assert states[0] == states[1]

    saved = [copy.deepcopy(model.state_dict())]
    dist.broadcast_object_list(saved)  # as if one process had saved and all had loaded
    train(data[16:18])  # of which nothing must be left
    model.load_state_dict(saved[0])
    train(data[9:12])
    box.exchange()
    first = copy.deepcopy(model.state_dict())
    model.load_state_dict(saved[0])
    train(data[9:12])
    box.exchange()
    assert same_state(first, model.state_dict())
    assert box.due()  # not to be captured
    copy.deepcopy(model)(data[0])
    with ddp.join():  # one process has more batches than the other, so they cannot exchange anything
        train(data[9 : 11 + rank])
    finish(rank, folder)


def calibrated(rank, folder):
    """Policies that try the box out stay equal, whatever data they see."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for estimator in (Central(), Forward(), Simultaneous(2)):
        model = make_model({"dtype": torch.float64}, policy="calibrated", estimator=estimator)
        box, ddp = model[1], DistributedDataParallel(model)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        for x in torch.randn(60, 6 + 3 * rank, 8, generator=torch.Generator().manual_seed(rank)).double():
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            optimizer.step()
        box.exchange()
        states = [None, None]
        dist.all_gather_object(states, {name: buffer.tolist() for name, buffer in box.policy_state.named_buffers()})
        assert states[0] == states[1], estimator
        assert all(torch.isfinite(buffer).all() for buffer in box.policy_state.buffers()), estimator
        assert (box.policy_state.step > 0).all(), estimator
        assert box.policy_state.round > 1, estimator
    finish(rank, folder)


def not_finite(rank, folder):
    """Rows of one process that are not finite are nothing that the other could learn from."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    box = BlackBox(torch.sin, 3, limits=(-1, 1), policy=RelativeStep(), process_group=dist.group.WORLD, seed=0)
    for step in range(3):
        x = torch.full((4, 3), 0.5)
        x[1, 2] = torch.nan if rank == 0 else 0.5
        known = torch.isfinite(x).all(1)
        told = pytest.warns(UserWarning, match="in 1 row,") if step == rank == 0 else contextlib.nullcontext()
        with told:
            y = box(x.requires_grad_())
        y.sum().backward()
        assert torch.allclose(x.grad[known], x[known].detach().cos(), atol=1e-2)
        assert not x.grad[~known].any()
    box.exchange()
    assert torch.allclose(box.policy_state.squares, torch.tensor(8 * 0.25 * 2.71).double().expand(3))
    finish(rank, folder)


@pytest.mark.parametrize("program", [every_variant, what_programs_do, calibrated, not_finite])
def test_programs(program):
    with tempfile.TemporaryDirectory() as folder:
        spawn(program, (folder,), ranks=2)
        assert {name for name in os.listdir(folder) if name.endswith(".done")} == {"0.done", "1.done"}


def test_a_group_of_one_is_no_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        box = BlackBox(torch.sin, 3, process_group=dist.group.WORLD)
        nn.Sequential(nn.Linear(2, 3), box)(torch.randn(4, 2)).sum().backward()
        box.exchange()
        assert box.policy_state.sums.any()
        copy.deepcopy(box)
    finally:
        dist.destroy_process_group()
