"""Asking a box, within a budget of evaluations and of time, and never outside its limits."""

import contextlib
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from bondgrad._arguments import Limits
from bondgrad._function import RowFunction, is_out_of_memory, keeper
from bondgrad.errors import BoxError

PORTION = 512  # most rows in a call, other than to see how fast large calls are
SLICE = 1.0  # seconds that a call should take at most, so that an end of time is noticed
FIRST = 8  # rows that are tried before a box is believed not to work


class LeftOut(Exception):  # noqa: N818 - it is no error
    """A measurement cannot be made: for the reason given, or because the budget does not reach."""


class Asker:
    """The box, its typical rows, and what may still be spent on questions.

    Points and answers are float64 on the CPU, whatever the box takes and gives. What it is given has the precision and
    the device of the typical rows, and lies within the limits: `realise` says what becomes of a point.

    Args:
        fn: The box.
        x: [N, d] typical rows, finite.
        keep: [n] those of them that are asked about; ranges go by all.
        context: [N, ...] each.
        limits: Or None.
        budget: Most evaluations.
        seconds: Most time.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        x: Tensor,
        keep: Tensor,
        context: tuple[Tensor, ...],
        limits: Limits | None,
        budget: int,
        seconds: float,
    ) -> None:
        self.function = RowFunction(fn, None)
        self.context, self.budget = tuple(c[keep.to(c.device)] for c in context), budget
        self.dtype, self.device = x.dtype, x.device
        low, high = (None, None) if limits is None else limits.like(x)
        self.low = None if low is None else low.double().cpu()  # [d], and numbers that the points can have, too
        self.high = None if high is None else high.double().cpu()
        self._default = torch.get_default_device()  # where the box makes tensors, if it does not say
        everything = self.realise(x.detach().double().cpu())  # [N, d]
        self.x = everything[keep]  # [n, d]
        self.lowest, self.highest = everything.amin(0), everything.amax(0)  # [d]
        self.spread = _spread(everything, self.low, self.high)  # [d]
        self.noise = torch.zeros(0, dtype=torch.float64)  # [d_out] standard deviation, once it is known
        self.largest = torch.zeros(0, dtype=torch.float64)  # [d_out] deviation from the mean that was seen
        self.shared = False  # whether all rows of a call have the same noise
        self.eps = torch.finfo(self.dtype).eps  # of the answers, relative, once they are known
        self.floor = 0.0  # of its arithmetic, relative, once it is known
        self.y = self.x.new_full((len(self.x), 0), math.nan)  # [n, d_out], filled in by `look`
        self.least, self.most = 1, PORTION  # rows that the box takes in a call
        self.seconds_per_row = 0.0
        self.asked = 0  # rows of x
        self.errors: dict[str, int] = {}  # what it raised, and how often, since this was last cleared
        self._start = time.perf_counter()
        self._end = self._start + seconds
        owner: Any = keeper(fn)
        self._keeper = owner
        self._kept = None if owner is None else owner.snapshot()

    @property
    def rows(self) -> int:
        """Of x, how many."""
        return len(self.x)

    @property
    def usable(self) -> Tensor:
        """[n] the rows of x at which the box gave finite answers."""
        return torch.isfinite(self.y).all(1).nonzero().squeeze(1)

    @property
    def scale(self) -> Tensor:
        """[d_out] how large the outputs are: root mean square."""
        y = self.y[self.usable]
        return y.square().mean(0).sqrt() if len(y) else torch.ones(self.y.shape[1], dtype=torch.float64)

    @property
    def output_spread(self) -> Tensor:
        """[d_out] standard deviation over the rows; of outputs that do not change, their size, or one."""
        y = self.y[self.usable]
        spread = y.std(0) if len(y) > 1 else torch.zeros_like(self.scale)
        scale = self.scale
        flat = spread <= 1e-12 * scale
        return torch.where(flat, torch.where(scale > 0, scale, 1.0), spread)

    @property
    def rounding(self) -> Tensor:
        """[d_out] a change of this size may come from rounding, such as when rows are grouped into other calls."""
        return max(64 * self.eps, 16 * self.floor) * self.scale

    def certain(self, n: int) -> Tensor:
        """[d_out] a difference between two means of n answers that is more than noise and rounding make.

        Nor does a single answer that lies far out make one.
        """
        chance = torch.maximum(6 * self.noise * math.sqrt(2 / n), 2.5 * self.largest / n)
        return torch.maximum(chance, self.rounding)

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self._start

    def time_left(self) -> float:
        """Seconds."""
        return max(0.0, self._end - time.perf_counter())

    def affordable(self) -> int:
        """Evaluations that may still be made, given how long one takes."""
        left = self.budget - self.function.evaluations
        if self.seconds_per_row > 0:
            left = min(left, int(self.time_left() / self.seconds_per_row))
        return max(0, left)

    def realise(self, points: Tensor) -> Tensor:
        """Points [..., d] as the box would be given them: rounded, and kept to the limits."""
        made = points.to(self.dtype).double()
        return made if self.low is None or self.high is None else made.clamp(self.low, self.high)

    def call(self, points: Tensor, rows: Tensor) -> Tensor:
        """One call with points [n, d], near rows [n] of x: [n, d_out]. Raises what the box raises."""
        tries = len(self.function.interfaces)  # with either kind of array, while it is not known which it takes
        if len(points) * tries > self.budget - self.function.evaluations or self.time_left() <= 0:
            raise LeftOut
        if self._keeper is not None:
            self._keeper.restore(self._kept)
        made = self.realise(points).to(self.dtype).to(self.device)
        nearby = [c[rows.to(c.device)] for c in self.context]
        with contextlib.nullcontext() if self._default.type == "cpu" else self._default:
            y = self.function(made, *nearby)
        return y.double().cpu().clone()

    def workplace(self) -> AbstractContextManager[Any]:
        """Where what is measured is worked out: on the CPU, whatever the default."""
        return contextlib.nullcontext() if self._default.type == "cpu" else torch.device("cpu")

    def ask(self, points: Tensor, rows: Tensor) -> Tensor:
        """The box at points [n, d] near rows [n], in calls that it can take; NaN where it raised: [n, d_out]."""
        at_once = self.most
        if self.seconds_per_row > 0:
            at_once = max(1, min(at_once, int(SLICE / self.seconds_per_row)))
        if len(points) > self.affordable():
            raise LeftOut
        parts = [self._answered(points[i : i + at_once], rows[i : i + at_once]) for i in range(0, len(points), at_once)]
        return torch.cat(parts)

    def _answered(self, points: Tensor, rows: Tensor) -> Tensor:
        """One call, or, where it raises, as many as it takes to see which rows are at fault."""
        n = len(points)
        if n < self.least:  # in company, where the box does not take rows alone
            extra = torch.arange(self.least - n) % self.rows
            return self._answered(torch.cat((points, self.x[extra])), torch.cat((rows, extra)))[:n]
        try:
            return self.call(points, rows)
        except Exception as error:
            crowded = is_out_of_memory(error)
            if not isinstance(error, BoxError) and (not crowded or n <= self.least):
                raise
            if crowded:
                self.most = min(self.most, max(self.least, n // 2))
            elif n <= self.least:
                cause = error.__cause__
                name = type(cause).__name__ if cause is not None else "a wrong shape"
                self.errors[name] = self.errors.get(name, 0) + n
                return torch.full((n, self.y.shape[1]), math.nan, dtype=torch.float64)
            half = n // 2
            return torch.cat((self._answered(points[:half], rows[:half]), self._answered(points[half:], rows[half:])))

    def meet(self) -> None:
        """The first questions: does it answer at all, alone and in company? Learns `least`, `most` and the width.

        Raises:
            BoxError: If it answers neither.
        """
        first: BoxError | None = None
        for row in range(min(self.rows, FIRST)):
            try:
                self._learn(self.call(self.x[row : row + 1], torch.tensor([row])))
                break
            except BoxError as error:
                first = first or error
            except LeftOut:
                raise (first or LeftOut()) from None
        else:
            assert first is not None
            several = torch.arange(FIRST) % self.rows
            try:
                self._learn(self.call(self.x[several], several))
            except (BoxError, LeftOut):
                raise first from first.__cause__
            self.least = 2
        same = torch.full((2,), row)
        try:
            self.call(self.x[same], same)
        except BoxError:
            self.most = 1
        start = time.perf_counter()  # not at the first call, which may have had to load something
        self.call(self.x[same[: self.least]], same[: self.least])
        self.seconds_per_row = (time.perf_counter() - start) / self.least

    def _learn(self, y: Tensor) -> None:
        """The width and the precision of the answers, from one of them."""
        self.eps = self.function.rounding or self.eps
        self.y = torch.full((self.rows, y.shape[1]), math.nan, dtype=torch.float64)
        self.noise = self.largest = torch.zeros(y.shape[1], dtype=torch.float64)

    def look(self) -> None:
        """Ask about the typical rows, or about as many as a tenth of the budget allows."""
        some = torch.arange(min(self.rows, max(2, self.affordable() // 10)))
        self.asked = len(some)
        self.y[some] = self.ask(self.x[some], some)

    def choose(self, count: int, generator: torch.Generator) -> Tensor:
        """[count] rows at which the box works: different ones, as far as there are."""
        usable = self.usable
        if len(usable) == 0:
            raise LeftOut
        order = usable[torch.randperm(len(usable), generator=generator)]
        return order[torch.arange(count) % len(order)]

    def synchronise(self) -> None:
        """Wait for work that was only queued, before a clock is read."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()


def _spread(x: Tensor, low: Tensor | None, high: Tensor | None) -> Tensor:
    """[d] how far each input of x [N, d] typically moves: its standard deviation, or what else there is to go by."""
    spread = x.std(0) if len(x) > 1 else torch.zeros(x.shape[1], dtype=x.dtype)
    size = x.abs().amax(0)
    other = torch.where(size > 0, size, 1.0)
    if low is not None and high is not None:
        room = (high - low) / 4
        other = torch.where(torch.isfinite(room), torch.minimum(other, room), other)
    return torch.where(spread > 1e-9 * size, spread, other)
