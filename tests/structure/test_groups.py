"""Groups of inputs that move together: how few there are, sums over their outputs, and what a failure costs."""

import networkx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bondgrad.structure import Groups, Pattern, Structure, colour, lower_bound
from tests.patterns import PATTERNS, banded, blocks, column_arrow, grid, shuffled

CPU = torch.device("cpu")


def groups_of(name, cell):
    pattern = PATTERNS[name]
    return Groups(colour(pattern), pattern, cell)


@pytest.mark.parametrize("cell", [1, 3])
@pytest.mark.parametrize("name", PATTERNS)
def test_sums_over_the_outputs_that_depend_on_an_input(name, cell):
    groups = groups_of(name, cell)
    by_output = groups.depends.repeat_interleave(cell, 0)  # [d_out, d]
    products = torch.randn(2, 5, len(by_output), dtype=torch.float64)
    expected = torch.stack([products[..., by_output[:, i]].sum(-1) for i in range(by_output.shape[1])], -1)
    assert torch.allclose(groups.sum_by_input(products), expected)
    assert groups.sum_by_input(products.float()).dtype == torch.float32
    assert torch.allclose(groups.sum_by_input(products), expected)  # in either precision, in turn


@pytest.mark.parametrize("cell", [1, 3])
@pytest.mark.parametrize("name", PATTERNS)
def test_subsets(name, cell):
    """Every input once, moved with its group, and the sum over its own outputs when that group moves."""
    groups = groups_of(name, cell)
    by_output, d = groups.depends.repeat_interleave(cell, 0), groups.depends.shape[1]
    products = torch.randn(3, groups.count, len(by_output), dtype=torch.float64)
    expected = torch.stack([products[:, groups.colour[i], by_output[:, i]].sum(1) for i in range(d)], 1)
    for size in {1, 2, groups.count}:
        sums, moved = torch.full((3, d), torch.nan, dtype=torch.float64), torch.zeros(d)
        for start in range(0, groups.count, size):
            which = slice(start, min(start + size, groups.count))
            part = groups.subset(which, CPU)
            assert part is groups.subset(which, CPU)
            sums[:, part.inputs] = part.sum_by_input(products[:, which])
            assert torch.equal(part.moved, groups.colour == torch.arange(which.start, which.stop)[:, None])
            moved += part.moved.sum(0)
            assert (part.inputs == slice(None)) if size >= groups.count else len(part.inputs) == part.moved.sum()
        assert torch.allclose(sums, expected)
        assert (moved == 1).all()


def test_gathers_are_by_similar_numbers_of_outputs():
    """Inputs that 1, 2, 3 and 8 outputs depend on: an input with many does not pad all others."""
    counts = [1, 2, 3, 8, 0]
    depends = torch.zeros(14, 5).bool()
    for i in range(5):
        depends[sum(counts[:i]) : sum(counts[: i + 1]), i] = True
    part = Groups(torch.zeros(5, dtype=torch.long), depends).subset(slice(0, 1), CPU)
    assert [gather.tolist() for gather in part.gathers] == [
        [[0], [14]],  # of the inputs 0 and 4; no output depends on the last: it has the zero
        [[1, 2]],
        [[3, 4, 5]],
        [list(range(6, 14))],
    ]
    assert part.place.tolist() == [0, 2, 3, 4, 1]
    assert part.padded
    assert part.sum_by_input(torch.ones(2, 1, 14)).tolist() == [counts] * 2


def test_inputs_that_never_move():
    groups = Groups(torch.tensor([0, -1, 1]), torch.eye(3).bool())
    assert groups.count == 2
    part = groups.subset(slice(0, 2), CPU)
    assert part.inputs.tolist() == [0, 2]
    assert part.moved.tolist() == [[True, False, False], [False, False, True]]


@pytest.mark.parametrize("cell", [1, 2])
def test_what_a_failure_costs(cell):
    """Three cells, two groups: inputs 0 and 1 move together, input 2 by itself."""
    depends = torch.tensor([[1, 0, 1], [0, 1, 1], [0, 1, 0]]).bool()
    part = Groups(torch.tensor([0, 0, 1]), depends, cell).subset(slice(0, 2), CPU)
    finite = torch.ones(1, 2, 2, 3 * cell).bool()  # [b, j, ends, d_out]
    finite[0, 0, 1, 2 * cell] = False  # the first output of the third cell, at the second end of the first group
    finite[0, 1, 1, 2 * cell] = False  # at the second end of the second group, where nothing depends on it
    inputs, outputs = part.usable(finite)
    assert inputs.tolist() == [[[True, True], [True, False], [True, True]]]
    expected = torch.tensor([[[1, 1, 1], [1, 0, 0]], [[1, 1, 0], [1, 1, 0]]]).bool()  # [j, ends, cells]
    assert torch.equal(outputs[0], expected.repeat_interleave(cell, 2))


def test_a_structure_keeps_the_last_shapes():
    structure, made = Structure(), []

    def of(key):
        return structure.cached(key, lambda: made.append(key) or key)

    assert [of(key) for key in (*range(8), 3, *range(8))] == [*range(8), 3, *range(8)]
    assert made == list(range(8)) == list(structure.cache)
    of(8)
    assert list(structure.cache) == list(range(1, 9))  # the oldest has gone


def test_what_is_kept_is_not_copied():
    structure = Pattern(PATTERNS["grid"])
    assert "groups" not in repr(structure)  # before they are needed
    groups = structure.groups(16, 16)
    assert groups is structure.groups(16, 16)
    assert "5 groups" in repr(structure)
    assert "_cache" not in structure.__getstate__()
    assert "depends" in structure.__getstate__()


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
