"""Saved, copied and moved without a trace, and no trace where none is wanted."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from bondgrad import BlackBox, TensorBoard
from bondgrad.policies import Fixed
from bondgrad.testing.boxes import Waves
from tests.helpers import close, gradient, on_each_device, same_state


@on_each_device
@pytest.mark.parametrize("situation", ["no_grad", "inference_mode", "detached", "eval"])
def test_one_call_and_no_trace(situation, device):
    layer = BlackBox(Waves(3, 2), 3, seed=0).to(device)
    before = copy.deepcopy(layer.state_dict())
    x = torch.randn(5, 3, device=device, requires_grad=situation != "detached")
    if situation == "eval":
        layer.eval()
        y = layer(x)
    elif situation == "detached":
        y = layer(x)
    else:
        with getattr(torch, situation)():
            y = layer(x)
    assert y.shape == (5, 2)
    assert (layer.stats.calls, layer.stats.evaluations) == (1, 5)
    assert same_state(layer.state_dict(), before, but=["requests"] if situation == "eval" else ["progress"])
    assert layer.progress.requests == 1
    assert layer.progress.steps == 0
    assert layer.progress.batches == (situation != "eval" and device == "cpu")  # which the mean of the outputs has


@on_each_device
def test_gradients_in_eval_mode_leave_no_trace(device):
    exact = Waves(3, 2)
    layer = BlackBox(exact, 3, seed=0).to(device)
    x, gy = torch.randn(5, 3, device=device), torch.randn(5, 2, device=device)
    gradient(layer, x, gy)
    before = copy.deepcopy(layer.state_dict())
    layer.eval()
    g = gradient(layer, x, gy)
    assert close(g, exact.vjp(x, gy), 1e-2)
    assert torch.equal(g, gradient(layer, x, gy))
    assert same_state(layer.state_dict(), before, but=["requests"])


def test_a_frozen_read_in_costs_nothing():
    layer = BlackBox(Waves(3, 2), 3)
    out = nn.Linear(2, 1)
    out(layer(torch.randn(5, 3))).sum().backward()
    assert layer.stats.calls == 1


# ---- copies


def by_state_dict(layer):
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = BlackBox(layer.fn, 3, seed=99).to(layer.policy_state.sums.device)
    other.load_state_dict(torch.load(file, weights_only=True))
    return other


@on_each_device
@pytest.mark.parametrize("copied", [by_state_dict, copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_goes_on_bit_for_bit(copied, device):
    layer = BlackBox(Waves(3, 2), 3, seed=5).to(device)
    data = torch.randn(6, 5, 3, device=device)
    gy = torch.randn(5, 2, device=device)
    for x in data[:3]:
        gradient(layer, x, gy)
    other = copied(layer)
    for x in data[3:]:
        assert torch.equal(gradient(layer, x, gy), gradient(other, x, gy))


def test_torchs_seed_decides_where_none_is_given():
    def first_gradient():
        torch.manual_seed(3)
        layer = BlackBox(Waves(3, 2), 3)
        return gradient(layer, torch.ones(5, 3), torch.ones(5, 2))

    assert torch.equal(first_gradient(), first_gradient())


def test_a_checkpoint_from_another_device_can_be_loaded():
    layer = BlackBox(torch.sin, 3, seed=1)
    state = layer.state_dict()
    elsewhere = {"cuda:7": torch.zeros(16, dtype=torch.uint8)}
    layer.load_state_dict(state | {"policy_state._extra_state": {"seed": 1, "devices": elsewhere}})
    gradient(layer, torch.randn(4, 3), torch.ones(4, 3))
    assert set(layer.state_dict()["policy_state._extra_state"]["devices"]) == {"cpu", "cuda:7"}


def test_made_on_the_meta_device_and_filled_later():
    with torch.device("meta"):
        layer = BlackBox(torch.sin, 3)
    source = BlackBox(torch.sin, 3, seed=4)
    layer.to_empty(device="cpu").load_state_dict(source.state_dict())
    x, gy = torch.randn(4, 3), torch.ones(4, 3)
    assert torch.equal(gradient(layer, x, gy), gradient(source, x, gy))


def test_limits_on_the_meta_device():
    with torch.device("meta"):
        layer = BlackBox(torch.sin, 3, limits=(-1, 1))
    layer.to_empty(device="cpu").load_state_dict(BlackBox(torch.sin, 3).state_dict())
    assert layer(torch.full((1, 3), 5.0)).max() < 0.85


def test_copies_of_a_layer_that_is_being_watched(tmp_path):
    writer = SummaryWriter(tmp_path)
    layer = BlackBox(torch.sin, 3, seed=0)
    layer.register_step_hook(TensorBoard(writer))
    gradient(layer, torch.randn(50_000, 3), torch.randn(50_000, 3))
    other = copy.deepcopy(layer)
    gradient(other, torch.randn(4, 3), torch.randn(4, 3))
    layer.hooks.clear()
    assert len(pickle.dumps(layer)) < 20_000  # without what was only there to be looked at
    writer.close()


def test_values_may_change_places_in_a_policys_state():
    state = BlackBox(torch.sin, 3, policy="calibrated").policy_state
    before = state.read(torch.device("cpu"))
    before["step"].copy_(torch.tensor([1.0, 2.0, 3.0]))
    state.write({"step": before["spread"], "spread": before["step"]})
    assert state.get_buffer("spread").tolist() == [1, 2, 3]
    assert state.get_buffer("step").tolist() == [0, 0, 0]


def test_alone_or_without_a_state_there_is_nothing_to_exchange():
    for policy in ("bond", Fixed(0.01)):
        layer = BlackBox(torch.sin, 3, policy=policy)
        before = {name: value.clone() for name, value in layer.policy_state.named_buffers()}
        layer.exchange()
        assert all(torch.equal(value, before[name]) for name, value in layer.policy_state.named_buffers())
