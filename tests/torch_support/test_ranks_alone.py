"""Exchanges between processes by themselves, in a group of one."""

import pickle

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from bondgrad import BlackBox, Central
from bondgrad.policies import Bond
from bondgrad.torch_support._ranks import ALONE, JointBatch, Ranks

DIFFERENCES = Central().differences


@pytest.fixture(params=[1, 2])
def group(request):
    """So many processes, of which only this one is there: sums are its own."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param - 1, world_size=request.param)
    yield dist.group.WORLD
    dist.destroy_process_group()


def exchange(ranks, group, state, rows):
    return ranks.exchange(group, Bond(), DIFFERENCES, state, torch.ones(rows, 2))


def test_a_process_alone():
    assert JointBatch(ranks=1, rows=0, first=0, sums=None, number=0) == ALONE
    ranks = Ranks(None, 2)
    assert ranks.current() is None
    assert ranks.unlearnt() == ALONE


def test_a_gradient_is_learnt_when_all_have_it(group):
    ranks, state, size = Ranks(group, 2), Bond().init(2), dist.get_world_size(group)
    part, before = exchange(ranks, group, state, 3)
    assert part[:3] == (size, 3, 0)
    assert part.number == 1
    assert before is state
    assert ranks.unlearnt() == JointBatch(size, number=-1)
    ranks.remember(part, torch.ones(2))
    ranks.remember(ranks.unlearnt(), torch.full((2,), 9.0))  # of no forward pass that they know
    part, after = exchange(ranks, group, state, 0)
    assert part is ALONE
    expected = Bond().observe(state, torch.ones(2), 3, DIFFERENCES)
    if size == 1:
        assert after.keys() == expected.keys()
        assert all(torch.equal(after[name], expected[name]) for name in expected)
    else:  # the other has none, and will not have it when this is forgotten
        assert after is state
    assert exchange(ranks, group, state, 0)[1] is state  # learnt, or dropped, once


def test_forward_passes_are_counted_and_the_last_gradient_of_each_counts(group):
    ranks, state = Ranks(group, 2), Bond().init(2)
    parts = [exchange(ranks, group, state, rows)[0] for rows in (3, 5)]
    assert [part.number for part in parts] == [1, 2]
    assert [part.rows for part in parts] == [3, 5]
    ranks.remember(parts[1], torch.zeros(2))
    ranks.remember(parts[1], torch.ones(2))
    after = exchange(ranks, group, state, 0)[1]
    expected = Bond().observe(state, torch.ones(2), 5, DIFFERENCES)
    assert all(torch.equal(after[name], expected[name]) for name in expected) == (dist.get_world_size(group) == 1)


def test_what_was_computed_before_a_state_was_loaded_is_forgotten(group):
    ranks, state = Ranks(group, 2), Bond().init(2)
    part, _ = exchange(ranks, group, state, 3)
    ranks.remember(part, torch.ones(2))
    ranks.forget()
    assert exchange(ranks, group, state, 0)[1] is state


@pytest.mark.parametrize("group", [1], indirect=True)
@pytest.mark.parametrize(("passes", "learnt"), [(127, True), (128, True), (129, False)])
def test_a_gradient_is_not_waited_for_forever(group, passes, learnt):
    ranks, state = Ranks(group, 2), Bond().init(2)
    first, _ = exchange(ranks, group, state, 3)
    for _ in range(passes):
        exchange(ranks, group, state, 3)
    ranks.remember(first, torch.ones(2))
    assert (exchange(ranks, group, state, 0)[1] is not state) == learnt


def test_processes_are_those_given_and_more_than_one(group):
    assert (Ranks(group, 2).current() is group) == (dist.get_world_size(group) > 1)
    assert Ranks(None, 2).current() is None  # outside of a DistributedDataParallel


def test_copies_have_the_group_and_pickles_have_not(group):
    ranks = Ranks(group, 2)
    assert pickle.loads(pickle.dumps(ranks)).group is None
    assert pickle.loads(pickle.dumps(ranks)).in_features == 2
    exchange(ranks, group, Bond().init(2), 3)
    copied = ranks.__deepcopy__({})
    assert copied.group is group
    assert copied.last is None


@pytest.mark.parametrize("group", [2], indirect=True)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_a_layer_exchanges_in_training_only(group, training, reentrant):
    """Inside a checkpoint of either kind, as outside of them."""
    box = BlackBox(torch.sin, 2, policy="bond", process_group=group).train(training)
    x = torch.ones(3, 2, requires_grad=True)
    if reentrant is None:
        box(x)
    else:
        checkpoint(box, x, use_reentrant=reentrant)
    assert (box.policy_state.ranks.last is group) == training
