"""Training loops of all kinds: what people do around the layer, and with which libraries."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from bondgrad import BlackBox, BoxError
from bondgrad.data import california_housing
from bondgrad.experiments.demo import demo_runs
from bondgrad.metrics import exact_vjp
from bondgrad.networks import ffnn
from bondgrad.policies import Fixed
from tests.helpers import close, gradient, on_each_device, same_state

# ---- the demo's model, by hand and with libraries


def demo_model():
    parts = demo_runs(seed=0, epochs=1)[1].parts
    parts.black_box.hooks.clear()
    return nn.Sequential(parts.read_in, parts.black_box, parts.read_out)


def demo_data():
    data = california_housing(seed=0)
    return DataLoader(TensorDataset(data.x_train[:640], data.y_train[:640]), batch_size=64)


def parameters(model):
    return [p.detach().cpu().clone() for p in model.parameters()]


def plain_loop(device):
    model, loss = demo_model().to(device), nn.HuberLoss()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(2):
        for x, y in demo_data():
            optimizer.zero_grad()
            loss(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
    return model


def with_lightning(device):
    lightning = pytest.importorskip("lightning")

    class Lit(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.loss = demo_model(), nn.HuberLoss()

        def training_step(self, batch):
            x, y = batch
            return self.loss(self.model(x), y)

        def configure_optimizers(self):
            return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=1e-3)

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    accelerator = {"cpu": "cpu", "cuda": "gpu"}[device]
    lit = Lit()
    lightning.Trainer(max_epochs=2, accelerator=accelerator, devices=1, **quiet).fit(lit, demo_data())
    return lit.model


def with_accelerate(device):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=device == "cpu")
    model, loss = demo_model(), nn.HuberLoss()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model, optimizer, data = accelerator.prepare(model, optimizer, demo_data())
    for _ in range(2):
        for x, y in data:
            optimizer.zero_grad()
            accelerator.backward(loss(model(x), y))
            optimizer.step()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return accelerator.unwrap_model(model)


@on_each_device
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", [with_lightning, with_accelerate])
def test_libraries_train_as_a_plain_loop_does(library, device):
    expected, got = plain_loop(device), library(device)
    start = parameters(demo_model())
    assert all(torch.equal(a, b) for a, b in zip(parameters(got), parameters(expected), strict=True))
    assert not torch.equal(parameters(got)[0], start[0])
    assert got[1].stats.evaluations == 2 * 640 * 11


# ---- gradients that are added up, scaled and cut


@on_each_device
def test_gradient_accumulation(device):
    torch.manual_seed(0)
    net = ffnn([3, 20, 2])
    model = nn.Sequential(nn.Linear(3, 3), BlackBox(net, 3, policy=Fixed(1e-2))).to(device)
    exact = nn.Sequential(model[0], net)
    x = torch.randn(4, 8, 3, device=device)
    for part in x:
        (model(part).square().mean() / 4).backward()
    got = model[0].weight.grad.clone()
    model.zero_grad()
    exact(x).square().mean().backward()
    assert close(got, model[0].weight.grad)


@on_each_device
def test_gradient_clipping(device):
    model = nn.Sequential(nn.Linear(3, 3), BlackBox(torch.sin, 3, policy=Fixed(1e-2)), nn.Linear(3, 1)).to(device)
    (1e4 * model(torch.randn(8, 3, device=device)).sum()).backward()
    before = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert before > 1
    after = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    assert torch.isclose(after, torch.ones((), device=device), atol=1e-3)


@on_each_device
def test_a_loss_scaler_finds_its_scale(device):
    """Its first gradients overflow: they are to be skipped, and must leave no trace in the policy's state."""
    torch.manual_seed(0)
    net = ffnn([3, 20, 2])
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), BlackBox(net, 3, seed=0), nn.Linear(2, 1)).to(device)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**127, growth_interval=10**6)
    x, y = torch.randn(32, 3, device=device), 3 + torch.randn(32, 1, device=device)
    losses, skipped = [], 0
    for _ in range(150):
        before, scale = parameters(model), scaler.get_scale()
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16 if device == "cpu" else torch.float16):
            loss = nn.functional.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
        if scaler.get_scale() < scale:
            skipped += 1
            assert all(torch.equal(a, b) for a, b in zip(parameters(model), before, strict=True))
        assert all(torch.isfinite(b).all() for b in model[2].policy_state.buffers())
    assert 0 < skipped < 130
    assert losses[-1] < 0.5 * losses[0]


# ---- data loaders, module lists


class Simulated(Dataset):
    """A dataset that asks the box itself, in the processes that load data."""

    def __init__(self):
        self.box = BlackBox(torch.sin, 3, seed=0)

    def __len__(self):
        return 32

    def __getitem__(self, i):
        x = torch.full((3,), i / 32)
        return x, self.box(x)


@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_box_in_the_processes_of_a_data_loader(context):
    loader = DataLoader(Simulated(), batch_size=8, num_workers=2, multiprocessing_context=context)
    model = nn.Sequential(nn.Linear(3, 3), BlackBox(torch.sin, 3, seed=0, policy="bond"))
    for x, y in loader:
        assert torch.equal(y, x.sin())
        nn.functional.mse_loss(model(x), y).backward()
    assert model[1].stats.calls == 2 * 4


@on_each_device
def test_boxes_in_a_module_list(device):
    torch.manual_seed(0)
    nets = [ffnn([3, 20, 3]) for _ in range(3)]
    boxes = nn.ModuleList(BlackBox(net, 3, policy=Fixed(1e-2), seed=i) for i, net in enumerate(nets)).to(device)
    assert sum(name.endswith("_extra_state") for name in boxes.state_dict()) == 3
    x, gy = torch.randn(8, 3, device=device), torch.randn(8, 3, device=device)
    got = gradient(lambda x: sum(box(x) for box in boxes), x, gy)
    assert close(got, exact_vjp(lambda x: sum(net(x) for net in nets), x, gy))


# ---- exceptions in the middle of a step


@on_each_device
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception_training_goes_on_bit_for_bit(device, where, error):
    trouble = []

    def fn(x: torch.Tensor):
        if len(x) in trouble:
            trouble.append(1)  # nor does it answer single rows of these
            raise error("the device is busy")
        return torch.sin(x)

    def trainer():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 3), BlackBox(fn, 3, seed=0), nn.Linear(3, 1)).to(device)

    def step(model, x):
        model.zero_grad()
        model(x).square().sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad

    smooth, interrupted = trainer(), trainer()
    for i, x in enumerate(torch.randn(4, 8, 3, device=device)):
        step(smooth, x)
        if i == 2:
            before = copy.deepcopy(interrupted.state_dict())
            trouble.append(8 if where == "forward" else 8 * 6)
            with pytest.raises(BoxError if error is RuntimeError else error, match="the device is busy"):
                step(interrupted, x)
            trouble.clear()
            assert same_state(interrupted.state_dict(), before, but=["progress"])
        step(interrupted, x)
    assert same_state(interrupted.state_dict(), smooth.state_dict(), but=["progress"])
    assert interrupted[1].progress.steps == smooth[1].progress.steps == 4


def test_a_hook_that_raises_leaves_the_layer_usable():
    layer = BlackBox(torch.sin, 3, seed=0)
    handle = layer.register_step_hook(lambda box, step: 1 / 0)
    x, gy = torch.randn(8, 3), torch.randn(8, 3)
    with pytest.raises(ZeroDivisionError):
        gradient(layer, x, gy)
    handle.remove()
    assert close(gradient(layer, x, gy), gy * x.cos(), 1e-2)
