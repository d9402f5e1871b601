"""Evaluating a box near typical rows, within a budget of evaluations and of time, and never outside its limits."""

import contextlib
import time
from typing import Any

import torch
from torch import Tensor, nn

from bondgrad.calling._function import RowFunction, snapshot_owner
from bondgrad.calling._inputs import Limits
from bondgrad.calling._signature import parameters
from bondgrad.evaluators import Driver, Evaluator
from bondgrad.measuring._fault_tolerant_caller import FaultTolerantCaller
from bondgrad.measuring._moves import one_input_moved
from bondgrad.measuring._spread import Spread
from bondgrad.measuring._watched_thread import CallAbandoned, WatchedThread
from bondgrad.torch_support._precision import arithmetic, autocast_dtype

LIMIT_CLEARANCE = 0.3  # distance from its limits, in units of its spread, at which an input is moved to both sides
MOST_NUMBERS = 2**21  # most numbers in the points that are held in memory at a time: 16 MiB
GRACE = 1.0  # seconds beyond the time budget, and beyond twice its expected time, after which a call is given up


class MeasurementSkipped(Exception):  # noqa: N818 - it is no error
    """A measurement was not made, for the reason given."""


class BudgetExceeded(MeasurementSkipped):
    """A measurement was not made, or not finished, because the evaluations or the time left do not reach."""


class Sampler:
    """Evaluates a box at points near typical rows, as long as the budget of evaluations and of time lasts.

    Points and outputs are float64 on the CPU, whatever types the box takes and returns. The box is given points in the
    precision and on the device of the typical rows, within the limits: see `realise`. It runs in full precision, unless
    `full_precision` is switched off. A box with `snapshot()` and `restore()` is restored to its first state before
    every call.

    Args:
        function: The box.
        x: [N, d] typical rows, finite. Ranges and spreads are those of all of them.
        chosen: [n] the numbers of those rows near which the box is evaluated.
        context: [N, ...] each: further inputs of the box.
        limits: No point outside is evaluated.
        evaluator: Where rows are evaluated; None: in a thread of this process.
        budget: Most evaluations.
        seconds: Most time. A call in this process that takes longer is given up: see `hung`.
    """

    def __init__(
        self,
        function: RowFunction,
        x: Tensor,
        chosen: Tensor,
        context: tuple[Tensor, ...],
        limits: Limits,
        evaluator: Evaluator | None,
        budget: int,
        seconds: float,
    ) -> None:
        self._thread = WatchedThread(self._patience)
        self.function, self._driver = function, Driver(self._thread if evaluator is None else evaluator, once=True)
        self.calls_here = evaluator is None and x.device.type == "cpu"  # else the clock of `function` sees no call
        self._context = tuple(c[chosen.to(c.device)].to(x.device) for c in context)
        self.dtype, self.device = x.dtype, x.device
        self.low, self.high = (end.double().cpu() for end in limits.like(x))  # [d] infinite where there are no limits
        everything = self.realise(x.double().cpu())  # [N, d]
        self.x = everything[chosen]  # [n, d]
        self.lowest, self.highest = everything.aminmax(dim=0)  # [d]
        default, anywhere = torch.get_default_device(), contextlib.nullcontext[Any]()
        # Measurements create tensors on the CPU, whatever the default device; the box creates them on the latter.
        self.workplace = anywhere if default.type == "cpu" else torch.device("cpu")
        self._box_device = anywhere if default.type == "cpu" else default
        spread = Spread.of(everything)
        alike = torch.minimum(spread.typical, (self.high - self.low) / 4)
        self.spread = torch.where(spread.deviation > 0, spread.deviation, alike)  # [d] how far inputs typically move
        self.full_precision, self._autocast = True, autocast_dtype(x)
        self.seed: int | None = None  # given to a box that takes one; None: a new one per call if it requires one
        taken = parameters(function.fn.forward if isinstance(function.fn, nn.Module) else function.fn).get("seed")
        self._needs_seed = function.seed_position is not None and taken is not None and taken.default is taken.empty
        owner: Any = snapshot_owner(function.fn)
        self._owner, self._snapshot = owner, None if owner is None else owner.snapshot()
        self.caller = FaultTolerantCaller(self._send, self.x, self._driver.max_rows)
        self.evaluations, self.calls, self._budget = 0, 0, budget
        self._start, self._seconds = time.perf_counter(), seconds
        self.hung: CallAbandoned | None = None  # the call that was given up, after which nothing is evaluated

    def close(self) -> None:
        """End the thread in which rows are evaluated."""
        self._thread.close()

    @property
    def elapsed(self) -> float:
        """Seconds since this sampler was made."""
        return time.perf_counter() - self._start

    @property
    def time_left(self) -> float:
        """Seconds left of the time budget."""
        return 0.0 if self.hung else max(0.0, self._seconds - self.elapsed)

    @property
    def affordable(self) -> int:
        """Evaluations that may still be made, in calls as large as possible, given how long they take."""
        left, caller = self._budget - self.evaluations, self.caller
        each = caller.seconds_per_row + caller.seconds_per_call / caller.call_rows
        return max(0, min(left, int(self.time_left / each)) if each > 0 else left)

    @property
    def affordable_calls(self) -> int:
        """The number of calls with few rows for which there is time."""
        each = self.caller.seconds_per_call + self.caller.seconds_per_row
        return int(self.time_left / each) if each > 0 else self._budget

    def affordable_count(self, most: int, each: int, share: float = 1.0) -> int:
        """How many items of `each` evaluations a share of the budget left pays for, up to `most`; raises if none."""
        count = min(most, int(share * self.affordable) // each)
        if count < 1:
            raise self.shortage()
        return count

    def require(self, evaluations: int, calls: int = 0) -> None:
        """Raise `BudgetExceeded` unless so many evaluations, and so many calls with few rows, can still be made."""
        if self.affordable_calls < calls:
            raise BudgetExceeded(f"the {self.affordable_calls:,} calls that there is time for do not reach")
        if self.affordable < evaluations:
            raise self.shortage()

    def realise(self, points: Tensor) -> Tensor:
        """Points [..., d] as the box would be given them: rounded to its precision, and kept to the limits."""
        return points.to(self.dtype).double().clamp(self.low, self.high)

    def ask(self, points: Tensor, rows: Tensor) -> Tensor:
        """Outputs [r, ..., d_out] at points [r, ..., d] near rows [r] of x; NaN where the box raised."""
        lead, flat = points.shape[:-1], points.reshape(-1, points.shape[-1])
        self.require(len(flat))
        return self.caller.ask(flat, rows.repeat_interleave(len(flat) // len(rows))).view(*lead, -1)

    def ask_rows(self, rows: Tensor) -> Tensor:
        """Outputs [n, d_out] at rows [n] of x."""
        return self.ask(self.x[rows], rows)

    def ask_moved(self, rows: Tensor, inputs: Tensor, values: Tensor) -> Tensor:
        """Outputs [m, ..., d_out] at rows [m] of x, in each of which one of inputs [m] has values [m, ...]."""
        at_once = max(1, MOST_NUMBERS // (values[0].numel() * self.x.shape[1]))
        portions = zip(*(torch.split(t, at_once) for t in (rows, inputs, values.flatten(1))), strict=True)
        # Points are [m, 1, k, d].
        y = [self.ask(one_input_moved(self.x[r], i[:, None], v[:, :, None]), r) for r, i, v in portions]
        return torch.cat(y).view(*values.shape, -1)

    def either_side(self, rows: Tensor, inputs: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        """At rows [m] of x, the values of one of inputs [m] minus and plus each of steps [m, k], within the limits.

        A value close to a limit is first moved inwards, so that there is room on both sides.

        Returns:
            [m, k, 2] the values as the box would be given them, and [m, k] whether both are unaffected by the limits.
        """
        low, high = self.low[inputs], self.high[inputs]
        room = torch.minimum(LIMIT_CLEARANCE * self.spread[inputs], (high - low) / 4)
        middle = self.x[rows, inputs].clamp(low + room, high - room)[:, None]
        values = torch.stack((middle - steps, middle + steps), 2)
        low, high = low[:, None, None], high[:, None, None]
        return values.to(self.dtype).double().clamp(low, high), ((values >= low) & (values <= high)).all(2)

    def time_rows(self, rows: Tensor) -> bool:
        """Time one call with rows [n] of x. Returns False if it failed, also when repeated."""
        return self.caller.time(self.x[rows], rows)

    def time_with(self, evaluator: Evaluator, rows: Tensor) -> tuple[Tensor, float]:
        """Outputs [n, d_out] at rows [n] of x, evaluated by another evaluator, and the seconds that it took."""
        self.require(len(rows))
        start = time.perf_counter()
        return self._send(self.x[rows], rows, Driver(evaluator, once=True))[0], time.perf_counter() - start

    def _send(self, points: Tensor, rows: Tensor, driver: Driver | None = None) -> tuple[Tensor, float]:
        """Outputs [n, d_out] of one call with points [n, d] near rows [n], and the seconds that it took."""
        tries = len(self.function.interfaces)  # two, until it is known whether the box takes torch or numpy arrays
        if len(points) * tries > self._budget - self.evaluations or self.time_left <= 0:
            raise self.shortage()
        if self._owner is not None:
            self._owner.restore(self._snapshot)
        seed = self.calls if self.seed is None and self._needs_seed else self.seed
        made = self.realise(points).to(self.device, self.dtype)  # a copy: a box may write into what it is given
        nearby = tuple(c[rows.to(c.device)] for c in self._context)
        evaluations, calls, inside = self.function.evaluations, self.function.calls, self.function.seconds
        driver, start = driver or self._driver, time.perf_counter()
        try:
            with arithmetic(self.full_precision, self.device, self._autocast), self._box_device:
                y = driver.ask(self.function, made, nearby, seed=seed, purpose="probe").y.double().cpu().clone()
        except CallAbandoned as call:
            self.hung = call
            raise self.shortage() from None
        finally:  # an evaluator may call the box elsewhere, where its own counters are not seen
            self.evaluations += max(len(points), self.function.evaluations - evaluations)
            self.calls += max(1, self.function.calls - calls)
        # The work around a call can take longer than the box itself.
        return y, self.function.seconds - inside if self.calls_here else time.perf_counter() - start

    def _patience(self, rows: int) -> float:
        """Seconds after which a call with so many rows is given up."""
        return self.time_left + GRACE + 2 * (self.caller.seconds_per_call + rows * self.caller.seconds_per_row)

    def shortage(self) -> BudgetExceeded:
        """The error to raise, which says whether the evaluations or the time are short, or a call did not come back."""
        if self.hung is not None:
            rows = "1 row" if self.hung.rows == 1 else f"{self.hung.rows:,} rows"
            return BudgetExceeded(f"a call with {rows} did not come back within {self.hung.seconds:.3g} s")
        late = self.affordable < self._budget - self.evaluations or self.time_left <= 0
        why = "in the time left" if late else "of the budget"
        return BudgetExceeded(f"the {self.affordable:,} evaluations {why} do not reach")
