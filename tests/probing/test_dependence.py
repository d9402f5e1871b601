"""When a probe says which outputs depend on which inputs, and what it calls blocks."""

import pytest
import torch

from bondgrad import probe
from bondgrad.testing.boxes import Sparse
from tests.helpers import noisy
from tests.patterns import blocks
from tests.probing.test_probe import rows


def identity(x):
    return x * 1.0


@pytest.mark.parametrize(("sigma", "hidden"), [(0.02, False), (0.045, True)])
def test_noise_hides_dependencies(sigma, hidden):
    """From three hundredths of the spread of the outputs on, which is one."""
    report = probe(noisy(identity, sigma), rows())
    assert (report.dependence is None) == hidden
    assert any("noise of 4" in text and "would hide it" in text for text in report.left_out) == hidden


@pytest.mark.parametrize(("quantum", "hidden"), [(0.3, False), (0.55, True)])
def test_steps_hide_dependencies(quantum, hidden):
    """From four tenths of the spread on."""
    report = probe(lambda x: (x / quantum).round() * quantum, rows())
    assert (report.dependence is None) == hidden
    assert any(text.startswith("Structure: steps of") for text in report.left_out) == hidden


@pytest.mark.parametrize(
    ("count", "inputs", "outputs", "found"),
    [(4, 3, 2, (3, 2)), (6, 1, 1, (1, 1)), (2, 3, 1, (3, 1)), (1, 4, 4, None)],
)
def test_blocks(count, inputs, outputs, found):
    dependence = probe(Sparse(blocks(count, inputs, outputs)), rows(d=count * inputs)).dependence
    assert dependence.blocks == found
    assert (dependence.groups, dependence.inputs) == (inputs, count * inputs)
    assert dependence.filled == pytest.approx(1 / count)
    assert dependence.idle == []


def test_a_pattern_that_is_no_blocks():
    """Every output depends on two neighbours in a ring of six: two groups, but no two blocks of three."""
    found = probe(lambda x: torch.sin(x) + torch.cos(x.roll(1, 1)), rows(d=6)).dependence
    assert (found.groups, found.blocks) == (2, None)
    assert found.filled == pytest.approx(1 / 3)


def test_inputs_without_outputs_are_idle():
    found = probe(lambda x: torch.sin(x[:, 1:3]), rows(d=4)).dependence
    assert found.idle == [0, 3]
