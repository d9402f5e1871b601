"""The interface of every estimator."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from bondgrad.calling._grid import Grid
from bondgrad.measuring._step_trial import Differences
from bondgrad.structure._groups import Groups

# evaluate(points [b, ..., ends, d], rows) evaluates the box at points near b rows of the batch, and `rows` says which
# rows these are. It returns the outputs [b, ..., ends, d_out] and ok [b, ..., ends], which is False where an evaluation
# failed, or None if none did. The points of a move, its `ends`, are evaluated next to each other.
Evaluate = Callable[[Tensor, slice], tuple[Tensor, Tensor | None]]


class Site(NamedTuple):
    """Where a gradient is wanted: all that one backward pass knows before the box is evaluated.

    For sequences, d stands for time steps times inputs, and d_out for time steps times outputs.
    """

    x: Tensor  # [B, d] the rows, inside the limits
    y: Tensor  # [B, d_out] the outputs of the box there, from the forward pass
    gy: Tensor  # [B, d_out] the gradient of the loss with respect to y
    delta: Tensor  # [draws, B, d] the perturbations, as drawn by the policy, with their signs
    low: Tensor | None  # [d] no point may be below this; None: there are no limits
    high: Tensor | None  # [d] no point may be above this; None: there are no limits
    groups: Groups | None = None  # inputs that may move together; None: every input is a group of its own
    whole: bool = False  # whether every request must contain all rows of the batch, because the box has a memory
    grid: Grid | None = None  # the values that inputs can have; None: all


def within_limits(points: Tensor, low: Tensor | None, high: Tensor | None, grid: Grid | None = None) -> Tensor:
    """The points [..., d], moved to the nearest ones that can be set, and back inside the limits if there are any."""
    points = points if grid is None else grid.nearest(points)
    return points if low is None else points.clamp(low, high)


class Estimator(ABC):
    """Turns evaluations into g = ∂L/∂x, a vector-Jacobian product.

    A subclass implements `evaluations` and `vjp`, and sets those class attributes whose defaults are not right:

    - `draws`: How many perturbations of each row the policy draws, the first dimension of `Site.delta`. One by default.
    - `order`: The power of the step with which the error of g falls. Policies choose longer steps for a higher order.
    - `together`: Whether all inputs move at once, whatever the groups. Evaluations of sequences then start at the first
      time step. Groups still say which outputs depend on an input.
    - `shared_base`: Whether all differences of a row are taken from the answer of the forward pass, whose noise is then
      common to all of them. Policies that measure noise take it into account.
    - `first_round_needs_gy`: Whether the points of the first request depend on the gradient of the loss. If not, they
      can be evaluated before that gradient is known.

    Args:
        normalize_rows: Scale every row of g to norm 1; rows of zeros stay zero. The policy sees g before that.
    """

    draws = 1
    order = 2
    together = False
    shared_base = False
    first_round_needs_gy = False

    def __init__(self, normalize_rows: bool = False) -> None:
        self.normalize_rows = normalize_rows

    @functools.cached_property
    def differences(self) -> Differences:
        """What a policy needs to know of the estimator."""
        return Differences(self.order, self.shared_base, self.draws, self.together)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(normalize_rows={self.normalize_rows})"

    @abstractmethod
    def evaluations(self, groups: int) -> int:
        """The number of evaluations per row that one gradient costs, beyond that of the forward pass.

        `BlackBox` reserves memory for that many points, and reports of costs quote it.

        Args:
            groups: The number of groups of inputs that can move together, at most the number of inputs.
        """

    @abstractmethod
    def vjp(self, site: Site, evaluate: Evaluate, max_rows: int) -> Tensor:
        """The gradient g [B, d].

        Points must be inside the limits, and a difference of outputs is divided by the distance of the two points as
        they were evaluated, after rounding and limits. An entry for which too many evaluations failed is NaN or
        infinite: `BlackBox` makes it zero, and the policy never sees it. Random numbers come from the policy alone,
        through `site.delta`.

        Args:
            site: Where the gradient is wanted, and the perturbations.
            evaluate: Evaluates the box.
            max_rows: How many points may exist at one time. A request for more is allowed, and is split.
        """
