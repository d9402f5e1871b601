"""Inputs that share no output move together: the same gradient for fewer evaluations."""

import copy
import pickle

import matplotlib
import matplotlib.pyplot as plt
import networkx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bondgrad import BlackBox, BoxError, Central, Forward, Simultaneous
from bondgrad.evaluators import Local
from bondgrad.policies import Bond, Fixed, Gaussian, Optimal
from bondgrad.structure import Blocks, Pattern, Sequence, colour, lower_bound, plot
from bondgrad.testing.boxes import Sparse
from tests.helpers import close, gradient, on_each_device, same_state


def blocks(count, n_in, n_out):
    return torch.kron(torch.eye(count), torch.ones(n_out, n_in)).bool()


def banded(d, width):
    i = torch.arange(d)
    return (i[:, None] - i).abs() <= width


def column_arrow(d):
    pattern = torch.eye(d).bool()
    pattern[:, 0] = True
    return pattern


def grid(side):
    x, y = torch.arange(side * side) // side, torch.arange(side * side) % side
    return ((x[:, None] - x).abs() + (y[:, None] - y).abs()) <= 1


def shuffled(pattern, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (torch.randperm(n, generator=generator) for n in pattern.shape)
    return pattern[rows][:, columns]


PATTERNS = {
    "blocks": blocks(4, 3, 2),
    "shuffled blocks": shuffled(blocks(4, 3, 2)),
    "banded": banded(12, 1),
    "column arrow": column_arrow(12),
    "grid": grid(4),
    "random": torch.rand(10, 15, generator=torch.Generator().manual_seed(1)) < 0.15,
    "an input without outputs": torch.tensor([[1, 0, 0], [0, 0, 1]]).bool(),
    "nothing": torch.zeros(3, 4).bool(),
    "dense": torch.ones(3, 4).bool(),
}


# ---- colouring


def proper(pattern, colours):
    members = torch.nn.functional.one_hot(colours).double()
    return bool(((pattern.double() @ members) <= 1).all())


@pytest.mark.parametrize("name", PATTERNS)
def test_no_output_depends_on_two_inputs_of_a_group(name):
    pattern = PATTERNS[name]
    colours = colour(pattern)
    assert proper(pattern, colours)
    assert lower_bound(pattern) <= int(colours.max()) + 1
    assert sorted(set(colours.tolist())) == list(range(int(colours.max()) + 1))


@pytest.mark.parametrize(
    ("pattern", "best"),
    [(shuffled(blocks(20, 5, 3)), 5), (banded(50, 2), 5), (column_arrow(30), 2), (grid(20), 5), (banded(7, 7), 7)],
)
def test_few_groups(pattern, best):
    assert int(colour(pattern).max()) + 1 == lower_bound(pattern) == best


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 25), st.integers(1, 25), st.floats(0, 1), st.integers(0, 1000))
def test_colouring_of_any_pattern(d_out, d, density, seed):
    pattern = torch.rand(d_out, d, generator=torch.Generator().manual_seed(seed)) < density
    colours = colour(pattern)
    assert proper(pattern, colours)
    graph = networkx.Graph()
    graph.add_nodes_from(range(d))
    used = pattern.double()
    graph.add_edges_from(((used.T @ used) > 0).fill_diagonal_(False).nonzero().tolist())
    by_networkx = networkx.greedy_color(graph, "saturation_largest_first")
    assert int(colours.max()) <= max(by_networkx.values()) + 1  # ties are broken differently


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
        BlackBox(box, box.in_features, estimator=estimator, limits=limits, structure=structure, seed=0)
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


def test_simultaneous_hears_only_the_outputs_of_an_input():
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


def test_simultaneous_with_an_output_that_hears_everything():
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
    by_blocks = BlackBox(box, 12, structure=Blocks(3, 2), seed=0)
    by_pattern = BlackBox(box, 12, structure=blocks(4, 3, 2), seed=0)
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

    layer = BlackBox(Modular(), 8)
    gradient(layer, torch.randn(4, 8), torch.randn(4, 8))
    assert layer.stats.evaluations == 4 * (1 + 4)
    told = BlackBox(Modular(), 8, structure="dense")
    gradient(told, torch.randn(4, 8), torch.randn(4, 8))
    assert told.stats.evaluations == 4 * (1 + 16)


def test_something_else_called_structure():
    def fn(x):
        return x

    fn.structure = "a string that means something to somebody"
    layer = BlackBox(fn, 3)
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
    assert layer.fn is layer._function.fn is before
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
    layer = BlackBox(torch.sin, 3, structure=np.eye(3, dtype=bool))
    x, gy = torch.randn(4, 3), torch.randn(4, 3)
    assert close(gradient(layer, x, gy), gy * x.cos(), 0.01)
    assert layer.stats.evaluations == 4 * 3
    assert "3 x 3, 33.3% filled" in repr(layer)


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
    layer = BlackBox(torch.sin, 2, structure=Sequence(3), limits=(-1, 1), seed=0)
    for time in range(1, 60):
        gradient(layer, torch.randn(1, time, 2), torch.randn(1, time, 2))
    assert len(layer.structure._made) < 10
    assert len(pickle.dumps(layer)) < 50_000


# ---- failures


@pytest.mark.parametrize("estimator", ["central", "forward", "simultaneous", Simultaneous(3)])
def test_a_module_that_fails_costs_the_others_nothing(estimator):
    """The second of three blocks answers only at the rows themselves."""
    rows = torch.randn(5, 6, dtype=torch.float64)

    def fn(x):
        y = torch.sin(x)
        known = (x[:, None, 2:4] == rows[None, :, 2:4]).all(2).any(1)
        y[:, 2:4] = torch.where(known[:, None], y[:, 2:4], torch.nan)
        return y

    layer = BlackBox(fn, 6, estimator=estimator, policy=Fixed(1e-6), structure=np.eye(6, dtype=bool), seed=0)
    gy = torch.randn(5, 6, dtype=torch.float64)
    with pytest.warns(UserWarning, match="non-finite"):
        g = gradient(layer, rows, gy)
    expected = gy * rows.cos()
    expected[:, 2:4] = 0
    assert torch.allclose(g, expected, atol=1e-5)


def test_one_side_that_fails_leaves_the_other():
    layer = BlackBox(torch.sqrt, 4, policy=Fixed(0.1), structure=Blocks(1, 1), seed=0)
    x, gy = torch.tensor([[0.05, 1.0, 2.0, 0.01]]), torch.ones(1, 4)
    with pytest.warns(UserWarning, match="non-finite"):
        g = gradient(layer, x, gy)
    forward = ((x + 0.1).sqrt() - x.sqrt()) / 0.1
    central = ((x + 0.1).sqrt() - (x - 0.1).sqrt()) / 0.2
    assert torch.allclose(g, torch.where(x < 0.1, forward, central), atol=1e-4)


@pytest.mark.parametrize("estimator", ["central", "forward", "simultaneous"])
@pytest.mark.parametrize("max_rows", [None, 3])
def test_answers_with_more_digits_than_x(estimator, max_rows):
    pattern = PATTERNS["random"]

    def fn(x: np.ndarray):
        return Sparse(pattern)(torch.from_numpy(x).double()).numpy()

    x, gy = torch.randn(6, 15), torch.randn(6, 10)
    settings = {"policy": Fixed(1e-3), "estimator": estimator, "structure": pattern, "seed": 0}
    g = gradient(BlackBox(fn, 15, evaluator=Local(max_rows=max_rows), **settings), x, gy)
    assert g.dtype == torch.float32
    if estimator == "simultaneous":  # the same as in one piece
        assert close(g, gradient(BlackBox(fn, 15, **settings), x, gy), 1e-4)
    else:
        assert close(g, Sparse(pattern).vjp(x, gy), 2e-3)


@pytest.mark.parametrize("estimator", ["central", "forward", "simultaneous", Simultaneous(3)])
def test_an_output_that_the_forward_pass_did_not_get(estimator):
    """It is finite near the rows, but not at them: what can be known without it is known."""
    rows = torch.randn(5, 3, dtype=torch.float64)

    def fn(x):
        at_a_row = (x[:, None, 0] == rows[None, :, 0]).any(1)
        y = torch.sin(x)
        y[:, 0] = torch.where(at_a_row, torch.nan, y[:, 0])
        y[:, 1] = torch.where(x[:, 1] > rows[:, 1].max(), torch.nan, y[:, 1])  # one end of one move
        return y

    layer = BlackBox(fn, 3, estimator=estimator, policy=Fixed(1e-6), structure=np.eye(3, dtype=bool), seed=0)
    gy = torch.randn(5, 3, dtype=torch.float64)
    with pytest.warns(UserWarning, match="non-finite"):
        g = gradient(layer, rows, gy)
    expected = gy * rows.cos()
    first = 0 if estimator == "forward" else expected[:, 0]  # both ends, or nothing to compare with
    assert torch.allclose(g[:, 0], torch.as_tensor(first, dtype=g.dtype).expand(5), atol=1e-5)
    assert torch.allclose(g[:, 2], expected[:, 2], atol=1e-5)
    assert (torch.isclose(g[:, 1], expected[:, 1], atol=1e-4) | (g[:, 1] == 0)).all()


@pytest.mark.parametrize("pattern", [0.3 * torch.eye(3), torch.eye(3).bool()[0], "eye", np.eye(3)])
def test_what_is_no_pattern(pattern):
    with pytest.raises(ValueError, match="must be boolean"):
        Pattern(pattern)


# ---- the picture


@pytest.mark.parametrize(
    ("structure", "title"),
    [
        (PATTERNS["grid"], "5 groups for 16 inputs (at least 5)"),
        (Blocks(4, 2), "4 groups for 16 inputs (at least 4)"),
        ("dense", "16 groups for 16 inputs (at least 16)"),
        (Sequence(2), "32 groups for 80 inputs (at least 32)"),
    ],
)
def test_plot(structure, title):
    matplotlib.use("Agg")
    layer = BlackBox(torch.sin, 16, 8 if isinstance(structure, Blocks) else 16, structure=structure)
    ax = plot(layer, time=5)
    assert ax.get_title() == title
    plt.close(ax.figure)


def test_plots_of_arrays():
    matplotlib.use("Agg")
    with torch.device("meta"):
        ax = plot(np.eye(4, dtype=bool))
    assert ax.get_title() == "1 group for 4 inputs (at least 1)"
    plt.close(ax.figure)


def test_what_cannot_be_drawn():
    with pytest.raises(ValueError, match="call it once"):
        plot(BlackBox(torch.sin, 3))
