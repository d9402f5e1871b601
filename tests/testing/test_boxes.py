"""Exact boxes: their Jacobians are those that automatic differentiation finds, and their numbers are fixed."""

import pytest
import torch

from bondgrad.testing.boxes import Cubes, Linear, Quadratic, Sparse, TanhNetwork, Waves

DEPENDS = torch.tensor([[True, False, True], [False, True, False]])
BOXES = [Linear(), Quadratic(), TanhNetwork(), Waves(), Sparse(DEPENDS), Cubes(), Linear(1, 1), TanhNetwork(2, 3, 5)]


@pytest.mark.parametrize("box", BOXES, ids=lambda box: f"{type(box).__name__}-{box.in_features}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_jacobians_are_exact(box, dtype):
    generator = torch.Generator().manual_seed(0)
    x, gy = (torch.randn(7, n, generator=generator).to(dtype) for n in (box.in_features, box.out_features))
    jacobian = torch.func.vmap(torch.func.jacrev(lambda row: box(row[None])[0]))(x)
    assert box(x).shape == (7, box.out_features)
    assert box(x).dtype == box.jacobian(x).dtype == dtype
    assert torch.allclose(box.jacobian(x), jacobian, atol=1e-5)
    assert torch.allclose(box.vjp(x, gy), torch.einsum("bo,boi->bi", gy, jacobian), atol=1e-5)


@pytest.mark.parametrize(
    ("box", "sizes"),
    [(Linear(), (4, 6)), (Quadratic(), (4, 6)), (TanhNetwork(), (4, 6)), (Waves(), (4, 6)), (Cubes(), (5, 5))],
)
def test_default_sizes(box, sizes):
    assert (box.in_features, box.out_features) == sizes
    assert box(torch.zeros(2, sizes[0])).shape == (2, sizes[1])


@pytest.mark.parametrize("kind", [Linear, Quadratic, TanhNetwork, Waves])
def test_numbers_are_fixed_by_the_seed(kind):
    x = torch.linspace(-1, 1, 8).view(2, 4)
    assert torch.equal(kind()(x), kind(seed=0)(x))
    assert not torch.equal(kind()(x), kind(seed=1)(x))


def test_a_sparse_box_depends_on_what_its_pattern_says():
    x = torch.ones(1, 3)
    assert torch.equal(Sparse(DEPENDS).jacobian(x)[0] != 0, DEPENDS)
    assert torch.equal(Sparse(DEPENDS)(x), Sparse(DEPENDS, seed=0)(x))
    assert not torch.equal(Sparse(DEPENDS)(x), Sparse(DEPENDS, seed=1)(x))


def test_cubes_by_hand():
    x = torch.tensor([[0.0, 1.0, 2.0]])
    assert Cubes(3)(x).tolist() == [[0, 0, 6]]
    assert Cubes(3).jacobian(x).tolist() == [[[-1, 0, 0], [0, 2, 0], [0, 0, 11]]]


def test_weights_keep_the_size_of_sums():
    """Their variance is one over how many numbers are summed."""
    assert float(Linear(400, 100).a.square().mean() * 400) == pytest.approx(1, abs=0.03)
    assert float(Sparse(torch.ones(100, 400, dtype=torch.bool)).a.square().mean()) == pytest.approx(1, abs=0.03)


def test_the_layers_of_a_network_have_different_seeds():
    assert torch.equal(TanhNetwork().w1, Linear(4, 16, seed=0).a)
    assert torch.equal(TanhNetwork().w2, Linear(16, 6, seed=1).a)
    assert torch.equal(TanhNetwork(seed=3).w2, Linear(16, 6, seed=4).a)
