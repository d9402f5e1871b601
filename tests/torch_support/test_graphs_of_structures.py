"""Structure, sequences and memory in captured training steps: as if nothing had been captured."""

import pytest
import torch
from torch import nn

from bondgrad import BlackBox, Central, Forward, GraphedStep, Simultaneous
from bondgrad.networks import ffnn
from bondgrad.structure import Blocks, Sequence
from tests.helpers import on_each_device, same_state
from tests.torch_support.test_graphs import Trainer, batches


class Modular(nn.Module):
    """Two networks side by side, which hear one another once a switch on the GPU is thrown."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([ffnn([2, 20, 2]), ffnn([2, 20, 2])])
        self.register_buffer("coupling", torch.zeros(1))

    def forward(self, x):
        y = torch.cat([part(x[:, 2 * i : 2 * i + 2]) for i, part in enumerate(self.parts)], 1)
        return y + self.coupling * x.roll(1, 1)


class Echo(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(10, 10) * 0.1)
        self.v = nn.Parameter(torch.randn(4, 10))

    def forward(self, x, state):
        states = []
        for t in range(x.shape[1]):
            state = torch.tanh(state @ self.w + x[:, t] @ self.v)
            states.append(state)
        return torch.stack(states, 1)[..., :4], state


class Structured(Trainer):
    """Four inputs and outputs, in rows or, where the box wants it, in time."""

    def __init__(self, device, make_box):
        super().__init__(device, make_box)
        torch.manual_seed(1)
        self.model[0], self.model[2] = ffnn([8, 20, 4]).to(device), ffnn([4, 20, 1]).to(device)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.Adam(trained, lr=1e-3, capturable=device == "cuda")


def in_time(**settings):
    start = torch.zeros(1, 10)
    return lambda: BlackBox(Echo(), 4, 4, state=start, seed=0, **settings)


BOXES = {
    "blocks": lambda: BlackBox(Modular(), 4, 4, structure=Blocks(2, 2), seed=0, policy="bond"),
    "pattern": lambda: BlackBox(
        Modular(), 4, 4, structure=torch.kron(torch.eye(2), torch.ones(2, 2)).bool(), seed=0, policy="bond"
    ),
    "forward": lambda: BlackBox(Modular(), 4, 4, structure=Blocks(2, 2), estimator=Forward(), seed=0, policy="bond"),
    "simultaneous": lambda: BlackBox(
        Modular(), 4, 4, structure=Blocks(2, 2), estimator=Simultaneous(2), seed=0, policy="bond"
    ),
    "auto": lambda: BlackBox(Modular(), 4, 4, structure="auto", seed=0, policy="bond"),
    "sequence": in_time(structure=Sequence()),
    "horizon": in_time(structure=Sequence(3), estimator=Central(normalize_rows=True)),
    "measured": in_time(structure=Sequence("auto")),
}


@on_each_device
@pytest.mark.parametrize("name", BOXES)
def test_graphed_and_eager_training_agree(device, name):
    data = batches(device, 60)
    trainers = [Structured(device, BOXES[name]) for _ in range(2)]
    step = GraphedStep(trainers[1].step, trainers[1].model, trainers[1].optimizer)
    for trainer, do in zip(trainers, (trainers[0].step, step), strict=True):
        trainer.run(do, data[:20])
        trainer.model.eval()
        with torch.no_grad():
            trainer.losses.append(trainer.model(data[0][0]).mean())
        trainer.model.train()
        trainer.run(do, data[20:40])
        if trainer.box.memory is not None:
            trainer.box.reset()
        trainer.run(do, data[40:])
    eager, graphed = trainers
    assert same_state(graphed.result(), eager.result())
    assert graphed.box.stats[:3] == eager.box.stats[:3]
    assert step.replays > 30 or device == "cpu"


@on_each_device
@pytest.mark.parametrize("steps", range(2, 7))
def test_a_reset_before_whichever_step_is_captured(device, steps):
    data = batches(device, 14)
    trainers = [Structured(device, BOXES["horizon"]) for _ in range(2)]
    step = GraphedStep(trainers[1].step, trainers[1].model, trainers[1].optimizer)
    for trainer, do in zip(trainers, (trainers[0].step, step), strict=True):
        trainer.run(do, data[:steps])
        trainer.box.reset()
        trainer.run(do, data[steps:])
    assert same_state(trainers[0].result(), trainers[1].result())
    assert step.replays > 3 or device == "cpu"


@on_each_device
def test_a_dependency_that_wakes_is_noticed_between_replays(device):
    trainer = Structured(device, BOXES["auto"])
    step = GraphedStep(trainer.step, trainer.model, trainer.optimizer)
    trainer.run(step, batches(device, 30, rows=64))
    assert trainer.box.structure.depends.sum() == 8
    trainer.box.fn.coupling.fill_(1.0)
    with pytest.warns(UserWarning, match="did not have"):
        trainer.run(step, batches(device, 60, rows=64))
    assert trainer.box.structure.depends.sum() > 8
    if device == "cuda":
        assert step.captures >= 2
        assert step.replays > 50
