"""Asking a box, within a budget of evaluations and of time, and never outside its limits."""

import contextlib
import inspect
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from bondgrad.calling._function import RowFunction
from bondgrad.calling._limits import Limits
from bondgrad.calling._state_form import snapshot_owner
from bondgrad.errors import BoxError
from bondgrad.evaluators._driver import is_out_of_memory

PORTION = 512  # most rows in a call, other than to see how fast large calls are
COMPANY = 8  # rows of a call with several, where their number does not matter
AGAIN = 6  # times that a call is made again, where calls fail at random
SLICE = 1.0  # seconds that a call should take at most, so that an end of time is noticed


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
        self.by_place = False  # whether the noise is the same in every call, and another at every place in it
        self.remembers = False  # whether answers depend on the call before, once that is known
        self.eps = torch.finfo(self.dtype).eps  # of the answers, relative, once they are known
        self.floor = 0.0  # of its arithmetic, relative, once it is known
        self.quantum = torch.zeros(0, dtype=torch.float64)  # [d_out] once it is known; zero where there is none
        self.y = self.x.new_full((len(self.x), 0), math.nan)  # [n, d_out], filled in by `look`
        self.least, self.most = 1, PORTION  # rows that the box takes in a call
        self.refused: int | None = None  # rows of the smallest call that was too large for it
        self.flaky = 0  # calls, or rows, that failed and, asked again, did not
        self.times: dict[int, list[float]] = {}  # seconds of calls, by their rows
        self.seconds_per_call, self.seconds_per_row = 0.0, 0.0  # a call of n rows takes the one, and n times the other
        self.seed: int | None = None  # for a box that takes one; None: none, or a new one in every call if it must
        self._needs_seed = self.function.seed_position is not None and _needs_seed(fn)
        self.asked = 0  # rows of x
        self.errors: dict[str, int] = {}  # what it raised, and how often, since this was last cleared
        self._start = time.perf_counter()
        self._end = self._start + seconds
        owner: Any = snapshot_owner(fn)
        self._keeper = owner
        self._kept = None if owner is None else owner.snapshot()

    @property
    def rows(self) -> int:
        """Of x, how many."""
        return len(self.x)

    @property
    def usable(self) -> Tensor:
        """[n] the rows of x at which the box gave finite answers."""
        known = self.y.shape[1] > 0
        return (torch.isfinite(self.y).all(1) & known).nonzero().squeeze(1)

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
        flat = spread <= self.eps / 4 * scale
        return torch.where(flat, torch.where(scale > 0, scale, 1.0), spread)

    @property
    def rounding(self) -> Tensor:
        """[d_out] a change of this size may come from rounding, such as when rows are grouped into other calls.

        Once its floor is known, that is what it goes by: outputs with an offset are larger than what they say.
        """
        scale = self.scale
        if self.floor > 0:
            return max(2 * self.eps, 16 * self.floor) * scale
        noisy = torch.minimum(64 * self.eps * scale, torch.maximum(4 * self.noise, 2 * self.eps * scale))
        return torch.where(self.noise > 0, noisy, 64 * self.eps * scale)

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

    @property
    def at_once(self) -> int:
        """Rows of a call, so that it takes no more than a slice of time (or one row does)."""
        spare = max(SLICE - self.seconds_per_call, self.seconds_per_call)
        if self.seconds_per_row * self.most <= spare:
            return self.most
        return max(self.least, int(spare / self.seconds_per_row))

    def affordable(self) -> int:
        """Evaluations that may still be made, in calls as large as possible, given how long they take."""
        left = self.budget - self.function.evaluations
        each = self.seconds_per_row + self.seconds_per_call / self.at_once
        if each > 0:
            left = min(left, int(self.time_left() / each))
        return max(0, left)

    def affordable_calls(self) -> int:
        """Calls with few rows that there is time for."""
        each = self.seconds_per_call + self.seconds_per_row
        return int(self.time_left() / each) if each > 0 else self.budget

    def require_calls(self, calls: int) -> None:
        """Leave a measurement out if there is no time for so many calls with few rows."""
        if self.affordable_calls() < calls:
            raise LeftOut(f"the {self.affordable_calls():,} calls that there is time for do not reach")

    def learn_speed(self, rows: int, seconds: float) -> None:
        """From a call with so many rows, which took so long."""
        self.times.setdefault(rows, []).append(seconds)
        known = [(n, min(found)) for n, found in sorted(self.times.items())]
        (few, quick), (many, long) = known[-2:] if len(known) > 1 else known * 2  # the largest say most of larger ones
        self.seconds_per_row = max(0.0, long - quick) / (many - few) if many > few else 0.0
        self.seconds_per_call = max(0.0, quick - few * self.seconds_per_row)

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
        made = self.realise(points).to(self.dtype).to(self.device).clone()  # a box may write into what it is given
        seed = self.function.calls if self.seed is None and self._needs_seed else self.seed
        nearby = [c[rows.to(c.device)] for c in self.context]
        with contextlib.nullcontext() if self._default.type == "cpu" else self._default:
            y = self.function(made, *nearby, seed=seed)
        return y.double().cpu().clone()

    def workplace(self) -> AbstractContextManager[Any]:
        """Where what is measured is worked out: on the CPU, whatever the default."""
        return contextlib.nullcontext() if self._default.type == "cpu" else torch.device("cpu")

    def ask(self, points: Tensor, rows: Tensor) -> Tensor:
        """The box at points [n, d] near rows [n], in calls that it can take; NaN where it raised: [n, d_out]."""
        if len(points) > self.affordable():
            raise LeftOut
        parts, first = [], 0
        while first < len(points):
            part = slice(first, first + self.at_once)  # which an answer may teach to be less
            parts.append(self._answered(points[part], rows[part]))
            first += len(parts[-1])
        y = torch.cat(parts)
        for _ in range(AGAIN if self.flaky else 0):
            bad = (~torch.isfinite(y).all(1)).nonzero().squeeze(1)
            if len(bad) == 0 or len(bad) > self.affordable():
                break
            y[bad] = torch.cat([self._answered(points[i], rows[i]) for i in torch.split(bad, self.at_once)])
        return y

    def _answered(self, points: Tensor, rows: Tensor) -> Tensor:
        """One call, or, where it raises, as many as it takes to see which rows are at fault."""
        n = len(points)
        if n < self.least:  # in company, where the box does not take rows alone
            extra = torch.arange(self.least - n) % self.rows
            return self._answered(torch.cat((points, self.x[extra])), torch.cat((rows, extra)))[:n]
        failed = sum(self.errors.values())
        if not self._refuses(n):
            try:
                return self.call(points, rows)
            except Exception as error:
                crowded = is_out_of_memory(error)
                if not isinstance(error, BoxError) and (not crowded or n <= self.least):
                    raise
                if n <= self.least:
                    return self._failed(points, rows, error)
                if crowded:
                    self._refuse(n)
        half = n // 2
        y = torch.cat((self._answered(points[:half], rows[:half]), self._answered(points[half:], rows[half:])))
        # No row is at fault: is it their number, or chance?
        if sum(self.errors.values()) == failed and not self._refuses(n):
            with contextlib.suppress(LeftOut):
                whole = self._again(points, rows)
                if whole is None:
                    self._refuse(n)
        return y

    def _again(self, points: Tensor, rows: Tensor) -> Tensor | None:
        """A call that failed, made once more, or, of a box known to fail at random, some times more; None: in vain."""
        for _ in range(AGAIN if self.flaky else 1):
            with contextlib.suppress(BoxError):
                y = self.call(points, rows)
                self.doubt(1)
                return y
        return None

    def doubt(self, times: int) -> None:
        """So many failures were chance. What was taken for a limit of its calls before may have been no more."""
        if times > 0 and self.flaky == 0:
            self.refused, self.most = None, PORTION
        self.flaky += times

    def _failed(self, points: Tensor, rows: Tensor, error: Exception) -> Tensor:
        """The answer if it comes when a call that raised is made again; else NaN, and a note of the error."""
        with contextlib.suppress(LeftOut):
            again = self._again(points, rows)
            if again is not None:
                return again
        cause = error.__cause__
        name = type(cause).__name__ if cause is not None else "a wrong shape"
        self.errors[name] = self.errors.get(name, 0) + len(points)
        return torch.full((len(points), self.y.shape[1]), math.nan, dtype=torch.float64)

    def _refuses(self, n: int) -> bool:
        """Whether so many rows are known to be too many."""
        return n > self.least and self.refused is not None and n >= self.refused

    def _refuse(self, n: int) -> None:
        """So many rows are too many."""
        self.refused = n if self.refused is None else min(n, self.refused)
        self.most = min(self.most, max(self.least, n // 2))

    def learn(self, y: Tensor) -> None:
        """The width and the precision of the answers, from one of them."""
        self.eps = self.function.rounding or self.eps
        self.y = torch.full((self.rows, y.shape[1]), math.nan, dtype=torch.float64)
        self.noise = self.largest = self.quantum = torch.zeros(y.shape[1], dtype=torch.float64)

    def settle(self) -> None:
        """Ask a box that remembers about the same few rows, so that calls to be compared have the same past."""
        if self.remembers:
            some = self.usable[: max(COMPANY, self.least)]
            self.ask(self.x[some], some)

    def look(self) -> None:
        """Ask about the typical rows, or about as many as a tenth of the budget allows."""
        some = torch.arange(min(self.rows, max(2, self.affordable() // 10)))
        self.y[some] = self.ask(self.x[some], some)
        self.asked = len(some)

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


def _needs_seed(fn: Callable[..., Any]) -> bool:
    """Whether a function that takes a seed cannot be called without."""
    parameter = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn).parameters["seed"]
    return parameter.default is parameter.empty
