"""The quantum-dot array, against closed forms of quantum transport."""

import math

import pytest
import torch

from bondgrad.reservoirs import QuantumDotArray
from tests.helpers import close

ENERGY = torch.linspace(-2, 2, 41, dtype=torch.float64)


def volts(n, gates=10, seed=0):
    return torch.rand(n, gates, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 6 - 3


def transmission(device, x, energy=ENERGY):
    return device.scattering(x, energy)[..., 1, 0].abs().square()


def test_one_dot_is_a_breit_wigner_resonance():
    device = QuantumDotArray(dots=1)
    x = volts(20)
    level = device.hamiltonian[0, 0] - x @ device.lever_arms[0].double()  # [N]
    source, drain = device.leads[0].double().square()
    width = source + drain
    expected = source * drain / ((ENERGY - level[:, None]).square() + width.square() / 4)
    assert torch.allclose(transmission(device, x), expected, rtol=1e-6)


def test_the_phase_of_one_dot_turns_by_pi_across_its_resonance():
    device = QuantumDotArray(dots=1)
    far = torch.tensor([-1e4, 1e4], dtype=torch.float64)
    before, after = torch.angle(device.scattering(volts(1), far)[0, :, 1, 0]).tolist()
    assert abs(after - before) == pytest.approx(math.pi, abs=1e-3)


def test_two_dots():
    """By the inverse of a two by two matrix, written out."""
    device = QuantumDotArray(dots=2, disorder=0.3)
    x = volts(20)
    (a, c), (b, d) = device.leads.double()  # of dots 1 and 2, each to source and drain
    hop = device.hamiltonian[0, 1].double()
    own = device.hamiltonian.diagonal().double() - x @ device.lever_arms.double().T  # [N, 2]
    m11, m22 = ((ENERGY - own[:, i, None]) + 0.5j * (g @ g) for i, g in enumerate(device.leads.double()))
    m12 = -hop + 0.5j * (a * b + c * d)
    amplitude = (c * m22 * a - c * m12 * b - d * m12 * a + d * m11 * b) / (m11 * m22 - m12**2)
    assert torch.allclose(transmission(device, x), amplitude.abs().square(), rtol=1e-6)


def test_two_dots_split_into_bonding_and_antibonding_levels():
    """With weak leads there are two resonances, twice the hopping apart."""
    device = QuantumDotArray(dots=2, disorder=0.0, coupling=1e-3)
    energy = torch.linspace(-3, 3, 60_001, dtype=torch.float64)
    t = transmission(device, torch.zeros(1, 10, dtype=torch.float64), energy)[0]
    peaks = energy[1:-1][(t[1:-1] > t[:-2]) & (t[1:-1] > t[2:]) & (t[1:-1] > 0.1)]
    assert len(peaks) == 2
    assert float(peaks[1] - peaks[0]) == pytest.approx(2 * abs(float(device.hamiltonian[0, 1])), abs=1e-3)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dots", [1, 2, 5, 14])
def test_no_electron_is_lost_and_none_is_made(dots, seed):
    s = QuantumDotArray(dots=dots, seed=seed).scattering(volts(50), ENERGY)
    assert close(s.mH @ s, torch.eye(2, dtype=s.dtype).expand_as(s))
    assert float(s.abs().max()) <= 1 + 1e-12


@pytest.mark.parametrize("seed", range(4))
def test_reciprocity(seed):
    """From source to drain as from drain to source: there is no magnetic field."""
    s = QuantumDotArray(seed=seed).scattering(volts(50), ENERGY)
    assert close(s, s.mT)
    assert not close(s[..., 0, 0], s[..., 1, 1])  # while they are reflected differently


def test_readings_are_averages_over_the_window_of_energies():
    """Of a Fermi function at either end: the integral of |t|² (f - f') / bias, by a fine sum."""
    bias, temperature = 0.4, 0.1
    device = QuantumDotArray(bias=bias, temperature=temperature, energies=200)
    energy = torch.linspace(-3, 3, 6001, dtype=torch.float64)
    upper, lower = (torch.special.expit((side * bias / 2 - energy) / temperature) for side in (1, -1))
    x = volts(10)
    s = device.scattering(x, energy)[..., 1, 0]
    weight = (upper - lower) / bias
    current = torch.trapezoid(s.abs().square() * weight, energy)
    phase = torch.angle(1 + torch.trapezoid(s * weight, energy))
    assert torch.allclose(device(x), torch.stack((current, phase), 1), atol=1e-4)


def test_few_energies_are_enough():
    few, many = QuantumDotArray()(volts(500)), QuantumDotArray(energies=200)(volts(500))
    assert float(((few - many).square().mean(0) / many.var(0)).max()) < 0.01


def test_range_of_readings():
    current, phase = QuantumDotArray()(volts(5000)).unbind(1)
    assert 0 <= float(current.min()) < 0.05 < 0.5 < float(current.max()) <= 1
    assert float(phase.abs().max()) < math.pi / 2


def test_gates_move_dots_near_them_most():
    device = QuantumDotArray()
    assert (device.lever_arms > 0).all()
    assert (device.lever_arms.amax(0) > 4 * device.lever_arms.amin(0)).all()


def test_single_precision_is_good_enough_for_differences():
    x = volts(2000)
    error = QuantumDotArray()(x.float()) - QuantumDotArray()(x)
    assert float(error.abs().max()) < 2e-5
    assert float(error.square().mean().sqrt()) < 1e-6


def test_chunks_do_not_matter(monkeypatch):
    device, x = QuantumDotArray(), volts(100)
    whole = device(x)
    monkeypatch.setattr("bondgrad.reservoirs._dots.MEMORY", 10**6)
    assert close(device(x), whole)


def test_seeds():
    a, b, c = (QuantumDotArray(seed=seed)(volts(5)) for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not close(a, c)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": 0.0},
        {"bias": -1.0},
        {"energies": 0},
        {"seed": -1},
        {"dots": 0},
        {"gates": 0},
        {"decay": 0.0},
        {"coupling": -1.0},
        {"disorder": -1.0},
    ],
    ids=str,
)
def test_wrong_arguments(wrong):
    name = next(iter(wrong))
    with pytest.raises(ValueError, match=f"{'the number of inputs' if name == 'gates' else name} must be"):
        QuantumDotArray(**wrong)
