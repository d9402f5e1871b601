"""Networks for pictures: the paper's sizes, what they compute, and that they learn."""

import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from bondgrad import GraphedStep
from bondgrad.networks import densenet, ffnn, resnet101
from tests.helpers import close, needs_cuda

NETWORKS = {
    "densenet": (lambda: densenet(7, depth=16, growth=4), (3, 32, 32)),
    "resnet": (lambda: resnet101(7), (1, 28, 28)),
}
each = pytest.mark.parametrize("name", NETWORKS)


def parameters(*modules):
    return sum(p.numel() for module in modules for p in module.parameters())


def pictures(n, *shape, seed=0):
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed))


# ---- both


@each
def test_channels_last_changes_nothing(name):
    make, shape = NETWORKS[name]
    network, x = make(), pictures(3, *shape)
    with torch.no_grad():
        y = network(x)
        assert y.shape == (3, 7)
        network.to(memory_format=torch.channels_last)
        assert close(network(x.contiguous(memory_format=torch.channels_last)), y, 1e-5)


@each
def test_gradients_reach_all_parameters(name):
    make, shape = NETWORKS[name]
    network = make()
    for norm in network.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.ones_(norm.weight)  # those that begin at zero let nothing through yet
    (network(pictures(4, *shape)) * pictures(4, 7)).sum().backward()
    assert all(float(p.grad.abs().max()) > 0 for p in network.parameters())


@each
def test_convolutions_begin_as_he_has_them(name):
    convolutions = [m for m in NETWORKS[name][0]().modules() if isinstance(m, nn.Conv2d)]
    assert all(m.bias is None for m in convolutions)
    weights = [m.weight * math.sqrt(m.out_channels * m.kernel_size[0] ** 2 / 2) for m in convolutions]
    assert float(torch.cat([w.detach().flatten() for w in weights]).std()) == pytest.approx(1, rel=0.02)


@needs_cuda
@each
def test_a_step_never_waits_for_the_device_and_can_be_a_graph(name):
    make, shape = NETWORKS[name]
    network = make().cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)

    def step(x):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = network(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    x = pictures(8, *shape).cuda().contiguous(memory_format=torch.channels_last)
    step(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        step(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graphed = GraphedStep(step, network, optimizer)
    losses = [float(graphed(x)) for _ in range(20)]
    assert graphed.replays > 10
    assert losses[-1] < losses[0]


# ---- DenseNet


def test_densenet_has_the_parameters_of_the_paper():
    with torch.device("meta"):  # sizes only
        assert parameters(densenet(500), ffnn([500, 500, 500, 100])) == 3_907_256
        assert parameters(densenet(600), ffnn([120, 500, 500, 100])) == 3_785_756  # with Rockmelon
        assert densenet(500)[-1].in_features == 684


def by_the_book(network, x, layers):
    """DenseNet as its paper has it, every layer fed with the list of all before it; with the network's parameters."""
    weights = iter(network.parameters())

    def activated(features, padding):
        x = torch.cat(features, 1)
        x = functional.relu(functional.batch_norm(x, None, None, next(weights), next(weights), training=True))
        return x if padding is None else functional.conv2d(x, next(weights), padding=padding)

    features = [functional.conv2d(x, next(weights), padding=1)]
    for block in range(3):
        if block:
            features = [functional.avg_pool2d(activated(features, 0), 2)]
        for _ in range(layers):
            features.append(activated([activated(features, 0)], 1))
    return functional.linear(activated(features, None).mean((2, 3)), next(weights), next(weights))


@pytest.mark.parametrize(("depth", "layers"), [(10, 1), (22, 3)])
def test_densenet_computes_what_its_paper_says(depth, layers):
    network, x = densenet(5, depth=depth, growth=6), pictures(4, 3, 32, 32)
    assert close(network(x).detach(), by_the_book(network, x, layers).detach(), 1e-5)


def test_densenet_takes_other_pictures():
    assert densenet(5, depth=10, growth=4, in_channels=1)(pictures(2, 1, 28, 28)).shape == (2, 5)


def test_densenet_in_bfloat16():
    network, x = densenet(5, depth=10, growth=6), pictures(8, 3, 32, 32)
    with torch.no_grad():
        y = network(x)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = network(x)
    assert rounded.dtype == torch.bfloat16
    assert close(rounded.float(), y, 0.05)


def test_densenet_learns():
    """To tell upright stripes from level ones, in pictures it has not seen."""

    def batch(seed):
        generator = torch.Generator().manual_seed(seed)
        phase = torch.rand(32, 1, 1, 1, generator=generator) * 6
        stripes = torch.sin(torch.arange(32.0) + phase).expand(-1, 3, 32, -1)
        level = torch.arange(32) % 2
        x = torch.where(level.bool()[:, None, None, None], stripes.mT, stripes)
        return x + torch.randn(x.shape, generator=generator), level

    network = densenet(2, depth=10, growth=4)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for seed in range(20):
        x, y = batch(seed)
        optimizer.zero_grad()
        functional.cross_entropy(network(x), y).backward()
        optimizer.step()
    x, y = batch(99)
    assert float((network(x).argmax(1) == y).float().mean()) > 0.9


@pytest.mark.parametrize("depth", [0, 4, 9, 11, 10.5])
def test_depths_that_densenet_cannot_have(depth):
    with pytest.raises(ValueError, match="depth must be"):
        densenet(5, depth=depth)


# ---- ResNet-101


def test_resnet_has_as_many_parameters_as_its_layers():
    """Per block of width w with n inputs: n·w + 9 w² + 4 w² weights, and two numbers for each of 6 w channels."""
    blocks = [64] * 3 + [128] * 4 + [256] * 23 + [512] * 3
    inputs = [64, *(4 * w for w in blocks[:-1])]
    expected = 9 * 64 + 2 * 64 + sum(n * w + 13 * w * w + 12 * w for n, w in zip(inputs, blocks, strict=True))
    shortcuts = [(64, 256), (256, 512), (512, 1024), (1024, 2048)]
    expected += sum(n * m + 2 * m for n, m in shortcuts) + 2048 * 10 + 10
    with torch.device("meta"):
        network = resnet101(10)
        assert parameters(network) == expected == 42_511_818
        # 101 layers with weights on the longest way: beside the shortcuts.
        assert sum(isinstance(m, nn.Conv2d) for m in network.modules()) - len(shortcuts) + 1 == 101
        assert parameters(resnet101(10, in_channels=3)) == expected + 2 * 9 * 64


def test_resnet_sees_28_14_7_and_4_pixels():
    sizes, products = [], []

    def seen(layer, _, y):
        sizes.append(y.shape[-1])
        products.append(y[0].numel() * layer.weight[0].numel())

    with torch.device("meta"):
        network = resnet101(10)
        for layer in network.modules():
            if isinstance(layer, nn.Conv2d):
                layer.register_forward_hook(seen)
        network(torch.empty(2, 1, 28, 28))
    assert sum(products) == 1_974_854_656
    assert sorted(set(sizes)) == [4, 7, 14, 28]


def test_resnet_begins_as_its_shortcuts():
    network = resnet101(10)
    x = pictures(2, 256, 7, 7).abs()
    assert torch.equal(network[4](x), x)  # the second block
