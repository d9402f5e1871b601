"""A picture of which outputs depend on which inputs, and of which inputs move together."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bondgrad.structure._groups import colour, lower_bound
from bondgrad.structure._structure import as_pattern
from bondgrad.structure.discovery._detect import Detection

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from bondgrad.box import BlackBox


def plot(what: "Tensor | np.ndarray | Detection | BlackBox", ax: "Axes | None" = None, time: int = 16) -> "Axes":
    """Draw a pattern of dependencies, outputs from top to bottom and inputs from left to right.

    Inputs of the same colour move together.

    Args:
        what: A bool pattern [d_out, d_in], a `Detection` from `detect`, or a layer.
        ax: The axes to draw into. None: those of a new figure.
        time: The number of time steps to draw, for a layer of sequences.

    Example:
        >>> ax = plot(torch.eye(4).bool())
        >>> ax.get_title()
        '1 group for 4 inputs (at least 1)'
    """
    try:  # matplotlib is optional, and loads only here
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("structure.plot draws with matplotlib: pip install matplotlib") from error

    depends, group = _pattern_and_groups(what, time)
    if ax is None:
        _, ax = plt.subplots(figsize=(5, 5), layout="constrained")
    count = int(group.max()) + 1
    palette = plt.get_cmap("tab10" if count <= 10 else "tab20" if count <= 20 else "turbo")
    # The golden ratio puts colours of neighbouring groups far apart on a continuous palette.
    shades = palette(np.arange(count) if count <= 20 else np.arange(count) * 0.618 % 1)  # [count, 4]
    (rows, columns), (outputs, inputs) = depends.shape, depends.nonzero().unbind(1)
    # A mark is as large as its cell of the pattern, in points, and never too small to be seen.
    side = max(1.2, 72 / ax.figure.dpi * min(ax.bbox.width / columns, ax.bbox.height / rows))
    ax.scatter(inputs, outputs, s=side**2, c=shades[group[inputs]], marker="s", linewidths=0, rasterized=True)
    ax.locator_params(integer=True)
    groups = f"{count} {'group' if count == 1 else 'groups'} for {columns} inputs"
    ax.set(xlabel="input", ylabel="output", xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5))
    ax.set_title(f"{groups} (at least {lower_bound(depends)})")
    return ax


def _pattern_and_groups(what: Any, time: int) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    """The pattern [d_out, d] to draw, and the group of each input [d]."""
    if (pattern := as_pattern(what)) is not None:
        return pattern.cpu(), colour(pattern)
    structure, d, d_out = what.structure, what.in_features, what.out_features
    if d_out is None:
        raise ValueError("this BlackBox does not know its outputs yet: call it once, or give out_features")
    groups = structure.windows(d, d_out, time, [0])[0].groups
    if groups is None:
        return torch.ones(d_out, d, dtype=torch.bool, device="cpu"), torch.arange(d, device="cpu")
    return groups.depends.repeat_interleave(groups.cell, 0), groups.colour
