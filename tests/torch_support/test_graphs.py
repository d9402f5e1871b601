"""Whole training steps as CUDA graphs; without a device they run as they are."""

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from bondgrad import BlackBox, Central, Forward, GraphedStep, Simultaneous
from bondgrad.baselines import PGT, SPSA
from bondgrad.networks import ffnn
from bondgrad.policies import Bond, Fixed, Gaussian
from tests.helpers import gradient, needs_cuda, on_each_device, same_state


class Trainer:
    """A model, an optimizer and the step that a graph is made of."""

    def __init__(self, device, make_box=None, optimizer=None):
        torch.manual_seed(0)
        box = make_box() if make_box else BlackBox(ffnn([5, 50, 4]), 5, 4, seed=0, policy="bond")
        self.model = nn.Sequential(ffnn([8, 20, 5]), box, ffnn([4, 20, 1])).to(device)
        self.box = self.model[1]
        self.losses = []
        trained = [p for p in self.model.parameters() if p.requires_grad]
        on_gpu = device == "cuda"
        self.optimizer = optimizer(trained) if optimizer else torch.optim.Adam(trained, lr=1e-3, capturable=on_gpu)

    def step(self, x, y):
        self.optimizer.zero_grad()
        loss = nn.functional.huber_loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def run(self, step, data):
        self.losses += [step(x, y) for x, y in data]

    def result(self):
        optimizer = self.optimizer.state_dict()["state"]
        return self.model.state_dict() | {"losses": torch.stack(self.losses), "optimizer": optimizer}


def batches(device, n, rows=16):
    random = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(rows, d, generator=random).to(device) for d in (8, 1)) for _ in range(n)]


@on_each_device
@pytest.mark.parametrize("estimator", [Central(), Forward(), Simultaneous(2), Central(normalize_rows=True)], ids=repr)
@pytest.mark.parametrize("policy", [Bond(), Bond("error-terms"), Fixed(1e-2), Gaussian(1e-2)], ids=str)
def test_graphed_and_eager_training_agree(device, estimator, policy):
    def make_box():
        return BlackBox(ffnn([5, 50, 4]), 5, 4, estimator=estimator, policy=policy, limits=(-2, 2), seed=0)

    data = batches(device, 12)
    eager, graphed = Trainer(device, make_box), Trainer(device, make_box)
    eager.run(eager.step, data)
    step = GraphedStep(graphed.step, graphed.model, graphed.optimizer)
    graphed.run(step, data)
    assert same_state(graphed.result(), eager.result())
    assert graphed.box.stats[:3] == eager.box.stats[:3]
    assert torch.equal(graphed.box.stats.step, eager.box.stats.step)
    assert (step.captures, step.replays, step.eager_steps) == ((1, 9, 3) if device == "cuda" else (0, 0, 12))


@on_each_device
@pytest.mark.parametrize("method", [SPSA, PGT])
def test_perturbed_parameters_are_others_in_every_replay(device, method):
    """A baseline draws random numbers of its own: as a part of the step, those of the graph are the same."""
    results = []
    for graphed in (False, True):
        trainer = Trainer(device, lambda: nn.Linear(5, 4))
        baseline = method(trainer.model[0].parameters(), n=2, seed=3)

        def step(x, y, trainer=trainer, baseline=baseline):
            trainer.optimizer.zero_grad()
            baseline.estimate(lambda: nn.functional.huber_loss(trainer.model(x), y))
            trainer.optimizer.step()
            return nn.functional.huber_loss(trainer.model(x), y).detach()

        taken = GraphedStep(step, trainer.model, trainer.optimizer, baseline) if graphed else step
        trainer.run(taken, batches(device, 12))
        results.append(trainer.result())
    assert same_state(*results)
    assert taken.replays == (9 if device == "cuda" else 0)
    version = taken._current_version()
    baseline.mu /= 2
    assert taken._current_version() != version


@on_each_device
def test_whatever_happens_between_steps_counts(device):
    """Odd batches, another learning rate, eval and train, a validation, a loaded state, and a gradient by hand."""

    def run(trainer, step):
        model, box, data = trainer.model, trainer.box, batches(device, 40)
        trainer.run(step, data[:6])
        trainer.run(step, batches(device, 1, rows=7))
        trainer.run(step, data[6:9])
        trainer.optimizer.param_groups[0]["lr"] = 1e-2
        trainer.run(step, data[9:12])
        model.eval()
        with torch.no_grad():
            trainer.losses.append(model(data[0][0]).mean())
        trainer.run(step, data[12:15])
        model.train()
        trainer.run(step, data[15:18])
        box.noise = 1e-3
        trainer.run(step, data[18:21])
        box.policy = Bond(max_step=0.1)
        trainer.run(step, data[21:24])
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        trainer.run(step, data[24:27])
        gradient(box, torch.ones(3, 5, device=device), torch.ones(3, 4, device=device))
        trainer.run(step, data[27:30])
        box.on_failure = "raise"
        trainer.run(step, data[30:33])
        return trainer

    eager, graphed = Trainer(device), Trainer(device)
    run(eager, eager.step)
    step = GraphedStep(graphed.step, graphed.model, graphed.optimizer)
    run(graphed, step)
    assert same_state(graphed.result(), eager.result())
    assert graphed.box.stats[:3] == eager.box.stats[:3]
    assert step.replays > 10 or device == "cpu"
    assert step.captures == (5 if device == "cuda" else 0)  # at first, and for rate, noise, policy and loading


@on_each_device
def test_what_moves_in_memory_is_noticed(device):
    """A loaded optimizer and a model that went elsewhere and back: the graph must not use what was there before."""

    def run(trainer, step):
        data = batches(device, 20)
        trainer.run(step, data[:6])
        saved = copy.deepcopy(trainer.optimizer.state_dict())
        trainer.run(step, data[6:10])
        trainer.optimizer.load_state_dict(saved)
        trainer.run(step, data[10:14])
        trainer.model.double().float()
        trainer.run(step, data[14:17])
        trainer.model[2].requires_grad_(False)
        trainer.run(step, data[17:])
        return trainer.result()

    eager, graphed = Trainer(device), Trainer(device)
    step = GraphedStep(graphed.step, graphed.model, graphed.optimizer)
    assert same_state(run(graphed, step), run(eager, eager.step))
    assert step.captures == (4 if device == "cuda" else 0)


@on_each_device
def test_every_shape_that_keeps_coming_is_captured(device):
    """Epochs of three whole batches and a rest."""
    data = [batch for _ in range(6) for batch in (*batches(device, 3), *batches(device, 1, rows=7))]
    eager, graphed = Trainer(device), Trainer(device)
    eager.run(eager.step, data)
    step = GraphedStep(graphed.step, graphed.model, graphed.optimizer)
    graphed.run(step, data)
    assert same_state(graphed.result(), eager.result())
    assert (step.captures, step.replays, step.eager_steps) == ((2, 18, 6) if device == "cuda" else (0, 0, 24))


@on_each_device
def test_gradients_are_those_of_the_last_step(device):
    eager, graphed = Trainer(device), Trainer(device)
    step = GraphedStep(graphed.step, graphed.model, graphed.optimizer)
    for batch in (*batches(device, 6), *batches(device, 1, rows=7), *batches(device, 3)):
        eager.step(*batch)
        step(*batch)
        for p, q in zip(eager.model.parameters(), graphed.model.parameters(), strict=True):
            assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad)


@on_each_device
def test_with_a_loss_scaler_or_gradients_of_arguments_it_runs_as_it_is(device):
    box = BlackBox(torch.sin, 3, 3, policy="bond").to(device)
    step = GraphedStep(lambda x: box(x).sum().backward(), box)
    for _ in range(6):
        x = torch.randn(4, 3, device=device, requires_grad=True)
        step(x)
        assert x.grad is not None
    trainer, scaler = Trainer(device), torch.amp.GradScaler(device)
    scaled = GraphedStep(trainer.step, trainer.model, trainer.optimizer, scaler)
    trainer.run(scaled, batches(device, 6))
    assert step.eager_steps == scaled.eager_steps == 6


@on_each_device
def test_hooks_run_after_every_step(device):
    seen = []
    trainer = Trainer(device)
    trainer.box.register_step_hook(lambda box, step: seen.append((step.g, box.stats.evaluations)))
    trainer.run(GraphedStep(trainer.step, trainer.model, trainer.optimizer), batches(device, 8))
    assert [evaluations for _, evaluations in seen] == [16 * 11 * (i + 1) for i in range(8)]
    assert len({float(g.sum()) for g, _ in seen}) == 8  # each its own


@on_each_device
def test_results_are_copies(device):
    trainer = Trainer(device)
    step = GraphedStep(trainer.step, trainer.model, trainer.optimizer)
    losses = [step(x, y) for x, y in batches(device, 8)]
    assert len({float(loss) for loss in losses}) == 8


@needs_cuda
def test_failures_are_counted_in_replays():
    box = BlackBox(lambda x: torch.where(x > 0.5, torch.nan, x.sin()), 5, 5, policy=Fixed(0.4), limits=(-0.3, 0.3))
    model = nn.Sequential(nn.Linear(8, 5), box).cuda()
    box.limits = None
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.fill_(0.3)  # half of the points lie where the box gives NaN
    step = GraphedStep(lambda x: model(x).sum().backward(), model)
    for _ in range(6):
        step(torch.ones(4, 8, device="cuda"))
    assert step.replays == 2  # the first call finds out which arrays the function takes, three more warm up
    with pytest.warns(UserWarning, match="120 rows got no finite output"):
        assert box.stats.failures == 6 * 4 * 5


@needs_cuda
@pytest.mark.parametrize(
    ("box", "optimizer", "reason"),
    [
        (lambda: BlackBox(looks_at_values, 5, 4, seed=0, policy="bond"), None, "cannot be captured"),
        (None, torch.optim.Adam, "make it with capturable=True"),
    ],
)
def test_what_cannot_be_captured_runs_as_it_is(box, optimizer, reason):
    data = batches("cuda", 10)
    eager, graphed = (Trainer("cuda", box, optimizer) for _ in range(2))
    eager.run(eager.step, data)
    step = GraphedStep(graphed.step, graphed.model, graphed.optimizer)
    with pytest.warns(UserWarning, match=reason):
        graphed.run(step, data)
    assert (step.captures, step.replays, step.eager_steps) == (1, 0, 10)
    assert torch.isfinite(torch.randn(4, device="cuda")).all()  # torch's own random numbers are out of it
    assert same_state(graphed.result(), eager.result())


def looks_at_values(x: torch.Tensor):
    return x[:, :4].sin() if x.sum().item() < 1e9 else x[:, :4]


@needs_cuda
def test_a_forgotten_graph_does_not_go_in_the_middle_of_a_capture():
    def captured():
        model = nn.Linear(8, 8).cuda()
        step = GraphedStep(lambda x: (model(x).sum().detach(), [[] for _ in range(5000)])[0], model)
        step.itself = step  # so that only the collector finds it
        for _ in range(5):
            step(torch.ones(4, 8, device="cuda"))
        return step.replays

    assert [captured() for _ in range(5)] == [2] * 5  # a warning would be an error here


@needs_cuda
def test_a_box_that_must_run_as_python_does():
    def fn(x: np.ndarray):
        return np.sin(x[:, :4])

    trainer = Trainer("cuda", lambda: BlackBox(fn, 5, 4, policy="bond"))
    step = GraphedStep(trainer.step, trainer.model, trainer.optimizer)
    trainer.run(step, batches("cuda", 6))
    assert (step.captures, step.eager_steps) == (0, 6)


@needs_cuda
def test_a_learning_rate_that_keeps_changing_is_mentioned():
    trainer = Trainer("cuda")
    step = GraphedStep(trainer.step, trainer.model, trainer.optimizer)
    data = batches("cuda", 2)

    def another_rate_every_other_step():
        for i in range(60):
            trainer.optimizer.param_groups[0]["lr"] = 1e-3 / (1 + i)
            trainer.run(step, data)

    with pytest.warns(UserWarning, match="make it a tensor"):
        another_rate_every_other_step()
    lr = torch.tensor(1e-3, device="cuda")
    trainer = Trainer("cuda", optimizer=lambda p: torch.optim.Adam(p, lr=lr, capturable=True))
    schedule = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.5)
    step = GraphedStep(trainer.step, trainer.model, trainer.optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(20):
            trainer.run(step, data)
            schedule.step()
    assert step.captures == 1
    assert float(lr) < 1e-8


def test_parts_are_asked_for():
    with pytest.raises(TypeError, match="needs the modules, optimizers, baselines and scalers"):
        GraphedStep(lambda x: x)
    with pytest.raises(TypeError, match="needs the modules, optimizers, baselines and scalers"):
        GraphedStep(lambda x: x, "model")
