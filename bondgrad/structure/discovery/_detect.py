"""Finding out which outputs depend on which inputs, by moving them."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from bondgrad.calling._function import RowFunction
from bondgrad.calling._inputs import check_callable, check_input, context_rows
from bondgrad.calling._limits import Limits
from bondgrad.calling._modules import in_eval_mode
from bondgrad.calling._state_form import snapshot_owner
from bondgrad.evaluators import Driver, Evaluator, Local, Request
from bondgrad.measuring._statistics import normal_quantile
from bondgrad.structure._colouring import colour, lower_bound
from bondgrad.structure.discovery._search_batch import SearchBatch, between, deviation
from bondgrad.torch_support._precision import arithmetic

POINTS = 8  # rows at which every input is moved in one round
ROUNDS = 4  # at most
UNSEEN = 1e-3  # of the dependencies may be missed, by estimate, before another round
FRACTIONS = (1, 1 / 2, 1 / 4, 1 / 64)  # of the way to the farthest value that the batch has of that input
REPEATS = 16  # of a row, to see the noise
SCREEN = 4.0  # standard deviations from which a change is looked at again
CERTAIN = 6.0  # and of one that is believed
AGAIN = 8  # times
SQRT2 = math.sqrt(2)  # a change has twice the variance of an output


@dataclass(frozen=True, eq=False)
class Detection:
    """Which outputs depend on which inputs, and how well that is known."""

    depends: Tensor  # [d_out, d] bool
    noise: Tensor  # [d_out] standard deviation of the outputs; of exact ones, what rounding may do
    evaluations: int  # spent
    calls: int  # spent
    unseen: float  # dependencies that showed at none of the rows, by estimate

    false_alarm: ClassVar[float] = 0.01  # chance that any dependency was reported that is none, for normal noise
    miss: ClassVar[float] = 0.01  # chance, at each row, to overlook a change of `least`

    @property
    def least(self) -> Tensor:
        """[d_out] See `miss`."""
        return self.noise * SQRT2 * (SCREEN + normal_quantile(1 - self.miss))

    @property
    def groups(self) -> int:
        """Groups of inputs that can move together: a central gradient costs twice as many evaluations a row."""
        return int(colour(self.depends).max()) + 1

    @property
    def lower_bound(self) -> int:
        """The least number of groups there could be: the most inputs that one output depends on."""
        return lower_bound(self.depends)


def detect(
    fn: Callable[..., Any],
    x: Tensor,
    *context: Tensor,
    limits: tuple[Any, Any] | None = None,
    evaluator: Evaluator | None = None,
    seed: int = 0,
) -> Detection:
    """Find out which outputs of a box depend on which inputs.

    Every input is moved by itself, at eight rows of x and over four distances, the longest to the farthest value that
    x has of this input. (An input that is nearly the same in all rows goes as far as BOND itself would.) What changes
    by more than noise and rounding do is a dependency. The noise is measured first, by asking the same rows repeatedly;
    a noisy box is then asked in pairs, moved and not moved next to each other, so that drift does no harm, and again
    about what did not show at two rows. If so many dependencies showed at a single row that more must be hidden, there
    is another round, up to four.

    A dependency that shows at none of these rows is missed. One that is reported but is none costs evaluations later,
    never correctness.

    Args:
        fn: The box, [N, d] -> [N, d_out], in torch or in numpy. A module is put into eval mode for the time being.
        x: [N, d] typical rows; more than eight are better, for the ranges.
        context: Further inputs of fn, one entry per row.
        limits: (low, high): no point outside is evaluated.
        evaluator: Where rows are evaluated. None: in this process.
        seed: Of the choice of rows.

    Example:
        >>> found = detect(lambda x: x.cumsum(1), torch.randn(20, 4))
        >>> found.depends.int().tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    """
    check_callable(fn)
    if snapshot_owner(fn) is not None:
        raise ValueError("detect is for boxes without memory: this one has snapshot() and restore()")
    if isinstance(x, Tensor) and x.ndim != 2:
        raise ValueError(f"x must be rows, [N, d], got {list(x.shape)}")
    check_input(x, x.shape[-1] if isinstance(x, Tensor) else 0)
    function, driver = RowFunction(fn, None), Driver(Local() if evaluator is None else evaluator)
    bounds = None if limits is None else Limits(limits, x.shape[1])
    rows = x.detach() if bounds is None else bounds.clamped(x.detach())
    contexts = context_rows(context, x.shape[:1])

    def evaluate(points: Tensor, which: Tensor) -> Tensor:
        shape = points.shape[:-1]
        nearby = tuple(c[which].repeat_interleave(shape[1:].numel(), 0) for c in contexts)
        return driver.ask(Request(function, points.view(-1, points.shape[-1]), nearby, purpose="structure")).view(
            *shape, -1
        )

    with arithmetic(True, rows.device, None), in_eval_mode(fn):
        y = driver.run(lambda: driver.ask(Request(function, rows.clone(), tuple(c.clone() for c in contexts))).clone())
        low, high = (None, None) if bounds is None else bounds.like(rows)
        row_bytes = rows[0].nbytes + y[0].nbytes + sum(c[0].nbytes for c in contexts)
        eps = torch.finfo(rows.dtype).eps
        rounding = function.rounding or eps

        def work() -> Dependencies:
            most = driver.portion(row_bytes, sys.maxsize, rows.device)
            batch = SearchBatch(rows, y, evaluate, most, max(eps, rounding), rounding, low, high)
            return find_dependencies(batch, torch.Generator("cpu").manual_seed(seed))

        found = driver.run(work)
    return Detection(found.depends.cpu(), found.noise.cpu(), function.evaluations, function.calls, found.unseen)


class Dependencies(NamedTuple):
    """See `Detection`."""

    depends: Tensor  # [d_out, d] bool
    noise: Tensor  # [d_out]
    unseen: float
    heard: float  # fraction of them about which anything was heard


def find_dependencies(batch: SearchBatch, generator: torch.Generator) -> Dependencies:
    """Which outputs depend on which inputs. Where nothing was heard, they may."""
    seen: Responses | None = None
    paired = False
    for _ in range(ROUNDS):
        rows = batch.choose(POINTS, generator)
        noise, steady = measure_noise(batch, rows)
        paired |= not steady
        fractions = batch.x.new_tensor(FRACTIONS)[torch.arange(len(rows), device=batch.x.device) % len(FRACTIONS)]
        points = between(batch.x[rows], batch.far(rows), fractions[:, None])
        more = responses(batch, rows, points, noise, paired)
        seen = more if seen is None else seen.joined(more)
        unseen = seen.hidden()
        if unseen <= UNSEEN * float((seen.times > 0).sum()):
            break
    assert seen is not None
    depends = seen.largest > SCREEN
    doubtful = depends & (seen.times < 2)
    if paired and bool(doubtful.any()):
        depends = (depends & ~doubtful) | confirmed(batch, seen, doubtful)
    silent = seen.heard == 0  # every comparison failed
    pooled = seen.noise.square().mean(0).sqrt()
    return Dependencies(depends | silent, pooled, unseen, 1 - float(silent.double().mean()))


def measure_noise(batch: SearchBatch, rows: Tensor) -> tuple[Tensor, bool]:
    """Standard deviation [r, d_out] of the outputs when rows [r] are asked again and again.

    Also returns whether there is none to speak of: if the answers are also those of the forward pass.
    """
    x, y = batch.x[rows], batch.y[rows]
    repeats = batch.ask(x[:, None, None].expand(-1, REPEATS, 1, -1), rows).squeeze(2)  # [r, REPEATS, d_out]
    # Between one time and the next, which slow drift does not change. Some rows may be noisier than others.
    own = deviation(repeats.diff(dim=1), (1,))  # [r, d_out]
    pooled = own.square().mean(0).sqrt()
    rounding = batch.rounding_noise()(y, y)
    # Where rows stand in a batch may change their last digits, and that is all that may change.
    steady = not bool(((repeats - y[:, None]).abs().nan_to_num(0) > SCREEN * rounding[:, None]).any())
    return torch.maximum(torch.maximum(own, pooled), rounding), steady


class Responses(NamedTuple):
    """How the outputs changed when inputs were moved one by one, at r rows."""

    rows: Tensor  # [r] which of the batch
    points: Tensor  # [r, d] where their inputs were moved to
    noise: Tensor  # [r, d_out] standard deviation of the outputs there
    largest: Tensor  # [d_out, d] change, in standard deviations
    where: Tensor  # [d_out, d] of r, the row of the largest change
    times: Tensor  # [d_out, d] rows at which there certainly was one
    heard: Tensor  # [d_out, d] rows at which both answers came

    def joined(self, more: "Responses") -> "Responses":
        """Both together."""
        return Responses(
            torch.cat((self.rows, more.rows)),
            torch.cat((self.points, more.points)),
            torch.cat((self.noise, more.noise)),
            torch.maximum(self.largest, more.largest),
            torch.where(more.largest > self.largest, more.where + len(self.rows), self.where),
            self.times + more.times,
            self.heard + more.heard,
        )

    def hidden(self) -> float:
        """Dependencies that showed nowhere, estimated from those that showed once or twice (Chao 1984)."""
        once, twice = (int((self.times == n).sum()) for n in (1, 2))
        return once * (once - 1) / (2 * (twice + 1))


def responses(batch: SearchBatch, rows: Tensor, points: Tensor, noise: Tensor, paired: bool) -> Responses:
    """Move inputs by themselves, and see how the outputs change.

    Args:
        batch: The box.
        rows: [r] which rows are moved.
        points: [r, d] where each input is moved to.
        noise: [r, d_out] standard deviation of the outputs.
        paired: Whether to ask about the row itself beside every moved one, or to believe `batch.y`.
    """
    x, base = batch.x[rows], torch.where(torch.isfinite(batch.y[rows]), batch.y[rows], math.nan)
    (r, d), d_out = x.shape, base.shape[1]
    largest = torch.zeros(d_out, d, dtype=base.dtype, device=x.device)
    where, times, heard = (torch.zeros(d_out, d, dtype=torch.long, device=x.device) for _ in range(3))
    rounding = batch.rounding_noise()
    ends = 2 if paired else 1
    at_once = max(1, batch.most // (r * ends))
    for first in range(0, d, at_once):
        inputs = slice(first, min(d, first + at_once))
        count = inputs.stop - first
        moved = x[:, None, None].expand(r, count, ends, d).clone(memory_format=torch.contiguous_format)
        moved[:, :, 0].diagonal(first, 1, 2).copy_(points[:, inputs])
        y = batch.ask(moved, rows)  # [r, count, ends, d_out]
        y0, y1 = y[:, :, 0], y[:, :, 1] if paired else base[:, None]
        change = (y0 - y1).abs() / (SQRT2 * torch.maximum(noise[:, None], rounding(y0, y1)))
        heard[:, inputs] = torch.isfinite(y0 - y1).sum(0).T
        change.nan_to_num_(0, math.inf, 0)  # 0/0 is an output that is always zero
        largest[:, inputs], where[:, inputs] = (t.T for t in change.max(0))
        times[:, inputs] = (change > CERTAIN).sum(0).T
    return Responses(rows, points, noise, largest, where, times, heard)


def confirmed(batch: SearchBatch, seen: Responses, doubtful: Tensor) -> Tensor:
    """Which of the doubtful dependencies [d_out, d] are seen again, at the row where each was seen best."""
    o, i = doubtful.nonzero().unbind(1)
    d = doubtful.shape[1]
    moves, which = torch.unique(seen.where[o, i] * d + i, return_inverse=True)  # [k] rows and inputs; [doubtful] which
    at, moved = moves // d, moves % d
    threshold = normal_quantile(1 - Detection.false_alarm / (2 * len(o)))
    strength = []
    if batch.whole:  # all rows are moved to ask about one
        at_once, everywhere = 1, torch.arange(len(seen.rows), device=o.device)
    else:
        at_once, everywhere = max(1, batch.most // (2 * AGAIN)), None
    for first in range(0, len(moves), at_once):
        part = slice(first, first + at_once)
        r = at[part] if everywhere is None else everywhere
        j = moved[part].expand(len(r))
        points = batch.x[seen.rows[r]][:, None, None].expand(-1, AGAIN, 2, -1).clone()
        points[torch.arange(len(r), device=r.device), :, 0, j] = seen.points[r, j, None]
        y = batch.ask(points, seen.rows[r])  # [k, AGAIN, 2, d_out]
        change = y[:, :, 0] - y[:, :, 1]
        # Of an output that now and then jumps, the noise may show here only.
        noise = torch.maximum(seen.noise[r], change.std(1).nan_to_num(0) / SQRT2)
        again = change.nanmean(1).abs() * math.sqrt(AGAIN) / (SQRT2 * noise)
        strength.append(again if everywhere is None else again[at[part]])
    result = torch.zeros_like(doubtful)
    result[o, i] = torch.cat(strength)[which, o] > threshold
    return result
