"""`detect` finds which outputs of a box depend on which inputs."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bondgrad.calling._elsewhere import chosen_box
from bondgrad.calling._function import RowFunction, snapshot_owner
from bondgrad.calling._inputs import Limits, check_callable, check_rows, context_rows
from bondgrad.calling._modules import in_eval_mode
from bondgrad.evaluators import Driver, Evaluator, Local
from bondgrad.measuring._statistics import normal_quantile
from bondgrad.structure._groups import colour, lower_bound
from bondgrad.structure.discovery._dependencies import SQRT2, Dependencies, find_dependencies
from bondgrad.structure.discovery._search_batch import SETTINGS, SearchBatch
from bondgrad.torch_support._precision import arithmetic


@dataclass(frozen=True, eq=False)
class Detection(Dependencies):
    """Which outputs depend on which inputs, how certain that is, and what it cost."""

    evaluations: int  # the number of rows that were evaluated
    calls: int  # the number of calls of the box

    # Probability that the pattern has at least one dependency that does not exist, for normal noise.
    false_alarm: ClassVar[float] = SETTINGS.false_alarm
    # Probability, at each row, to overlook a change of the size of `least`.
    miss: ClassVar[float] = SETTINGS.miss

    @property
    def least(self) -> Tensor:
        """[d_out] The detection limit: the change that is overlooked with probability `miss` at a row where it happens.

        References:
            L. Currie, "Limits for qualitative detection and quantitative determination", Analytical Chemistry, 1968.
        """
        return self.noise * SQRT2 * (SETTINGS.suspicion + normal_quantile(1 - self.miss))

    @property
    def groups(self) -> int:
        """Number of groups of inputs that can move together: a central gradient evaluates a row twice for each."""
        return int(colour(self.depends).max()) + 1

    @property
    def lower_bound(self) -> int:
        """The least possible number of groups: the largest number of inputs that one output depends on."""
        return lower_bound(self.depends)


def detect(
    fn: Callable[..., Any] | None,
    x: Tensor,
    *context: Tensor,
    limits: tuple[Any, Any] | None = None,
    evaluator: Evaluator | None = None,
    seed: int = 0,
) -> Detection:
    """Find out which outputs of a box depend on which inputs.

    Every input is moved by itself, at eight rows of x and over four distances, the longest to the farthest value that
    the input has in x. (An input that is nearly the same in all rows goes as far as a step of BOND would.) An output
    that changes by more than noise and rounding depends on it. The noise is measured first, by evaluating the same rows
    repeatedly. A noisy box is then evaluated in pairs, the moved row next to the row itself, so that drift cancels.
    Where a dependency was not certain at two rows, it is tested again. If so many dependencies showed at a single row
    that more must be unseen, there is another round, up to four.

    A dependency that shows at none of these rows is missed. One that is reported but does not exist costs evaluations
    later, and does not make gradients wrong.

    Args:
        fn: The box, [N, d] -> [N, d_out], in torch or in numpy. A module is in eval mode during the search.
            None: the box belongs to the evaluator.
        x: [N, d] typical rows; more than eight are better, for the ranges.
        context: Further inputs of fn, one entry per row.
        limits: (low, high): no point outside is evaluated.
        evaluator: Where rows are evaluated. None: in this process.
        seed: The seed for the choice of rows.

    Example:
        >>> found = detect(lambda x: x.cumsum(1), torch.randn(20, 4))
        >>> found.depends.int().tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    """
    fn = chosen_box(fn, evaluator)
    check_callable(fn)
    if snapshot_owner(fn) is not None:
        raise ValueError("detect is for boxes without memory: this one has snapshot() and restore()")
    check_rows(x)
    bounds = Limits((-math.inf, math.inf) if limits is None else limits, x.shape[1])
    asked_within = None if limits is None else bounds
    function, driver = RowFunction(fn, None), Driver(Local() if evaluator is None else evaluator, limits=asked_within)
    rows, contexts = bounds.clamped(x.detach()), context_rows(context, x.shape[:1])

    def evaluate(points: Tensor, which: Tensor) -> Tensor:
        shape = points.shape[:-1]
        nearby = tuple(c[which].repeat_interleave(shape[1:].numel(), 0) for c in contexts)
        return driver.ask(function, points.flatten(0, -2), nearby, purpose="structure").y.view(*shape, -1)

    def search() -> Dependencies:
        # Copies, since the box may write into its inputs, and may return the same tensor from every call.
        y = driver.ask(function, rows.clone(), tuple(c.clone() for c in contexts)).y.clone()
        row_bytes = rows[0].nbytes + y[0].nbytes + sum(c[0].nbytes for c in contexts)
        max_points = driver.portion(row_bytes, sys.maxsize, rows.device)
        eps = torch.finfo(rows.dtype).eps
        rounding = function.rounding or eps
        batch = SearchBatch(rows, y, evaluate, max_points, max(eps, rounding), rounding, *bounds.like(rows))
        return find_dependencies(batch, torch.Generator("cpu").manual_seed(seed))

    with arithmetic(True, rows.device, None), in_eval_mode(fn):
        found = driver.run(search)
    return Detection(**vars(found), evaluations=function.evaluations, calls=function.calls)
