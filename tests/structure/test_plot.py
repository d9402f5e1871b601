"""The picture of a pattern and of its groups."""

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from bondgrad import BlackBox
from bondgrad.structure import Blocks, Sequence, colour, plot
from tests.patterns import PATTERNS


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


def test_sixteen_time_steps_are_drawn_if_nothing_else_is_said():
    matplotlib.use("Agg")
    ax = plot(BlackBox(torch.sin, 3, 3, structure=Sequence(2)))
    assert ax.get_title() == "6 groups for 48 inputs (at least 6)"
    plt.close(ax.figure)


def test_plots_of_arrays():
    matplotlib.use("Agg")
    with torch.device("meta"):
        ax = plot(np.eye(4, dtype=bool))
    assert ax.get_title() == "1 group for 4 inputs (at least 1)"
    assert ax.figure.get_size_inches().tolist() == [5, 5]
    plt.close(ax.figure)


def drawn(pattern, width=3.6, height=7.2):
    """Drawn over all of a figure of that many inches."""
    figure = plt.figure(figsize=(width, height), dpi=50)
    ax = plot(pattern, figure.add_axes((0, 0, 1, 1)))
    (marks,) = ax.collections
    plt.close(figure)
    return ax, marks


def test_every_dependency_has_a_mark_in_the_colour_of_its_group():
    """Outputs from top to bottom: the first depends on the inputs 0 and 2, the second on 1."""
    matplotlib.use("Agg")
    pattern = torch.tensor([[True, False, True, False], [False, True, False, False], [False] * 4])
    ax, marks = drawn(pattern)
    assert marks.get_offsets().tolist() == [[0, 0], [2, 0], [1, 1]]
    palette = plt.get_cmap("tab10")
    assert marks.get_facecolors().tolist() == [list(palette(group)) for group in colour(pattern)[[0, 2, 1]].tolist()]
    assert (ax.get_xlim(), ax.get_ylim()) == ((-0.5, 3.5), (2.5, -0.5))
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("input", "output")
    assert all(tick == int(tick) for tick in (*ax.get_xticks(), *ax.get_yticks()))


@pytest.mark.parametrize(("rows", "columns", "side"), [(2, 3, 86.4), (8, 3, 64.8), (600, 3, 1.2), (2, 300, 1.2)])
def test_marks_are_as_large_as_a_cell_but_never_too_small(rows, columns, side):
    """3.6 inches are 259.2 points, and twice as many in height."""
    matplotlib.use("Agg")
    _, marks = drawn(torch.ones(rows, columns).bool())
    assert marks.get_sizes().tolist() == pytest.approx([side**2])
    assert marks.get_linewidths().tolist() == [0]


@pytest.mark.parametrize(("groups", "palette"), [(10, "tab10"), (11, "tab20"), (20, "tab20"), (21, "turbo")])
def test_palettes(groups, palette):
    """Beyond twenty colours, the golden ratio puts those of neighbouring groups far apart."""
    matplotlib.use("Agg")
    _, marks = drawn(torch.ones(1, groups).bool())
    places = [i * 0.618 % 1 if palette == "turbo" else i for i in colour(torch.ones(1, groups).bool()).tolist()]
    assert marks.get_facecolors().tolist() == [list(plt.get_cmap(palette)(place)) for place in places]


def test_what_cannot_be_drawn():
    with pytest.raises(ValueError, match="call it once"):
        plot(BlackBox(torch.sin, 3))
