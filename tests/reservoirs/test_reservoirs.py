"""The paper's reservoirs and others: shapes, weights, structure, and gradients through them."""

import copy

import pytest
import torch
from torch import nn

from bondgrad import BlackBox, GraphedStep, sign_accuracy
from bondgrad.metrics import exact_vjp
from bondgrad.networks import ffnn
from bondgrad.reservoirs import (
    EchoState,
    Fixed,
    HamiltonianEvolution,
    Instrument,
    Noisy,
    OrthogonalKernel,
    Parallel,
    Polynomial,
    QuantumDotArray,
    Rockmelon,
    SpringChain,
    Tile,
)
from bondgrad.structure import Blocks, Sequence
from tests.helpers import close, gradient, needs_cuda

RESERVOIRS = {
    "fixed": lambda: Fixed(5, 50, 4, seed=0),
    "parallel": lambda: Parallel(4, 5, 20, 3, seed=0),
    "tile": lambda: Tile(Fixed(3, 20, 2, seed=0), 4),
    "rockmelon": lambda: Rockmelon(2),
    "dots": lambda: QuantumDotArray(),
    "tiled dots": lambda: Tile(QuantumDotArray(), 2),
    "instrument": lambda: Instrument(QuantumDotArray()),
    "polynomial": lambda: Polynomial(5, 4, seed=0),
    "kernel": lambda: OrthogonalKernel(5, 12, seed=0),
    "spins": lambda: HamiltonianEvolution(5, seed=0),
    "springs": lambda: SpringChain(5),
    "noisy": lambda: Noisy(Fixed(5, 50, 4, seed=0), 1e-6, seed=0),
    "tiled parallel": lambda: Tile(Parallel(2, 5, 20, 3, seed=0), 2),
}
each = pytest.mark.parametrize("name", RESERVOIRS)


def parameters(module):
    return sum(p.numel() for p in module.parameters())


def rows(n, d, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


# ---- the paper's sizes


def test_parameters_are_those_of_the_paper():
    assert parameters(Fixed(5, 500, 5)) == 5_505
    assert parameters(Parallel(100, 5, 100, 5)) == 110_500
    assert parameters(Rockmelon(60)) == 758_002
    trainable = parameters(ffnn([8, 500, 500, 600], nn.ReLU)) + parameters(ffnn([120, 500, 1]))
    assert trainable == 616_601  # with it, on California Housing


# ---- what all of them do


@each
def test_rows_to_rows(name):
    box = RESERVOIRS[name]()
    x = rows(7, box.in_features)
    y = box(x)
    assert y.shape == (7, box.out_features)
    assert close(box(x[2:4]), y[2:4])


@each
def test_they_are_frozen(name):
    box = RESERVOIRS[name]()
    assert not any(p.requires_grad for p in box.parameters())
    assert box.state_dict() or name == "springs"


def test_so_are_modules_of_others_in_them():
    assert not any(p.requires_grad for p in Tile(nn.Linear(3, 2), 2).parameters())
    assert not any(p.requires_grad for p in Noisy(nn.Linear(3, 2), 0.1).parameters())
    assert Noisy(nn.Linear(3, 2), 0.1).structure == "dense"


@each
def test_rows_of_another_width(name):
    box = RESERVOIRS[name]()
    with pytest.raises(ValueError, match=f"has {box.in_features} inputs, got rows of {box.in_features + 1}"):
        box(rows(3, box.in_features + 1))


@each
def test_no_rows_at_all(name):
    box = RESERVOIRS[name]()
    assert box(rows(0, box.in_features)).shape == (0, box.out_features)


@each
def test_double_precision(name):
    box = RESERVOIRS[name]()
    x = rows(4, box.in_features)
    assert close(RESERVOIRS[name]().double()(x.double()), box(x).double(), 1e-4)


@each
def test_the_gradient_with_the_structure_they_declare(name):
    box = RESERVOIRS[name]()
    layer = BlackBox(box, box.in_features, seed=0)
    x, gy = rows(32, box.in_features), rows(32, box.out_features, seed=1)
    exact = exact_vjp(box, x, gy)
    for _ in range(4):  # steps find their lengths
        g = gradient(layer, x, gy)
    assert float(sign_accuracy(g, exact)) > 0.99
    assert close(g, exact, 0.02)


@each
def test_one_block_does_not_depend_on_another(name):
    """What a structure says is so."""
    box = RESERVOIRS[name]()
    if not isinstance(box.structure, Blocks):
        assert box.structure == "dense"
        return
    jacobian = torch.autograd.functional.jacobian(lambda x: box(x[None])[0], rows(1, box.in_features)[0])
    blocks = box.in_features // box.structure.n_in
    inside = torch.block_diag(*[torch.ones(box.structure.n_out, box.structure.n_in)] * blocks).bool()
    assert (jacobian[~inside] == 0).all()
    assert (jacobian[inside] != 0).all()


@each
def test_saved_and_copied(name):
    box = RESERVOIRS[name]()
    x = rows(3, box.in_features)
    box(x)
    copied = copy.deepcopy(box)
    loaded = RESERVOIRS[name]()
    loaded.load_state_dict(copy.deepcopy(box.state_dict()))
    expected = box(x)
    assert torch.equal(copied(x), expected)
    assert torch.equal(loaded(x), expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda **seed: Fixed(3, 9, 2, **seed),
        lambda **seed: Parallel(2, 3, 9, 2, **seed),
        lambda **seed: EchoState(3, 9, 2, **seed),
        lambda **seed: Polynomial(3, 2, **seed),
        lambda **seed: OrthogonalKernel(3, 5, **seed),
        lambda **seed: HamiltonianEvolution(3, **seed),
    ],
)
def test_seeds(make):
    def weights(**seed):
        return torch.cat([t.flatten().abs().float() for t in make(**seed).state_dict().values()])

    before = torch.get_rng_state()
    assert torch.equal(weights(seed=1), weights(seed=1))
    assert not torch.equal(weights(seed=1), weights(seed=2))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    first = weights()
    torch.manual_seed(5)
    assert torch.equal(weights(), first)


# ---- one by one


def test_parallel_is_networks_side_by_side():
    box, x = Parallel(3, 2, 7, 4, seed=0), rows(5, 6)
    torch.manual_seed(0)
    networks = [ffnn([2, 7, 4]) for _ in range(3)]
    expected = torch.cat([network(part) for network, part in zip(networks, x.split(2, 1), strict=True)], 1)
    assert torch.allclose(box(x), expected, atol=1e-6)


def test_tile_is_one_box_again_and_again():
    box, x = Fixed(3, 20, 2, seed=0), rows(5, 12)
    assert torch.allclose(Tile(box, 4)(x), torch.cat([box(part) for part in x.split(3, 1)], 1), atol=1e-6)


def test_evaluations_of_blocks_are_those_of_one():
    for box, of_one in ((Parallel(50, 5, 10, 5), 10), (Rockmelon(4), 20), (Tile(Parallel(3, 2, 10, 5), 4), 4)):
        layer = BlackBox(box, box.in_features, policy="bond")
        gradient(layer, rows(8, box.in_features), rows(8, box.out_features))
        assert layer.stats.evaluations == 8 * (1 + of_one)


@pytest.mark.parametrize("wrapper", [lambda box: Tile(box, 2), Instrument], ids=["tile", "instrument"])
def test_what_cannot_be_built_on(wrapper):
    for box in (torch.sin, nn.Sequential(nn.Linear(3, 2))):
        with pytest.raises(TypeError, match="box must be a module with in_features and out_features"):
            wrapper(box)
    with pytest.raises(ValueError, match="box must take rows, and EchoState takes sequences: put"):
        wrapper(EchoState(3, 4, 2))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Fixed(5, 0, 2),
        lambda: Fixed(-1, 5, 2),
        lambda: Fixed(5, 5, 0),
        lambda: Parallel(0, 5, 5, 5),
        lambda: Parallel(2, 5, 0, 5),
        lambda: EchoState(5, 0, 2),
        lambda: EchoState(5, 5, 2, spectral_radius=-1.0),
        lambda: Tile(Fixed(2, 3, 2), 0),
        lambda: Noisy(Fixed(2, 3, 2), -0.1),
        lambda: Polynomial(0, 2),
        lambda: Polynomial(2, 2, degree=0),
        lambda: OrthogonalKernel(2, 2, width=0.0),
        lambda: HamiltonianEvolution(0),
        lambda: HamiltonianEvolution(2, time=float("nan")),
        lambda: SpringChain(-2),
        lambda: SpringChain(3, dt=0.0),
        lambda: SpringChain(3, time=-1.0),
    ],
)
def test_wrong_arguments(make):
    with pytest.raises(ValueError, match="must be"):
        make()


class TestEchoState:
    def test_is_frozen(self):
        assert not any(p.requires_grad for p in EchoState(3, 4, 2).parameters())

    def test_spectral_radius(self):
        for radius in (0.5, 1.2):
            w = EchoState(3, 40, 2, spectral_radius=radius, seed=0).w
            assert float(torch.linalg.eigvals(w).abs().max()) == pytest.approx(radius, rel=1e-5)

    def test_pieces_with_the_state_between_them(self):
        echo, x = EchoState(3, 20, 2, seed=0), rows(4 * 10, 3).view(4, 10, 3)
        whole = echo(x)
        first, state = echo(x[:, :6], echo.start.expand(4, -1))
        second, _ = echo(x[:, 6:], state)
        assert torch.allclose(torch.cat((first, second), 1), whole, atol=1e-6)

    @pytest.mark.parametrize("horizon", [None, "auto"])
    def test_gradient_through_time(self, horizon):
        echo = EchoState(3, 20, 2, spectral_radius=0.3, horizon=horizon, seed=0)
        layer = BlackBox(echo, 3, seed=0)
        assert isinstance(layer.structure, Sequence)
        x, gy = rows(2 * 12, 3).view(2, 12, 3), rows(2 * 12, 2, seed=1).view(2, 12, 2)
        at = x.clone().requires_grad_()
        (exact,) = torch.autograd.grad(echo(at), at, gy)
        for _ in range(4):
            g = gradient(layer, x, gy)
        assert float(sign_accuracy(g, exact)) > 0.97

    def test_goes_on_from_call_to_call(self):
        echo = EchoState(3, 20, 2, seed=0)
        layer = BlackBox(echo, 3, state=echo.start)
        x = rows(20, 3)
        y = torch.cat((layer(x[:8]), layer(x[8:])))
        assert torch.allclose(y, echo(x[None])[0], atol=1e-6)


class TestNoisy:
    def test_uniform(self):
        box, x = Fixed(2, 10, 3, seed=0), rows(5000, 2)
        for symmetric, low in ((False, 0.0), (True, -0.1)):
            noise = Noisy(box, 0.1, symmetric=symmetric, seed=0)(x) - box(x)
            assert low - 1e-6 <= float(noise.min()) < low + 1e-3
            assert 0.1 - 1e-3 < float(noise.max()) <= 0.1 + 1e-6
            assert float(noise.mean()) == pytest.approx((low + 0.1) / 2, abs=2e-3)

    def test_has_the_structure_of_what_is_noisy(self):
        assert isinstance(Noisy(Parallel(2, 3, 4, 3), 0.1).structure, Blocks)
        echo = Noisy(EchoState(3, 20, 2, seed=0), 1e-6, seed=0)
        layer = BlackBox(echo, 3, state=echo.box.start, seed=0)
        x = rows(12, 3).requires_grad_()
        layer(x).sum().backward()
        assert torch.isfinite(x.grad).all()

    def test_a_run_that_is_resumed_hears_the_same(self):
        box, x = Noisy(Fixed(2, 10, 3, seed=0), 0.1, seed=0), rows(4, 2)
        box(x)
        state = copy.deepcopy(box.state_dict())
        expected = box(x)
        other = Noisy(Fixed(2, 10, 3, seed=9), 0.1, seed=9)
        other.load_state_dict(state)
        assert torch.equal(other(x), expected)

    @needs_cuda
    def test_in_a_graph_it_is_different_each_time(self):
        box = Noisy(Fixed(3, 10, 3, seed=0), 0.1, seed=0)
        model = nn.Sequential(nn.Linear(3, 3), BlackBox(box, 3, policy="bond", seed=0), nn.Linear(3, 1)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        graphed, x = GraphedStep(step, model, optimizer), rows(8, 3).cuda()
        losses = [float(graphed(x)) for _ in range(20)]
        assert graphed.replays > 10
        assert len(set(losses)) == 20
