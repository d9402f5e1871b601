"""What every estimator answers: the gradient at the box's inputs, from evaluations near them."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bondgrad.measuring._step_trial import Differences
from bondgrad.structure._groups import Groups

# evaluate(points [b, ..., d], rows): the box at points near each of b rows, `rows` saying which b of the batch.
# Returns the outputs [b, ..., d_out] and ok [b, ...], False where an evaluation failed; None: none did.
Evaluate = Callable[[Tensor, slice], tuple[Tensor, Tensor | None]]


class Site(NamedTuple):
    """Where a gradient is wanted: everything about one backward pass but the evaluations."""

    x: Tensor  # [B, d] the rows, inside the limits
    y: Tensor  # [B, d_out] the box there
    gy: Tensor  # [B, d_out] the loss's gradient at y
    delta: Tensor  # [n, B, d] the perturbations
    low: Tensor | None  # [d] the points stay within these
    high: Tensor | None  # [d]
    groups: Groups | None = None  # of inputs that move together; None: each is one of its own
    whole: bool = False  # whether all rows must be evaluated in one request


class Estimator(ABC):
    """Turns evaluations into g = ∂L/∂x, a vector-Jacobian product.

    Args:
        normalize_rows: Scale every row of g to norm 1; rows of zeros stay zero. The policy sees g before that.
    """

    draws = 1  # perturbations the policy must draw per entry
    order = 2  # the power of the step with which the error falls
    together = False  # whether all inputs move at once, whatever the groups
    shared_base = False  # whether all differences of a row are taken from the forward pass's answer
    first_round_needs_gy = False  # whether the points of its first request depend on the loss's gradient

    def __init__(self, normalize_rows: bool = False) -> None:
        self.normalize_rows = normalize_rows

    @functools.cached_property
    def differences(self) -> Differences:
        """What a policy is told of the estimator."""
        return Differences(self.order, self.shared_base, self.draws)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(normalize_rows={self.normalize_rows})"

    @abstractmethod
    def evaluations(self, groups: int) -> int:
        """Evaluations per row that one gradient costs, beyond the forward pass's own, with that many groups."""

    @abstractmethod
    def vjp(self, site: Site, evaluate: Evaluate, max_rows: int) -> Tensor:
        """The gradient g [B, d]. An entry that no evaluation speaks for is not finite; `BlackBox` makes it zero.

        Args:
            site: Where, and with which perturbations.
            evaluate: The box.
            max_rows: How many points may exist at one time; a request for more is split.
        """


def chunks(batch: int, items: int, points: int, max_rows: int, whole: bool = False) -> list[tuple[slice, slice]]:
    """Cut a batch of rows, each with `items` things to move at `points` points a thing, into requests of <= max_rows.

    Whole rows go together while they fit, so that a box sees a sample's points next to one another. Sizes depend on the
    arguments alone, and are as equal as they can be: equal shapes give equal rounding. If rows must go together as a
    `whole`, only things are cut.
    """
    room = max(1, max_rows // points)
    most = (batch, max(1, room // batch)) if whole else (max(1, room // items), room)
    rows, parts = _even_slices(batch, min(batch, most[0])), _even_slices(items, min(items, most[1]))
    return [(row, part) for row in rows for part in parts]


def _even_slices(total: int, largest: int) -> list[slice]:
    count = -(-total // largest)
    return [slice(total * i // count, total * (i + 1) // count) for i in range(count)]


def difference(y: Tensor, ok: Tensor | None, base: Tensor) -> Tensor:
    """How the outputs change between the two ends of each move: y⁺ - y⁻, [b, j, d_out].

    An end that failed counts as not moved (see `span`), which leaves the difference of the other end.

    Args:
        y: [b, j, ends, d_out] the box at one or two ends of j moves of each row; the second is x itself if not given.
        ok: [b, j, ends, d_out or 1].
        base: [b, d_out] the box at x.
    """
    if ok is not None:
        y = torch.where(ok, y, base[:, None, None, :])
    first, *rest = y.unbind(2)
    return first - (rest[0] if rest else base.unsqueeze(1))


def change(y: Tensor, ok: Tensor | None, base: Tensor, gy: Tensor) -> Tensor:
    """The loss's first-order change between the two ends of each move: gy·(y⁺ - y⁻), [b, j].

    Subtracting first matters: gy·y⁺ - gy·y⁻ would round away the digits that carry the derivative.

    Args:
        y: As for `difference`.
        ok: [b, j, ends].
        base: [b, d_out] the box at x.
        gy: [b, d_out] the loss's gradient.
    """
    moved = difference(y, None if ok is None else ok.unsqueeze(3), base)
    if moved.is_cuda:  # in one pass over memory; on a CPU this would be the slower way
        return torch.bmm(moved, gy.to(moved.dtype).unsqueeze(2)).squeeze(2)
    return moved.mul_(gy.unsqueeze(1)).sum(2)


def span(ends: Sequence[Tensor], ok: Tensor | None, x: Tensor) -> Tensor:
    """The way between the two ends of each move, as rounding and limits left it: x⁺ - x⁻.

    Args:
        ends: One or two tensors like x; the second is x itself if not given.
        ok: [..., ends].
        x: Where the moves started.
    """
    if ok is not None:
        ends = [torch.where(ok[..., side], end, x) for side, end in enumerate(ends)]
    return ends[0] - (ends[1] if len(ends) == 2 else x)


def clamped(points: Tensor, low: Tensor | None, high: Tensor | None) -> Tensor:
    """Points brought back inside the limits, if there are any."""
    return points if low is None else points.clamp(low, high)
