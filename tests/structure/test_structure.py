"""Inputs that share no output move together: the same gradient for fewer evaluations."""

import copy
import pickle
import re

import numpy as np
import pytest
import torch
from torch import nn

from bondgrad import BlackBox, BoxError, Central, Forward, Simultaneous
from bondgrad.evaluators import Local
from bondgrad.policies import Bond, Fixed, Gaussian, Optimal
from bondgrad.structure import Blocks, Pattern, Sequence, colour, detect
from bondgrad.structure._structure import as_pattern
from bondgrad.testing.boxes import Sparse
from tests.helpers import close, gradient, on_each_device, same_state
from tests.patterns import PATTERNS, blocks

# ---- gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("limits", [None, (-0.5, 0.5)])
@pytest.mark.parametrize("estimator", [Central(), Forward(), Central(normalize_rows=True)])
@pytest.mark.parametrize("name", PATTERNS)
def test_same_gradient_as_dense(name, estimator, limits, dtype):
    pattern = PATTERNS[name]
    box = Sparse(pattern)
    x, gy = torch.randn(8, box.in_features, dtype=dtype), torch.randn(8, box.out_features, dtype=dtype)
    layers = [
        BlackBox(box, box.in_features, estimator=estimator, limits=limits, structure=structure, seed=0, policy="bond")
        for structure in ("dense", pattern)
    ]
    for _ in range(3):
        dense, grouped = (gradient(layer, x, gy) for layer in layers)
        assert torch.allclose(dense, grouped, rtol=0, atol=50 * torch.finfo(dtype).eps * float(dense.abs().max()))
    dense, grouped = (layer.stats.evaluations for layer in layers)
    groups = int(colour(pattern).max()) + 1
    per_row = estimator.evaluations(1)
    assert dense == 3 * 8 * (1 + per_row * box.in_features)
    assert grouped == 3 * 8 * (1 + per_row * groups)


@pytest.mark.parametrize("policy", [Bond(), Bond("error-terms"), Fixed(1e-3), Gaussian(1e-3), Optimal(1e-7, 1.0)])
def test_every_policy(policy):
    box = Sparse(PATTERNS["grid"])
    x, gy = torch.randn(6, 16).double(), torch.randn(6, 16).double()
    dense, grouped = (
        BlackBox(box, 16, policy=policy, structure=structure, seed=1) for structure in (None, PATTERNS["grid"])
    )
    for _ in range(3):
        assert close(gradient(grouped, x, gy), gradient(dense, x, gy), 1e-10)
    for a, b in zip(dense.policy_state.buffers(), grouped.policy_state.buffers(), strict=True):
        assert torch.allclose(a, b)


def test_simultaneous_uses_only_the_outputs_of_an_input():
    pattern = blocks(20, 2, 2)
    box = Sparse(pattern)
    x, gy = torch.randn(200, 40), torch.randn(200, 40)
    exact = box.vjp(x, gy)
    errors = []
    for structure in (None, pattern):
        layer = BlackBox(box, 40, estimator=Simultaneous(), policy=Fixed(1e-3), structure=structure, seed=0)
        errors.append(float((gradient(layer, x, gy) - exact).norm() / exact.norm()))
        assert layer.stats.evaluations == 200 * 3
    assert errors[1] < 0.3 * errors[0]  # noise from one other input instead of 39


def test_simultaneous_with_an_output_that_depends_on_everything():
    """There is nothing to group, but the other outputs still have one input each."""
    pattern = torch.eye(30).bool()
    pattern[0] = True

    def arrow(x):
        return torch.cat((x.sum(1, keepdim=True), x[:, 1:] ** 2), 1)

    x, gy = torch.randn(50, 30), torch.randn(50, 30)
    gy[:, 0] = 0
    layer = BlackBox(arrow, 30, estimator=Simultaneous(), structure=pattern, policy=Fixed(1e-2), seed=0)
    assert close(gradient(layer, x, gy)[:, 1:], (2 * gy * x)[:, 1:], 1e-3)


@pytest.mark.parametrize("max_rows", [1, 3, 7, 40])
def test_portions_do_not_matter(max_rows):
    pattern = PATTERNS["random"]
    box = Sparse(pattern)
    x, gy = torch.randn(5, 15), torch.randn(5, 10)
    whole, parts = (
        gradient(BlackBox(box, 15, structure=pattern, evaluator=Local(max_rows=rows), seed=0), x, gy)
        for rows in (None, max_rows)
    )
    assert close(parts, whole, 1e-5)


def test_blocks_are_the_pattern_they_stand_for():
    box = Sparse(blocks(4, 3, 2))
    x, gy = torch.randn(9, 12), torch.randn(9, 8)
    by_blocks = BlackBox(box, 12, structure=Blocks(3, 2), seed=0, policy="bond")
    by_pattern = BlackBox(box, 12, structure=blocks(4, 3, 2), seed=0, policy="bond")
    assert close(gradient(by_blocks, x, gy), gradient(by_pattern, x, gy), 1e-6)
    assert by_blocks.stats.evaluations == by_pattern.stats.evaluations == 9 * (1 + 2 * 3)


@on_each_device
def test_on_each_device(device):
    pattern = PATTERNS["random"].to(device)
    box = Sparse(PATTERNS["random"])
    x, gy = torch.randn(30, 15, device=device), torch.randn(30, 10, device=device)
    layer = BlackBox(box, 15, structure=pattern, seed=0).to(device)
    assert close(gradient(layer, x, gy), box.vjp(x, gy), 0.02)
    # Bit for bit: nothing is added up in an order of its own.
    a, b = (gradient(BlackBox(box, 15, structure=pattern, seed=0).to(device), x, gy) for _ in range(2))
    assert torch.equal(a, b)


# ---- where the structure comes from


def test_a_box_says_it_itself():
    class Modular(nn.Module):
        structure = Blocks(2, 2)

        def forward(self, x):
            return x * x.view(len(x), -1, 2).flip(2).flatten(1)

    layer = BlackBox(Modular(), 8, policy="bond")
    gradient(layer, torch.randn(4, 8), torch.randn(4, 8))
    assert layer.stats.evaluations == 4 * (1 + 4)
    given = BlackBox(Modular(), 8, structure="dense", policy="bond")
    gradient(given, torch.randn(4, 8), torch.randn(4, 8))
    assert given.stats.evaluations == 4 * (1 + 16)


def test_other_ways_to_say_it():
    def fn(x):
        return x.sin()

    x, gy = torch.randn(16, 3), torch.randn(16, 3)
    layer = BlackBox(fn, 3, structure=detect(fn, x), policy="bond")
    gradient(layer, x, gy)
    assert layer.stats.evaluations == 16 * 3
    fn.structure = "auto"
    layer = BlackBox(fn, 3, policy="bond")
    gradient(layer, x, gy)
    assert torch.equal(layer.structure.depends, torch.eye(3).bool())


def test_something_else_called_structure():
    def fn(x):
        return x

    fn.structure = "a string that means something to somebody"
    layer = BlackBox(fn, 3, policy="bond")
    gradient(layer, torch.randn(4, 3), torch.randn(4, 3))
    assert layer.stats.evaluations == 4 * 7


def test_another_box_in_its_place():
    class Modular:
        structure = Blocks(1, 1)

        def __call__(self, x: torch.Tensor):
            return x.sin()

    layer = BlackBox(Modular(), 3, seed=0)
    x, gy = torch.randn(16, 3), torch.randn(16, 3)
    gradient(layer, x, gy)
    layer.fn = lambda x: x.cumsum(1)
    assert close(gradient(layer, x, gy), gy.flip(1).cumsum(1).flip(1), 1e-2)
    modular = Modular()
    modular.structure = Sequence()
    before = layer.fn
    with pytest.raises(ValueError, match="BlackBox of its own"):
        layer.fn = modular
    assert layer.fn is layer.function.fn is before
    modular.structure = Sequence("auto")
    with pytest.raises(ValueError, match="BlackBox of its own"):
        BlackBox(modular, 3).fn = torch.sin


def test_the_pattern_is_a_copy():
    pattern = torch.eye(3).bool()
    layer = BlackBox(torch.sin, 3, structure=pattern, seed=0)
    pattern.zero_()
    x, gy = torch.randn(4, 3), torch.randn(4, 3)
    assert close(gradient(layer, x, gy), gy * x.cos(), 0.01)
    assert close(gradient(BlackBox(torch.sin, 3, structure=torch.eye(3).bool().to_sparse()), x, gy), gy * x.cos(), 0.01)


def test_numpy_patterns():
    layer = BlackBox(torch.sin, 3, structure=np.eye(3, dtype=bool), policy="bond")
    x, gy = torch.randn(4, 3), torch.randn(4, 3)
    assert close(gradient(layer, x, gy), gy * x.cos(), 0.01)
    assert layer.stats.evaluations == 4 * 3
    assert "3 x 3, 33.3% filled, 1 groups" in repr(layer)


def test_a_box_of_another_width_than_its_pattern():
    with pytest.raises(BoxError, match="out_features"):
        BlackBox(lambda x: x[:, :2], 3, structure=np.eye(3, dtype=bool))(torch.randn(2, 3))


@pytest.mark.parametrize("structure", [Blocks(1, 1), torch.eye(6).bool(), "auto", Sequence(2), Sequence("auto")])
def test_copies_and_state_dicts(structure):
    layer = BlackBox(torch.sin, 6, structure=structure, seed=0)
    x, gy = torch.randn(4, 6), torch.randn(4, 6)
    gradient(layer, x, gy)
    fresh = BlackBox(torch.sin, 6, structure=structure, seed=1)
    fresh.load_state_dict(layer.state_dict())
    others = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), fresh]
    g = gradient(layer, x, gy)
    for other in others:
        assert torch.equal(gradient(other, x, gy), g)
        assert same_state(layer.state_dict(), other.state_dict())


def test_work_that_is_kept_is_bounded():
    layer = BlackBox(torch.sin, 2, structure=Sequence(3), limits=(-1, 1), seed=0, policy="bond")
    for time in range(1, 60):
        gradient(layer, torch.randn(1, time, 2), torch.randn(1, time, 2))
    assert len(layer.structure.cache) < 10
    assert len(pickle.dumps(layer)) < 50_000
    # Two lengths in turn are not prepared again and again, though each has several pieces.
    layer = BlackBox(lambda x, s: (x.sin(), s), 2, structure=Sequence(), state=torch.zeros(1, 1), seed=0, policy="bond")
    kept = set()
    for i in range(6):
        gradient(layer, torch.randn(1, 16 + i % 2, 2), torch.randn(1, 16 + i % 2, 2))
        kept |= {id(window.groups) for windows in layer.structure.cache.values() for window in windows}
    assert len(kept) == 6 + 8  # pieces of three time steps for 17 of them, and of two for 16


@pytest.mark.parametrize("pattern", [0.3 * torch.eye(3), torch.eye(3).bool()[0], "eye", np.eye(3)])
def test_what_is_no_pattern(pattern):
    with pytest.raises(ValueError, match="must be boolean"):
        Pattern(pattern)


def test_patterns_of_one_entry_and_of_none():
    assert as_pattern(torch.ones(1, 1, dtype=torch.bool)) is not None
    for nothing in (torch.ones(0, 3).bool(), torch.ones(3, 3), torch.ones(3).bool(), [[True]]):
        assert as_pattern(nothing) is None


@pytest.mark.parametrize(
    ("structure", "arguments", "words"),
    [
        (
            Blocks(2, 3),
            (7, None),
            "Blocks(2, 3) does not fit a box with 7 inputs and any number of outputs: there must be",
        ),
        (Blocks(2, 3), (8, 11), "Blocks(2, 3) does not fit a box with 8 inputs and 11 outputs"),
        (Blocks(2, 3), (8, 12), None),
        (Blocks(2, 3), (8, None), None),
        (Pattern(np.eye(3, dtype=bool)), (4, None), "[out_features, in_features] = [..., 4], got [3, 3]"),
        (Pattern(np.eye(3, dtype=bool)), (3, 4), "[out_features, in_features] = [4, 3], got [3, 3]"),
        (Pattern(np.eye(3, dtype=bool)), (3, 3), None),
    ],
)
def test_boxes_that_do_not_fit(structure, arguments, words):
    if words is None:
        structure.check(*arguments)
    else:
        with pytest.raises(ValueError, match=re.escape(words)):
            structure.check(*arguments)


def test_the_width_that_follows():
    assert Blocks(2, 3).width(8) == 12
    assert Pattern(torch.ones(2, 5).bool()).width(5) == 2
    assert Sequence().width(5) is None


def test_a_full_pattern_has_no_groups():
    assert Pattern(torch.ones(2, 3).bool()).groups(3, 2) is None
    assert Pattern(torch.eye(2).bool()).groups(2, 2).count == 1
