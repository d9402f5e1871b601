"""Drift, from looks at the same rows, by numbers."""

import math

import pytest
import torch

from bondgrad.probing import Session
from bondgrad.probing._influences import DriftMonitor, History
from tests.probing.test_facts import facts, noise


def drift(offsets, **found):
    """From looks at two rows, the answers about which are offset by so much each time; their spread is sqrt(2)."""
    offsets = iter(offsets)

    def fn(x: torch.Tensor):
        return x + next(offsets)

    sampler, known = Session(fn, torch.tensor([[0.0], [2.0]])).sampler, facts([0.0], [2.0], **found)
    monitor = DriftMonitor(torch.tensor([0, 1]))
    for _ in range(3):
        monitor.look(sampler, known)
    return monitor.measure_drift(sampler, known, torch.Generator())


def test_a_steady_drift():
    """A quarter in every evaluation, two of which are made in a look: one from the first look to the last."""
    found = drift([0.0, 0.5, 1.0])
    assert (found.looks, found.drifts) == (3, True)
    assert found.drift == pytest.approx(1 / math.sqrt(2))
    assert found.per_evaluation == pytest.approx(0.25 / math.sqrt(2))


@pytest.mark.parametrize(("sigma", "drifts"), [(0.117, True), (0.119, False)])
def test_noise_hides_it(sigma, drifts):
    """The slope of 1/4 has a deviation of sigma over sqrt(8), the sum of squares of the places -2, 0, 2."""
    assert drift([0.0, 0.5, 1.0], randomness=noise([sigma], [0.0])).drifts == drifts


@pytest.mark.parametrize(("off", "drifts"), [(0.143, True), (0.146, False)])
def test_scatter_hides_it(off, drifts):
    """One answer that is off leaves residuals of -1/3, 2/3, -1/3 of that, with one degree of freedom."""
    assert drift([0.0, 0.5 + off, 1.0]).drifts == drifts


def test_what_is_known_of_memory_stays():
    found = drift([0.0, 0.0, 0.0], history=History(remembers=False, memory=0.125))
    assert (found.remembers, found.memory, found.drifts) == (False, 0.125, False)


def test_two_looks_say_nothing():
    sampler = Session(torch.sin, torch.rand(5, 1)).sampler
    monitor = DriftMonitor(torch.tensor([0]))
    for _ in range(2):
        monitor.look(sampler, facts([0.0], [1.0]))
    assert monitor.measure_drift(sampler, facts([0.0], [1.0]), torch.Generator()) == History(looks=2)


def test_looks_from_before_it_was_known_to_remember_do_not_count():
    sampler = Session(torch.sin, torch.rand(5, 1)).sampler
    monitor, known = DriftMonitor(torch.tensor([0])), facts([0.0], [1.0], history=History(remembers=True))
    for met in [facts([0.0], [1.0])] * 4 + [known] * 3:
        monitor.look(sampler, met)
    assert monitor.measure_drift(sampler, known, torch.Generator()).looks == 3
