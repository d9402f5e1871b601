"""What a captured step depends on, and what cannot be captured: as far as that can be seen without a GPU."""

import copy

import pytest
import torch
from torch import nn

from bondgrad import BlackBox, GraphedStep
from bondgrad.baselines import FDSA, SPSA
from bondgrad.policies import Fixed


class Training:
    def __init__(self, optimizer=torch.optim.Adam):
        self.model = nn.Sequential(
            nn.Linear(3, 2, bias=False), nn.BatchNorm1d(2), BlackBox(torch.sin, 2, 2, policy="bond")
        )
        self.optimizer = optimizer(self.model.parameters(), lr=1e-3)
        self.baseline = SPSA(self.model[0].parameters())
        self.graphed = GraphedStep(self.step, self.model, self.optimizer, self.baseline)

    def step(self, x):
        self.optimizer.zero_grad()
        self.model(x).sum().backward()
        self.optimizer.step()


def freeze(training):
    training.model[0].weight.requires_grad_(False)


def evaluate(training):
    training.model[1].eval()


def another_rate(training):
    training.optimizer.param_groups[0]["lr"] = 1e-2


def another_box(training):
    training.model[2].policy = Fixed(0.1)


def a_parameter_elsewhere(training):
    training.model[0].weight.data = training.model[0].weight.data.clone()


def a_buffer_elsewhere(training):
    training.model[1].running_mean = training.model[1].running_mean.clone()


def another_state(training):
    training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))


def longer_perturbations(training):
    training.baseline.mu = 0.1


CHANGES = [
    freeze,
    evaluate,
    another_rate,
    another_box,
    a_parameter_elsewhere,
    a_buffer_elsewhere,
    another_state,
    longer_perturbations,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_graph_would_miss(change):
    training = Training()
    training.graphed(torch.randn(4, 3))
    before = training.graphed._current_version()
    training.graphed(torch.randn(4, 3))
    assert training.graphed._current_version() == before  # a step changes values in place
    change(training)
    assert training.graphed._current_version() != before


def test_a_rate_that_is_a_tensor_may_change_in_place():
    training = Training(lambda parameters, lr: torch.optim.SGD(parameters, lr=torch.tensor(lr)))
    before = training.graphed._current_version()
    training.optimizer.param_groups[0]["lr"].fill_(0.5)
    assert training.graphed._current_version() == before
    training.optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    assert training.graphed._current_version() != before


def test_on_a_cpu_every_step_runs_as_it_is():
    training = Training()
    for _ in range(5):
        training.graphed(torch.randn(4, 3))
    assert (training.graphed.eager_steps, training.graphed.captures, training.graphed.replays) == (5, 0, 0)
    without_arguments = GraphedStep(lambda: 7, nn.Linear(2, 2))
    assert without_arguments() == 7
    assert GraphedStep(lambda x: x, nn.Linear(2, 2))("no tensor") == "no tensor"


def test_optimizers_that_count_on_the_cpu_are_refused():
    class Counting(torch.optim.SGD):
        def step(self):
            self.state[self.param_groups[0]["params"][0]]["steps"] = 1

    for optimizer, name in ((torch.optim.Adam, "step"), (Counting, "steps")):
        training = Training(optimizer)
        training.graphed(torch.randn(4, 3))
        with pytest.raises(TypeError, match=f"{optimizer.__name__} keeps its '{name}' on the CPU: make it with capt"):
            training.graphed._check_optimizers()
    training = Training(torch.optim.SGD)
    training.graphed(torch.randn(4, 3))
    training.graphed._check_optimizers()


@pytest.mark.parametrize("part", [nn.Linear(2, 2), torch.optim.SGD([torch.zeros(1)]), FDSA([torch.zeros(1)])])
def test_kinds_of_parts(part):
    assert GraphedStep(lambda x: x + 1, part)(1) == 2
    with pytest.raises(TypeError, match="needs the modules, optimizers, baselines and scalers"):
        GraphedStep(lambda x: x, part, "model")


def test_random_numbers_of_parts_are_known():
    training = Training()
    model, baseline = training.model, training.baseline
    assert training.graphed.random_numbers() == [model[2].policy_state.random, baseline.random]
