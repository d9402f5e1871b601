"""Boxes that are modules: their tensors at every moment, and the modes that they are in."""

import pytest
import torch
from torch import nn

from bondgrad import BoxError
from bondgrad.calling._modules import ModuleTensors, entries, freeze, in_eval_mode


def test_the_tensors_of_a_module_are_those_of_this_moment():
    linear = nn.Linear(2, 2)
    tensors = ModuleTensors(nn.Sequential(linear, nn.BatchNorm1d(2, affine=False)))
    assert [p is q for p, q in zip(tensors.parameters(), (linear.weight, linear.bias), strict=True)] == [True, True]
    linear.weight, linear.bias = nn.Parameter(torch.ones(2, 2, device="meta")), None
    assert tensors.parameters()[0] is linear.weight
    assert tensors.parameters()[1] is None
    assert tensors.device() == torch.device("meta")


def test_a_device_is_that_of_the_first_tensor_that_there_is():
    assert ModuleTensors(torch.sin).device() is None
    assert ModuleTensors(nn.Tanh()).device() is None
    assert ModuleTensors(nn.BatchNorm1d(2, affine=False, device="meta")).device() == torch.device("meta")
    linear = nn.Linear(2, 2, device="meta")
    tensors = ModuleTensors(linear)
    linear.weight = None
    assert tensors.device() == torch.device("meta")
    linear.bias = None
    assert tensors.device() is None


def test_parameters_may_be_others_of_the_same_values():
    linear = nn.Linear(2, 2)
    tensors = ModuleTensors(linear)
    before = tensors.parameters()
    tensors.check_parameters(before)
    linear.weight = nn.Parameter(linear.weight.detach().clone())
    tensors.check_parameters(before)
    linear.bias = None
    tensors.check_parameters([linear.weight, None])
    for others in (before, [None, None], [linear.weight], [linear.weight, None, None], [linear.weight + 1, None]):
        with pytest.raises(BoxError, match="not those of the forward pass any more"):
            tensors.check_parameters(others)


def test_entries_are_those_that_can_be_looked_into():
    first, second = {"a": 1, "b": None}, {"c": 2}
    assert entries([first, "compiled", second]) == [(first, "a"), (second, "c")]


def test_a_module_is_frozen_as_far_as_it_can_be():
    module = freeze(nn.Sequential(nn.Linear(2, 2), nn.Dropout()))
    assert not any(part.training for part in module.modules())
    assert not any(p.requires_grad for p in module.parameters())

    class Exported(nn.Linear):
        def train(self, mode=True):
            raise NotImplementedError

    assert not freeze(Exported(2, 2)).weight.requires_grad


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_parameters_that_are_not_made_yet_are_left_alone():
    module = freeze(nn.LazyLinear(2))
    assert not module.training
    assert module.weight.requires_grad


def test_modes_are_as_they_were_after_an_evaluation():
    module = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout().eval(), nn.Dropout()))
    module.eval()
    module[1][1].train()
    before = [part.training for part in module.modules()]
    assert sum(before) == 1
    with pytest.raises(OSError, match="no power"), in_eval_mode(module):
        assert not any(part.training for part in module.modules())
        raise OSError("no power")
    assert [part.training for part in module.modules()] == before
    with in_eval_mode(torch.sin):  # which has none
        pass
