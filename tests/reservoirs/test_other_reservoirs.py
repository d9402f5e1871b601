"""Reservoirs that the paper only mentions: each against what its mathematics or physics says."""

import pytest
import torch

from bondgrad.reservoirs import HamiltonianEvolution, OrthogonalKernel, Polynomial, SpringChain
from tests.reservoirs.test_reservoirs import rows


def test_polynomial_has_its_degree():
    x = rows(4, 5).double()
    for degree in (1, 2, 3):
        box = Polynomial(5, 3, degree=degree, seed=0).double()
        along = torch.stack([box(t * x) for t in torch.arange(6.0)])
        assert float(along.diff(n=degree + 1, dim=0).abs().max()) < 1e-9 * float(along.abs().max())
        assert float(along.diff(n=degree, dim=0).abs().min()) > 1e-6


def test_orthogonal_kernel_is_a_gaussian_one():
    box = OrthogonalKernel(4, 20_000, width=2.0, seed=0)
    x, y = rows(1, 4), rows(1, 4, seed=1)
    expected = torch.exp(-(x - y).square().sum() / (2 * 2.0**2))
    assert float((box(x) * box(y)).mean()) == pytest.approx(float(expected), abs=0.03)
    directions = box.direction[:4] / box.direction[:4].norm(dim=1, keepdim=True)
    assert torch.allclose(directions @ directions.T, torch.eye(4), atol=1e-5)


class TestHamiltonianEvolution:
    def test_evolution_is_unitary(self):
        u = torch.complex(*HamiltonianEvolution(4, seed=0).evolution)
        assert torch.allclose(u.mH @ u, torch.eye(16, dtype=u.dtype), atol=1e-5)

    def test_without_time_the_spins_are_where_they_were_turned(self):
        x = rows(6, 3)
        assert torch.allclose(HamiltonianEvolution(3, time=0.0, seed=0)(x), torch.cos(x), atol=1e-6)

    def test_one_spin_in_a_field_precesses(self):
        """Up, about the x axis with twice the field."""
        torch.manual_seed(0)
        torch.randn(1, 1)
        field = float(torch.rand(1) + 0.5)
        box = HamiltonianEvolution(1, time=0.7, seed=0)
        assert float(box(torch.zeros(1, 1))) == pytest.approx(float(torch.cos(torch.tensor(2 * field * 0.7))), abs=1e-5)


class TestSpringChain:
    def test_keeps_its_energy(self):
        box, x = SpringChain(5, dt=0.01), rows(8, 5).double()
        after = box.energy(*box.evolve(x))
        assert torch.allclose(after, box.energy(x, torch.zeros_like(x)), rtol=1e-3)

    def test_one_mass_between_soft_springs_swings_as_a_cosine(self):
        box, x = SpringChain(1, stiffening=0.0, time=3.0, dt=0.001), rows(4, 1).double()
        assert torch.allclose(box(x), x * torch.cos(torch.tensor(3.0 * 2**0.5)), atol=1e-5)
