"""Structure: which outputs depend on which inputs, hence which inputs may move together in one evaluation.

`Dense`, `Blocks`, `Pattern` and `Sequence` are subclasses of `Structure`, and users can write others. A subclass gives
its `Groups`, which divide the inputs such that no output depends on two inputs of a group. An example is a ring, where
each output depends on the input of its own number and on the two beside it, so that every third input can move at once:

    >>> class Ring(Structure):
    ...     def check(self, in_features, out_features):
    ...         if in_features % 3 or out_features not in (None, in_features):
    ...             raise ValueError("a ring has as many outputs as inputs, a multiple of three")
    ...
    ...     def groups(self, in_features, out_features):
    ...         return self.cached(in_features, lambda: self.make(in_features))
    ...
    ...     def make(self, d):
    ...         i = torch.arange(d)
    ...         return Groups(i % 3, torch.isin((i[:, None] - i) % d, torch.tensor([0, 1, d - 1])))

    >>> def neighbours(x):
    ...     return torch.sin(x) + x.roll(1, 1) * x.roll(-1, 1)

    >>> layer = bondgrad.BlackBox(neighbours, 12, structure=Ring(), policy="bond")
    >>> layer(torch.randn(1, 12, requires_grad=True)).sum().backward()
    >>> layer.stats.evaluations  # one in the forward pass, and two for each of three groups
    7

A structure for sequences sets `in_time`, and gives `windows` instead: `Groups` by the time step at which their
evaluations can start.
"""

from bondgrad.structure._groups import Groups, colour, lower_bound
from bondgrad.structure._plot import plot
from bondgrad.structure._structure import Blocks, Dense, Pattern, Sequence, Structure, Window
from bondgrad.structure.discovery._detect import Detection, detect

__all__ = ["Blocks", "Dense", "Detection", "Groups", "Pattern", "Sequence", "Structure", "Window"]
__all__ += ["colour", "detect", "lower_bound", "plot"]
